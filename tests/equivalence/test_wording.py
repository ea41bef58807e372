"""Words that sentences share."""

from collections.abc import Sequence

import pytest
import torch

from equivalence import wording


def test_a_listing_tells_how_many_more_there_are() -> None:
    """Past those it shows."""
    assert wording.listing([3, 1]) == "3 1"
    assert wording.listing(range(1_500), most=2) == "0 1 and 1,498 more"


@pytest.mark.parametrize(
    ("numbers", "most", "said"),
    [
        ([3], None, "rank 3"),
        ([0, 1, 2], None, "ranks 0 1 2"),
        (range(9), None, "ranks 0 1 2 3 4 5 6 7 8"),
        (range(9), 8, "ranks 0 1 2 3 4 5 6 7 and 1 more"),
    ],
)
def test_ranks_are_named_by_number(numbers: Sequence[int], most: int | None, said: str) -> None:
    """One is a rank, several are ranks, and none is left out unless it is asked for."""
    assert wording.ranks(numbers, most=most) == said


def test_a_form_is_dtype_and_shape() -> None:
    """Without the name of the library."""
    assert wording.form(torch.zeros(2, 0, dtype=torch.float8_e4m3fn)) == "float8_e4m3fn [2, 0]"
