"""Sampled rows: corners first, then the rows asked for, then random ones."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from equivalence import ops, sample
from equivalence.case import Case
from equivalence.windows import Windows
from refimpl.geometry import ragged_windows


def batch(extends: list[int]) -> tuple[Case, Windows]:
    """Requests without prefix."""
    start, end, request = ragged_windows(extend_lens=extends, seq_lens=extends)
    rows, columns = len(start), sum(extends)
    case = Case(
        op="topk_pages",
        inputs={
            "scores": torch.zeros(rows, columns),
            "row_start": start,
            "row_end": end,
            "page_table": torch.zeros(len(extends), columns, dtype=torch.int32),
            "row_to_request": request,
        },
        params={"k": 4, "page_size": 1},
    )
    return case, ops.find(case.op).windows(case)


def test_a_small_call_is_taken_whole() -> None:
    """As many rows as asked for leave nothing out."""
    case, windows = batch([5, 3])
    assert sample.rows_of(case, windows, count=8).tolist() == list(range(8))


def test_corners_and_edges_and_preferred_rows_are_in_it() -> None:
    """First and last rows of requests, both sides of a chunk edge, and the rows asked for."""
    case, windows = batch([40, 60])
    first = torch.tensor([7, 77])
    got = sample.rows_of(case, windows, count=24, edges=(50,), first=first).tolist()
    assert {0, 39, 40, 99, 49, 50, 7, 77} <= set(got)
    assert (len(got), got) == (24, sorted(set(got)))


def test_rows_that_nobody_writes_are_not_drawn() -> None:
    """Of 100 rows 30 are written: ten of those are sampled, whatever is preferred."""
    case, windows = batch([40, 60])
    kinds = torch.full((100,), 2, dtype=torch.int8)
    kinds[10:40] = 0
    case = replace(case, row_class=kinds)
    got = sample.rows_of(case, windows, count=10, first=torch.arange(100))
    assert len(got) == 10
    assert {int(row) for row in got} <= set(range(10, 40))


def test_corners_leave_half_and_preferred_rows_a_quarter() -> None:
    """Of 100 requests of 4 rows half are corners: 10 of 20, 5 preferred ones, 5 others."""
    case, windows = batch([4] * 100)
    first = torch.arange(100) * 4 + 1
    got = sample.rows_of(case, windows, count=20, first=first)
    inner = got[(got % 4 == 1) | (got % 4 == 2)]
    assert len(got) == 20
    assert len(inner) >= 5
    assert int((got % 4 == 1).sum()) >= 5


def test_another_seed_gives_other_rows_and_the_same_seed_the_same() -> None:
    """The sample is a function of its seed."""
    case, windows = batch([200])
    one, two, three = (
        sample.rows_of(case, windows, count=20, seed=seed).tolist() for seed in (0, 0, 1)
    )
    assert one == two
    assert one != three


@given(
    extends=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    count=st.integers(1, 60),
    preferred=st.integers(0, 40),
)
def test_a_sample_is_unique_ascending_and_as_large_as_asked(
    extends: list[int], count: int, preferred: int
) -> None:
    """Whatever corners and preferences there are, the count holds."""
    case, windows = batch(extends)
    rows = sum(extends)
    first = torch.arange(min(preferred, rows))
    got = sample.rows_of(case, windows, count=count, first=first).tolist()
    assert got == sorted(set(got))
    assert len(got) == min(count, rows)
    assert set(got) <= set(range(rows))


def test_a_default_device_changes_nothing() -> None:
    """A user's default device is not where a sample is drawn."""
    case, windows = batch([300, 200])
    want = sample.rows_of(case, windows, count=64, first=torch.arange(100, 300))
    with torch.device("meta"):
        got = sample.rows_of(case, windows, count=64, first=torch.arange(100, 300, device="cpu"))
    assert torch.equal(got, want)
