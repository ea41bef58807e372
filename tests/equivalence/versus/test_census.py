"""The tie census against rows made by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import ops
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.versus import census
from equivalence.versus.forwards import Census
from equivalence.versus.spread import Spread, spread
from refimpl.bits import ulp_distance


def of(*row: float, k: int, contract: Contract | None = None) -> Census:
    """The census of one row that sees all its scores."""
    return census.of(
        torch.tensor([row], dtype=torch.float32),
        column=torch.tensor([0]),
        visible=torch.tensor([len(row)]),
        k=k,
        contract=contract,
    )


def ulps(above: float, below: float) -> int:
    """The distance of two fp32 values."""
    return int(ulp_distance(torch.tensor(float(above)), torch.tensor(float(below))))


def looked(*, tied: int, cut: bool = False, zero: bool = False, margin: int | None) -> Census:
    """One row that was looked at."""
    return Census(
        looked_at=1,
        cut=cut,
        cut_at_zero=zero,
        multiplicity=spread([tied]),
        margin=spread([] if margin is None else [margin]),
    )


def test_a_row_without_ties() -> None:
    """One column stands at the cutoff, and the margin is to the next score."""
    assert of(4, 3, 2, 1, k=2) == looked(tied=1, margin=ulps(3, 2))


def test_a_plateau_that_is_cut() -> None:
    """Three columns stand at the cutoff and two of them are picked."""
    assert of(9, 5, 5, 5, 1, k=3) == looked(tied=3, cut=True, margin=ulps(5, 1))


def test_a_plateau_that_is_taken_whole() -> None:
    """Ties that all fit are no choice."""
    assert of(9, 5, 5, 1, k=3) == looked(tied=2, margin=ulps(5, 1))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_plateau_of_zeros(zero: float) -> None:
    """Zeros of either sign are told apart from other plateaus."""
    assert of(9, zero, zero, -1, k=2) == looked(tied=2, cut=True, zero=True, margin=ulps(zero, -1))


def test_signed_zeros_tie_where_the_contract_says_so() -> None:
    """By default -0 stands one ulp below +0; under zero_sign=equal they are one plateau."""
    assert of(9, 0.0, -0.0, -1, k=2) == looked(tied=1, margin=1)
    merged = of(9, 0.0, -0.0, -1, k=2, contract=Contract(zero_sign="equal"))
    assert (merged.cut, merged.cut_at_zero, merged.multiplicity) == (1, 1, spread([2]))


def test_nothing_below_the_cutoff_has_no_margin() -> None:
    """A row cut in its lowest plateau has no score below it."""
    assert of(2, 1, 1, k=2) == looked(tied=2, cut=True, margin=None)


@pytest.mark.parametrize(
    "row", [(1.0, 2.0), (1.0, 2.0, float("nan")), (3.0, float("-inf"), float("-inf"))]
)
def test_rows_that_are_left_out(row: tuple[float, ...]) -> None:
    """Short rows, rows with a NaN, and rows with too few columns to pick are not looked at."""
    assert of(*row, k=2, contract=Contract(minus_inf="pad")) == Census()


def test_only_the_window_counts() -> None:
    """Scores outside the window tie with nothing, whatever they are."""
    scores = torch.tensor([[7.0, 9, 7, 5, 7, float("nan")]])
    got = census.of(scores, column=torch.tensor([1]), visible=torch.tensor([3]), k=2)
    assert got == looked(tied=1, margin=ulps(7, 5))


def call(scores: Tensor) -> Case:
    """Three rows of six columns that pick two; the last is short."""
    rows = torch.tensor([6, 6, 2], dtype=torch.int32)
    inputs = {"row_start": torch.zeros_like(rows), "row_end": rows}
    return Case(op="ragged_topk", inputs={"scores": scores, **inputs}, params={"k": 2})


SCORES = torch.tensor([[6.0, 5, 4, 3, 2, 1], [6, 5, 5, 5, 2, 1], [9, 9, 9, 9, 9, 9]])


def test_rows_that_really_select_are_counted_over_all_rows() -> None:
    """Two of three rows select; one of them was looked at."""
    case = call(SCORES)
    windows = ops.find(case.op).windows(case)
    got = census.look(case, windows, torch.tensor([1, 2]), logits=None, contract=Contract())
    assert got == Census(
        rows=3,
        selecting=2,
        looked_at=1,
        cut=1,
        multiplicity=spread([3]),
        margin=spread([ulps(5, 2)]),
        scores="input",
    )


def test_the_originals_logits_come_first() -> None:
    """Where the original gave logits they are looked at."""
    case = call(SCORES)
    windows = ops.find(case.op).windows(case)
    got = census.look(case, windows, torch.tensor([0]), logits=SCORES.flip(0), contract=Contract())
    assert (got.scores, got.multiplicity) == ("original", spread([6]))


def test_two_censuses_add_up() -> None:
    """Counts are summed and spreads joined."""
    both = census.added(of(4, 3, 2, 1, k=2), of(9, 5, 5, 5, 1, k=3))
    assert (both.looked_at, both.cut) == (2, 1)
    assert both.multiplicity == spread([1, 3])


@given(st.lists(st.integers(0, 1024)), st.lists(st.integers(0, 1024)))
def test_a_spread_holds_small_values_exactly(one: list[int], two: list[int]) -> None:
    """Median, least and most are those of all values together."""
    whole = sorted([*one, *two])
    got = spread(one) + spread(two)
    assert got == spread(whole)
    assert got.median == (whole[(len(whole) - 1) // 2] if whole else None)


def test_a_spread_of_large_values_stays_small() -> None:
    """Above 1,024 values share the next power of two; the ends stay exact."""
    got = spread(range(1025, 4000))
    assert got == Spread(counts={2048: 1024, 4096: 1951}, least=1025, most=3999)
    assert got.median == 3999


def test_a_layer_without_columns_has_no_ties() -> None:
    """Rows that see nothing select nothing, and nothing is looked at."""
    case = Case(
        op="ragged_topk",
        inputs={
            "scores": torch.zeros(2, 0),
            "row_start": torch.zeros(2, dtype=torch.int32),
            "row_end": torch.zeros(2, dtype=torch.int32),
        },
        params={"k": 4},
    )
    windows = ops.find(case.op).windows(case)
    got = census.look(case, windows, torch.arange(2), logits=None, contract=Contract())
    assert got == Census(rows=2, selecting=0, scores="input")
