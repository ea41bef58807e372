"""Shared memory has random names and mode 0600, and its names go."""

import errno
import os
from pathlib import Path

import pytest
import torch

from equivalence.errors import UsageError
from equivalence.world import parcel, segment


@pytest.fixture
def tag() -> str:
    """A world's tag."""
    return segment.fresh_tag()


def test_a_segment_is_private_to_its_user_and_zero(tag: str) -> None:
    """A new segment has mode 0600, its world's tag, a name nobody guesses, and zeros."""
    path, handle = segment.create(5000, tag=tag)
    other, second = segment.create(1, tag=tag)
    try:
        assert path.stat().st_mode & 0o7777 == 0o600
        assert path.name.startswith(f"{tag}-")
        assert len(path.name) >= len(tag) + 16
        assert path != other
        assert not segment.mapped(os.dup(handle), 5000).any()
    finally:
        os.close(handle)
        os.close(second)
        assert sorted(segment.sweep(tag)) == sorted([path.name, other.name])
    assert segment.sweep(tag) == []


def test_tags_differ() -> None:
    """No two worlds share names."""
    assert segment.fresh_tag() != segment.fresh_tag()


def test_two_mappings_are_one_memory(tag: str) -> None:
    """What one rank writes, another that attached by name reads, also after the name has gone."""
    path, handle = segment.create(8, tag=tag)
    first = segment.mapped(handle, 8)
    second = segment.mapped(segment.attach(path, 8), 8)
    private = segment.mapped(segment.attach(path, 8), 8, private=True)
    segment.release(path)
    segment.release(path)
    first[3] = 9
    private[4] = 1
    assert second.tolist() == [0, 0, 0, 9, 0, 0, 0, 0]
    assert not path.exists()


def test_no_room_is_one_sentence(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is a MemoryError with both numbers, and leaves no name."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        MemoryError, match=r"has [\d,]+ bytes free and cannot hold 70,000 more \(No space"
    ):
        segment.create(70_000, tag=tag)
    assert segment.sweep(tag) == []


def test_an_interrupt_leaves_no_name(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C while memory is set aside takes the name away."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segment.create(70_000, tag=tag)
    assert segment.sweep(tag) == []


def test_a_system_without_it_is_told(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the folder there is a sentence."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "none")
    with pytest.raises(UsageError, match="which this system lacks"):
        segment.create(1, tag=tag)


def test_only_announced_memory_is_attached(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path elsewhere, a link, another size and a missing name are refused."""
    path, handle = segment.create(8, tag=tag)
    os.close(handle)
    link = path.with_name(f"{tag}-link")
    link.symlink_to(path)
    try:
        with pytest.raises(UsageError, match="names no segment"):
            segment.attach(tmp_path / path.name, 8)
        with pytest.raises(UsageError, match="names no segment"):
            segment.attach(path.with_name("other"), 8)
        with pytest.raises(UsageError, match="cannot be opened"):
            segment.attach(link, 8)
        with pytest.raises(UsageError, match=r"has 8 bytes .* 9 bytes"):
            segment.attach(path, 9)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UsageError, match="of user 12345 were announced"):
            segment.attach(path, 8)
    finally:
        segment.sweep(tag)
    with pytest.raises(UsageError, match="cannot be opened: No such file"):
        segment.attach(path, 8)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "u8": torch.arange(5, dtype=torch.uint8),
        "e4m3": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 3),
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "turned": torch.arange(6, dtype=torch.int64).view(2, 3).t(),
        "none": torch.empty(0, 4, dtype=torch.int32),
    }


@pytest.mark.parametrize("named", [False, True])
def test_a_parcel_gives_the_same_bits(tag: str, named: bool) -> None:  # noqa: FBT001 - a parameter
    """Tensors of every kind come out of a parcel as they went in, by descriptor or by name."""
    given = _tensors()
    layout, handle = parcel.pack(given, tag=tag, named=named)
    if named:
        assert handle is not None
        os.close(handle)
        handle = None
    found = parcel.unpack(layout, handle)
    parcel.discard(layout)
    assert segment.sweep(tag) == []
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
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
def test_a_parcel_is_read_within_its_memory(tag: str, part: dict[str, object], told: str) -> None:
    """A place outside, a shape that is none and a name that is no dtype are refused."""
    layout, handle = parcel.pack({"u8": torch.arange(5, dtype=torch.uint8)}, tag=tag)
    layout["parts"][0] |= part
    with pytest.raises(UsageError, match=told):
        parcel.unpack(layout, handle)


def test_a_parcel_that_cannot_be_packed_leaves_nothing(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a name nor a descriptor, and a dtype that nobody reads is refused before."""
    before = descriptors()

    def broken(handle: int, *_: object) -> None:
        os.close(handle)
        raise MemoryError("no map")

    monkeypatch.setattr(segment, "mapped", broken)
    with pytest.raises(MemoryError, match="no map"):
        parcel.pack(_tensors(), tag=tag, named=True)
    assert segment.sweep(tag) == []
    assert descriptors() == before
    strange = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(UsageError, match="'q' is bits8: ranks hand over bool"):
        parcel.pack({"q": strange}, tag=tag)


def test_a_world_has_a_folder_of_its_user_alone(tag: str) -> None:
    """It goes with the world's names."""
    folder = Path(segment.folder(tag))
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "gloo").touch()
    segment.clean(tag)
    assert not folder.exists()


def test_a_parcel_of_nothing_needs_no_memory(tag: str) -> None:
    """No byte, no segment."""
    layout, handle = parcel.pack({"none": torch.empty(0)}, tag=tag)
    assert handle is None
    assert parcel.unpack(layout, handle)["none"].shape == (0,)


def test_a_parcel_without_its_memory_is_refused(tag: str) -> None:
    """A layout alone is no parcel."""
    layout, handle = parcel.pack(_tensors(), tag=tag)
    assert handle is not None
    os.close(handle)
    with pytest.raises(UsageError, match="came without its memory"):
        parcel.unpack(layout, None)
