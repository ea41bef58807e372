"""Shared memory between ranks: it never has a name, so that nothing is left however ranks end.

A segment lives as long as a process has it open or mapped. Another process gets its descriptor over
a socket, or opens it through the process that has it.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world.transport import Released

FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory
_OPEN = os.O_RDWR | os.O_CLOEXEC


def empty() -> int:
    """New memory of no byte that grows as a file does: a file descriptor of the caller's.

    Raises:
        UsageError: this system has no POSIX shared memory in files.
        MemoryError: it gives none to this process.
    """
    if not FOLDER.is_dir():
        raise UsageError(f"ranks share memory through {FOLDER}, which this system lacks")
    try:
        return _unnamed()
    except OSError as error:
        raise MemoryError(f"{FOLDER} gives this process no memory ({error.strerror})") from None


def create(size: int) -> int:
    """New memory of zeros: a file descriptor of the caller's.

    Args:
        size: bytes, 1 or more; all of them are set aside at once.

    Raises:
        UsageError: this system has no POSIX shared memory in files.
        MemoryError: there is no room for it.
    """
    handle = empty()
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.close(handle)
        room = os.statvfs(FOLDER)
        raise MemoryError(
            f"{FOLDER} has {room.f_bavail * room.f_frsize:,} bytes free and cannot hold "
            f"{size:,} more ({error.strerror})"
        ) from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def place(handle: int) -> list[int]:
    """Where other processes find a segment while this one has it open, for `attach`.

    Returns:
        process, descriptor and inode.
    """
    return [os.getpid(), handle, os.fstat(handle).st_ino]


def attach(place: Sequence[int], size: int) -> int:
    """A file descriptor of a segment that another process of this user has open.

    Args:
        place: as `place` said there.
        size: its bytes.

    Raises:
        Released: that process has ended.
        UsageError: it cannot be opened, or is no segment of this user and size.
    """
    process, number, inode = place
    path = Path(f"/proc/{process:d}/fd/{number:d}")
    try:
        # Looked at before it is opened: to open a pipe could take for ever.
        found, home = path.stat(), FOLDER.stat()
        told = (found.st_dev, found.st_ino, found.st_uid, found.st_size)
        if told != (home.st_dev, inode, os.geteuid(), size):
            raise UsageError(
                f"{path} is no segment of {size} bytes of user {os.geteuid()}: it has "
                f"{found.st_size} of user {found.st_uid}"
            )
        return os.open(path, _OPEN)
    except FileNotFoundError:
        raise Released from None
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None


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


def _unnamed() -> int:
    """A new file without a name; one whose name goes at once where there is no such thing."""
    try:
        return os.open(FOLDER, os.O_TMPFILE | _OPEN, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR}:
            raise
    path = FOLDER / f"equivalence-{secrets.token_hex(16)}"
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _OPEN, 0o600)
    path.unlink()
    return handle
