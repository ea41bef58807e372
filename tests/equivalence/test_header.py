"""Headers: read with the standard library, checked against the file's size before anything else."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from equivalence import header
from equivalence.errors import InvalidCase
from equivalence.header import Entry, Header


def test_a_header_is_names_metadata_and_where_the_bytes_begin(tmp_path: Path) -> None:
    """Entries, metadata and the offset of the data come back as they were written."""
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}
    tiny.write(path, {"__metadata__": {"a": "b"}, "x": entry}, b"\0" * 8)
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert header.read(path) == Header(
        tensors={"x": Entry(dtype="I32", shape=(2,), begin=0, end=8)},
        metadata={"a": "b"},
        data=8 + length,
    )


def test_a_file_without_tensors_has_a_header(tmp_path: Path) -> None:
    """No tensor is no fault of a header."""
    path = tmp_path / "a.safetensors"
    tiny.write(path, {}, b"")
    assert header.read(path) == Header(tensors={}, metadata={}, data=10)


@pytest.mark.parametrize(
    ("metadata", "name", "means"),
    [
        ({"equivalence": "{}"}, "x", True),
        ({"format": "pt"}, "x", False),
        ({"format": "pt"}, "inputs.x", False),
        ({"equivalencd": '{"digests": {}}'}, "inputs.x", True),
    ],
)
def test_a_file_means_to_be_a_case_by_its_key_or_what_it_holds(
    metadata: dict[str, str],
    name: str,
    means: bool,  # noqa: FBT001 - a table's cell
    tmp_path: Path,
) -> None:
    """A case whose key was damaged is still one, and so cannot vanish from a folder."""
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    tiny.write(path, {"__metadata__": metadata, name: entry}, b"\0")
    assert header.is_case(path) is means


def test_a_dtype_of_others_is_left_to_them(tmp_path: Path) -> None:
    """A foreign file with four-bit values has a readable header and is no case."""
    path = tmp_path / "a.safetensors"
    tiny.write(path, {"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"\0\0")
    assert not header.is_case(path)


def test_a_header_of_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """One byte above 16 MiB is refused by its length alone."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", header.MOST_HEADER_BYTES + 1))
    with pytest.raises(InvalidCase, match="a header of 16,777,217 bytes; at most 16,777,216"):
        header.read(path)


def test_reading_a_header_imports_no_torch() -> None:
    """A test session without cases does not pay for torch."""
    code = "import sys, equivalence.header; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)  # noqa: S603 - our own words
    assert done.returncode == 0


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses is an InvalidCase with the system's words."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidCase) as caught:
        header.read(path)
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"


def test_a_line_names_its_file_once_and_escaped() -> None:
    """A reason that already names the file does not name it again."""
    path = Path("a\nb\x1b.safetensors")
    once = header.invalid(path, "is odd")
    assert str(once) == "a\\nb\\x1b.safetensors: is odd"
    assert str(header.invalid(path, once)) == str(once)
