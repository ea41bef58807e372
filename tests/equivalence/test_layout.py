"""Strides as data: kept where cells are apart, refused where they are not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivalence import digest, layout
from equivalence.errors import InvalidCase


@given(
    dims=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4),
)
def test_a_layout_without_overlap_has_a_place_for_every_cell(dims: list[tuple[int, int]]) -> None:
    """What is not called overlapping really reaches as many places as it has cells."""
    shape, stride = [n for n, _ in dims], [s for _, s in dims]
    size = layout.extent(shape, stride)
    places = torch.arange(size).as_strided(shape, stride)
    apart = places.numel() == len(set(places.reshape(-1).tolist()))
    assert layout.overlaps(shape, stride) or apart
    assert places.numel() == 0 or int(places.max()) == size - 1


def test_a_packed_tensor_has_no_layout() -> None:
    """Nothing is said of what needs no saying, or cannot be said."""
    packed = torch.zeros(3, 4)
    assert layout.of(packed) is None
    assert layout.of(packed[:1].expand(3, 4)) is None
    assert layout.of(packed[:, 1:3]) == {"stride": [4, 1], "offset": 1}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stride": [4, 1]}, "does not describe a tensor of 2 dimensions"),
        ({"stride": [4, 1], "offset": 0, "x": 1}, "does not describe a tensor of 2 dimensions"),
        ({"stride": [4, True], "offset": 0}, "does not describe a tensor of 2 dimensions"),
        ({"stride": None, "offset": 0}, "does not describe a tensor of 2 dimensions"),
        ([], "does not describe a tensor of 2 dimensions"),
        ({"stride": [0, 1], "offset": 0}, "strides [0, 1] put two cells of [3, 2] into one place"),
        ({"stride": [1 << 30, 1], "offset": 0}, "strides [1073741824, 1] reach far beyond"),
    ],
)
def test_a_layout_from_a_file_is_checked(fields: object, sentence: str) -> None:
    """Nothing is allocated by what a file claims before the claim is checked."""
    layout.check({"stride": [5, 1], "offset": 7}, [3, 2], torch.float32)
    with pytest.raises(InvalidCase) as caught:
        layout.check(fields, [3, 2], torch.float32)
    assert str(caught.value).startswith(sentence)


def test_a_clone_keeps_strides_unless_cells_overlap() -> None:
    """A kernel meets the strides it was recorded with."""
    values = torch.arange(12.0).reshape(3, 4)
    assert layout.clone(values.t()).stride() == (1, 4)
    assert torch.equal(layout.clone(values.t()), values.t())
    assert layout.clone(values[:1].expand(3, 4)).stride() == (4, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int32, torch.complex64])
def test_bytes_in_a_row_are_those_of_any_strides(dtype: torch.dtype) -> None:
    """One cell and none too, which are contiguous whatever their strides say."""
    cells = torch.arange(12).view(3, 4).to(dtype)
    for part in (cells, cells.t(), cells[:, ::2], cells[1:2, ::9], cells[:0, ::2], cells[1, 2]):
        plain = part.clone(memory_format=torch.contiguous_format).flatten()
        assert torch.equal(layout.flat_bytes(part), plain.view(torch.uint8))
        assert digest.of_tensor(part) == digest.of_tensor(plain)
