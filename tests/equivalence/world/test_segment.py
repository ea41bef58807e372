"""Shared memory has mode 0600 and no name."""

import errno
import os
from pathlib import Path

import pytest
import torch

from equivalence.errors import UsageError
from equivalence.world import parcel, segment
from equivalence.world.transport import Released


def test_a_segment_is_private_to_its_user_and_zero() -> None:
    """A new segment has mode 0600, no name, and zeros."""
    handle = segment.create(5000)
    found = os.fstat(handle)
    assert (found.st_mode & 0o7777, found.st_nlink, found.st_size) == (0o600, 0, 5000)
    assert not segment.mapped(handle, 5000).any()


def test_a_system_without_nameless_files_takes_the_name_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once."""
    made = os.open

    def unable(path: Path, flags: int, mode: int) -> int:
        if path == tmp_path:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return made(path, flags, mode)

    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "open", unable)
    handle = segment.create(3)
    assert list(tmp_path.iterdir()) == []
    assert segment.mapped(handle, 3).tolist() == [0, 0, 0]


def test_two_mappings_are_one_memory() -> None:
    """What one rank writes, another that attached reads, also after the first has closed it."""
    handle = segment.create(8)
    place = segment.place(handle)
    second = segment.mapped(segment.attach(place, 8), 8)
    private = segment.mapped(segment.attach(place, 8), 8, private=True)
    first = segment.mapped(handle, 8)
    first[3] = 9
    private[4] = 1
    assert second.tolist() == [0, 0, 0, 9, 0, 0, 0, 0]


def test_no_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is a MemoryError with both numbers, and leaves no descriptor."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        MemoryError, match=r"has [\d,]+ bytes free and cannot hold 70,000 more \(No space"
    ):
        segment.create(70_000)
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EMFILE])
def test_memory_that_cannot_be_made_is_one_sentence(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A /dev/shm that is read-only, and a process that may open no more files."""

    def closed(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(MemoryError) as caught:
        segment.create(1)
    told = f"{segment.FOLDER} gives this process no memory ({os.strerror(number)})"
    assert str(caught.value) == told


def test_an_interrupt_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C while memory is set aside."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segment.create(70_000)
    assert descriptors() == before


def test_a_system_without_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the folder there is a sentence."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "none")
    with pytest.raises(UsageError, match="which this system lacks"):
        segment.create(1)


def test_only_announced_memory_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file, another inode, another size and another user's memory are refused."""
    file, handle = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR), segment.create(8)
    os.write(file, bytes(8))
    process, number, inode = place = segment.place(handle)
    for odd, size in (
        (segment.place(file), 8),
        ([process, number, inode + 1], 8),
        (place, 9),
    ):
        with pytest.raises(UsageError, match=rf"is no segment of {size} bytes of user "):
            segment.attach(odd, size)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UsageError, match="of 8 bytes of user 12345: it has 8 of user "):
            segment.attach(place, 8)
    os.close(file)
    os.close(handle)
    with pytest.raises(Released):
        segment.attach(place, 8)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "u8": torch.arange(5, dtype=torch.uint8),
        "e4m3": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 3),
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "odd": torch.tensor([2, 0, 3, 255], dtype=torch.uint8).view(torch.bool)[::2],
        "turned": torch.arange(6, dtype=torch.int64).view(2, 3).t(),
        "none": torch.empty(0, 4, dtype=torch.int32),
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds; bools byte for byte, which torch copies as 0 or 1."""
    plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return plain.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("told", [False, True])
def test_a_parcel_gives_the_same_bits(told: bool) -> None:  # noqa: FBT001 - a parameter
    """Tensors of every kind come out of a parcel as they went in, by descriptor or by place."""
    given = _tensors()
    layout, handle = parcel.pack(given)
    assert handle is not None
    if told:
        layout["place"] = segment.place(handle)
        found = parcel.unpack(layout, None)
        os.close(handle)
    else:
        found = parcel.unpack(layout, handle)
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8),
            _bytes(tensor),
        )
        assert not tensor.numel() or not found[name].data_ptr() % 256


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"at": 256}, r"'u8' is uint8 \[5\] at byte 256: it does not fit into 256 bytes"),
        ({"at": -256}, "at byte -256"),
        ({"at": 1}, "at byte 1"),
        ({"shape": [257]}, r"\[257\] at byte 0"),
        ({"shape": [-1, -5]}, r"\[-1, -5\] at byte 0"),
        ({"dtype": "Tensor"}, "'u8' is Tensor: ranks hand over bool, uint8, "),
    ],
)
def test_a_parcel_is_read_within_its_memory(part: dict[str, object], told: str) -> None:
    """A place outside, a shape that is none and a name that is no dtype are refused."""
    layout, handle = parcel.pack({"u8": torch.arange(5, dtype=torch.uint8)})
    layout["parts"][0] |= part
    with pytest.raises(UsageError, match=told):
        parcel.unpack(layout, handle)


def test_a_parcel_that_cannot_be_packed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, and a dtype that nobody reads is refused before."""
    before = descriptors()

    def broken(handle: int, *_: object) -> None:
        os.close(handle)
        raise MemoryError("no map")

    monkeypatch.setattr(segment, "mapped", broken)
    with pytest.raises(MemoryError, match="no map"):
        parcel.pack(_tensors())
    assert descriptors() == before
    strange = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(UsageError, match="'q' is bits8: ranks hand over bool"):
        parcel.pack({"q": strange})


def test_a_parcel_of_nothing_needs_no_memory() -> None:
    """No byte, no segment."""
    layout, handle = parcel.pack({"none": torch.empty(0)})
    assert handle is None
    assert parcel.unpack(layout, handle)["none"].shape == (0,)


def test_a_parcel_without_its_memory_is_refused() -> None:
    """A layout alone is no parcel."""
    layout, handle = parcel.pack(_tensors())
    assert handle is not None
    os.close(handle)
    with pytest.raises(UsageError, match="came without its memory"):
        parcel.unpack(layout, None)
