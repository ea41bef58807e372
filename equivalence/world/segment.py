"""Shared memory between ranks: random names, mode 0600, and no name that outlives its use.

A segment has a name only until every rank has mapped it. All names of a world begin with its tag,
so that whoever notices the end of a world can remove what a killed rank left behind: names in
shared memory, and one private folder.
"""

import mmap
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from equivalence.errors import UsageError

FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory
PREFIX = "equivalence-"


def fresh_tag() -> str:
    """What all names of one world begin with: nobody else can guess it."""
    return f"{PREFIX}{secrets.token_hex(8)}"


def create(size: int, *, tag: str) -> tuple[Path, int]:
    """New memory of zeros, with a name.

    Args:
        size: bytes, 1 or more; all of them are set aside at once.
        tag: of the world.

    Returns:
        its path and an open file descriptor; both are the caller's to release.

    Raises:
        UsageError: this system has no POSIX shared memory in files.
        MemoryError: there is no room for it.
    """
    if not FOLDER.is_dir():
        raise UsageError(f"ranks share memory through {FOLDER}, which this system lacks")
    path = FOLDER / f"{tag}-{secrets.token_hex(8)}"
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        release(path)
        os.close(handle)
        room = os.statvfs(FOLDER)
        raise MemoryError(
            f"{FOLDER} has {room.f_bavail * room.f_frsize:,} bytes free and cannot hold "
            f"{size:,} more ({error.strerror})"
        ) from None
    except BaseException:
        release(path)
        os.close(handle)
        raise
    return path, handle


def nameless(size: int, *, tag: str) -> int:
    """New memory of zeros whose name is gone already: a file descriptor to hand over."""
    path, handle = create(size, tag=tag)
    release(path)
    return handle


def attach(path: Path, size: int) -> int:
    """A file descriptor of a segment that another rank of this user made.

    Raises:
        UsageError: it is none, belongs to somebody else or has another size.
    """
    if path.parent != FOLDER or not path.name.startswith(PREFIX):
        raise UsageError(f"{path} names no segment: it would be {FOLDER}/{PREFIX}...")
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None
    found = os.fstat(handle)
    if found.st_uid != os.geteuid() or found.st_size != size:
        os.close(handle)
        raise UsageError(
            f"{path} has {found.st_size} bytes of user {found.st_uid}: "
            f"{size} bytes of user {os.geteuid()} were announced"
        )
    return handle


def memory(handle: int, size: int, *, private: bool = False) -> mmap.mmap:
    """The mapped memory of a descriptor, which is closed.

    Args:
        handle: of a segment.
        size: its bytes, 1 or more.
        private: whether what is written stays in this process.
    """
    try:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        return mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(handle)


def mapped(handle: int, size: int, *, private: bool = False) -> Tensor:
    """The memory of a descriptor, which is closed, as u8 [size]; it lasts as long as a tensor.

    Args:
        handle: of a segment.
        size: its bytes, 1 or more.
        private: whether what is written stays in this process.
    """
    return torch.frombuffer(memory(handle, size, private=private), dtype=torch.uint8)


def release(path: Path) -> None:
    """Take a segment's name away; what has it mapped keeps the memory."""
    path.unlink(missing_ok=True)


def sweep(tag: str) -> list[str]:
    """Take away every name that a world left; they are returned."""
    left = sorted(FOLDER.glob(f"{tag}-*"))
    for path in left:
        release(path)
    return [path.name for path in left]


def folder(tag: str) -> str:
    """A new folder of a world, for the files by which process groups meet, that nobody else opens.

    Args:
        tag: of the world.
    """
    path = _folder(tag)
    path.mkdir(mode=0o700)
    return str(path)


def clean(tag: str) -> None:
    """Take away everything that a world left: its names and its folder."""
    sweep(tag)
    shutil.rmtree(_folder(tag), ignore_errors=True)


def _folder(tag: str) -> Path:
    return Path(tempfile.gettempdir()) / tag
