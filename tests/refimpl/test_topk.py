"""Top-k under a total order, by examples; tests/equivalence/test_twin_agreement.py has the rest."""

from typing import Any

import pytest
import torch

from refimpl.topk import legal_set, ragged_topk

INF, NAN = torch.inf, torch.nan


def picks(scores: list[float], k: int, **order: Any) -> list[int]:  # noqa: ANN401 - freedoms by name
    """The picks of one row that sees every score."""
    row = torch.tensor([scores], dtype=torch.float32)
    got = ragged_topk(
        scores=row,
        row_start=torch.tensor([0], dtype=torch.int32),
        row_end=torch.tensor([len(scores)], dtype=torch.int32),
        k=k,
        **order,
    )
    assert got.dtype == torch.int32
    return got[0].tolist()


@pytest.mark.parametrize(
    ("scores", "order", "want"),
    [
        ([1, 3, 2, 3], {}, [1, 3]),
        ([1, 3, 2, 3], {"order": "ascending"}, [1, 3]),
        ([2, 1, 3, 0], {"order": "ascending"}, [0, 2]),
        ([3, 2, 2, 2], {"ties": "lowest"}, [0, 1]),
        ([3, 2, 2, 2], {"ties": "highest"}, [0, 3]),
        ([-INF, 1, -INF, -INF], {}, [1, 0]),
        ([-INF, 1, -INF, -INF], {"minus_inf": "pad"}, [1, -1]),
        ([1, NAN, 2, 3], {"nan": "first"}, [1, 3]),
        ([1, NAN, 2, -INF], {"nan": "last"}, [2, 0]),
        ([-0.0, 0.0, -0.0, -1.0], {}, [1, 0]),
        ([-0.0, 0.0, -0.0, -1.0], {"zero_sign": "equal"}, [0, 1]),
    ],
)
def test_a_selecting_row_takes_the_best_under_its_order(
    scores: list[float], order: dict[str, Any], want: list[int]
) -> None:
    """Two of four columns, with each freedom in turn."""
    assert picks(scores, 2, **order) == want


@pytest.mark.parametrize(
    ("scores", "order", "want"),
    [
        ([1, 3], {}, [0, 1, -1]),
        ([NAN, 3], {}, [0, 1, -1]),
        ([1, 3], {"short_rows": "any"}, [1, 0, -1]),
        ([-INF, 3], {"short_rows": "any", "minus_inf": "pad"}, [1, -1, -1]),
        ([], {}, [-1, -1, -1]),
        ([], {"empty_rows": "first"}, [0, -1, -1]),
    ],
)
def test_a_short_row_is_the_identity_unless_allowed(
    scores: list[float], order: dict[str, Any], want: list[int]
) -> None:
    """Three slots for fewer columns: scores are not read, pads fill up."""
    assert picks(scores, 3, **order) == want


def test_windows_are_half_open_and_picks_relative_to_their_start() -> None:
    """Columns outside the window are never picked, whatever they score."""
    scores = torch.tensor([[9.0, 1, 2, 3, 9], [9, 9, 9, 9, 9]])
    start = torch.tensor([1, 3], dtype=torch.int32)
    end = torch.tensor([4, 2], dtype=torch.int32)
    got = ragged_topk(scores=scores, row_start=start, row_end=end, k=2)
    assert got.tolist() == [[2, 1], [-1, -1]]


def test_the_legal_set_names_what_must_and_what_may_be_picked() -> None:
    """Five, four and two of four threes: the example of a tie four wide with two places."""
    legal = legal_set(scores=torch.tensor([5.0, 4, 3, 3, 3, 3, 0]), k=4)
    assert (legal.need, legal.free, legal.must.tolist(), legal.ties.tolist()) == (
        4,
        2,
        [True, True, False, False, False, False, False],
        [False, False, True, True, True, True, False],
    )


@pytest.mark.parametrize("scores", [[], [-INF, -INF]])
def test_a_row_with_nothing_to_pick_owes_nothing(scores: list[float]) -> None:
    """No columns, or none above -inf under minus_inf=pad."""
    legal = legal_set(scores=torch.tensor(scores), k=4, minus_inf="pad")
    assert (legal.need, legal.cutoff, legal.free) == (0, None, 0)
