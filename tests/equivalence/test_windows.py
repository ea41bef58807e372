"""Windows: what each row may pick; broken rows are emptied before anything reads them."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ints

from equivalence import judge, ops, spans, windows
from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status

EDGE = st.sampled_from([-(2**31), -7, -1, 0, 1, 3, 5, 8, 9, 12, 31, 32, 33, 2**20, 2**31 - 1])
KINDS = (tiny.topk, tiny.pages, tiny.decode, tiny.prefill, tiny.qsa)


def whole(case: Case) -> Case:
    """The case with the reference's own outputs recorded."""
    return replace(case, recorded=(right_outputs(case),))


@given(data=st.data())
def test_no_integer_of_a_record_is_too_odd_for_a_verdict(data: st.DataObject) -> None:
    """Any integers in windows, tables and outputs give a verdict; broken rows make it UNDECIDED."""
    case = whole(data.draw(st.sampled_from(KINDS))())
    names = sorted(name for name, t in case.inputs.items() if t.dtype == torch.int32)
    name = data.draw(st.sampled_from(names))
    tensor = case.inputs[name].clone()
    at = data.draw(st.integers(0, tensor.numel() - 1))
    tensor.view(-1)[at] = data.draw(EDGE)
    odd = tiny.swap(case, **{name: tensor})
    for verdict in (judge.check(odd), judge.check(odd, lambda **_: case.recorded[0])):
        assert verdict.status is not Status.EQUAL or not ops.find(case.op).windows(odd).broken


def test_windows_of_every_row() -> None:
    """Start, visible columns and where they stand in the scores."""
    got = spans.dense(tiny.topk())
    assert got.start.tolist() == got.column.tolist() == [0, 3, 10, 5]
    assert got.visible.tolist() == [32, 28, 4, 0]
    relative = replace(tiny.prefill(), params={"topk": 4, "columns": "row-relative"})
    assert spans.dense(relative).column.tolist() == [0, 0, 0]
    assert spans.paged(tiny.decode()).visible.tolist() == [9, 8]
    assert spans.qsa(tiny.qsa()).visible.tolist() == [3, 8, 0, 5]


def test_a_broken_row_has_no_window() -> None:
    """Whatever its numbers are, nothing of it is read."""
    case = tiny.swap(tiny.topk(), row_start=ints(2**31 - 1, 3, 10, 5))
    got = spans.dense(case)
    assert got.broken == {0: "row_end 32 is before row_start 2147483647"}
    assert [int(each[0]) for each in (got.start, got.visible, got.column)] == [0, 0, 0]


def test_a_padding_row_may_be_backward() -> None:
    """Engines leave such rows in a batch; the row is empty and judged as that."""
    padding = torch.tensor([0, 1, 1, 0], dtype=torch.int8)
    case = tiny.topk(row_class=padding)
    odd = tiny.swap(case, row_start=ints(0, 40, -3, 5), row_end=ints(32, 3, -9, 5))
    got = spans.dense(odd)
    assert (got.broken, got.visible.tolist(), got.start.tolist()) == (
        {},
        [32, 0, 0, 0],
        [0, 0, 0, 5],
    )
    pages = tiny.swap(
        tiny.pages(row_class=padding),
        row_end=ints(32, 3, 10, 5),
        row_to_request=ints(0, 9, -1, 1),
    )
    picks = tiny.pages().recorded[0]
    pads = {name: tensor.clone() for name, tensor in picks.items()}
    for tensor in pads.values():
        tensor[1:3] = -1
    assert judge.check(replace(pages, recorded=(pads,))).status is Status.EQUAL


def test_only_broken_rows_are_emptied() -> None:
    """A candidate is called with the other rows as they were, and the case keeps its own."""
    case = tiny.swap(tiny.pages(), row_to_request=ints(0, 9, 1, 1))
    rows = spans.dense(case)
    got = windows.emptied(case, rows)
    assert got.inputs["row_end"].tolist() == [32, 0, 14, 5]
    assert got.inputs["row_to_request"].tolist() == [0, 0, 1, 1]
    assert case.inputs["row_to_request"].tolist() == [0, 9, 1, 1]
    assert windows.emptied(tiny.topk(), spans.dense(tiny.topk())).inputs["row_end"].tolist() == [
        *(32, 31, 14, 5)
    ]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            tiny.swap(tiny.pages(), page_table=torch.zeros(0, 8, dtype=torch.int32)),
            "a page table of no requests cannot serve 4 rows",
        ),
        (
            tiny.swap(tiny.qsa(), query_start_loc=ints(1, 2, 4)),
            "inputs.query_start_loc does not ascend from 0 to the 4 rows",
        ),
    ],
)
def test_a_table_that_fits_no_row_is_refused(case: Case, sentence: str) -> None:
    """No row can be blamed for it."""
    with pytest.raises(InvalidCase) as caught:
        ops.find(case.op).windows(case)
    assert str(caught.value) == sentence


def test_a_table_without_pages_is_refused() -> None:
    """Not even an empty row can be looked up in it."""
    case = tiny.swap(
        tiny.pages(recorded=()),
        row_end=ints(0, 3, 10, 5),
        page_table=torch.zeros(2, 0, dtype=torch.int32),
    )
    with pytest.raises(
        InvalidCase, match=r"inputs.page_table has shape \[2, 0\]; table in \[R, table"
    ):
        ops.validate(case)


def test_translation_without_slots_has_no_odd_pick() -> None:
    """A [T, 0] of picks is in order."""
    case = Case(
        op="translate_pages",
        inputs={
            "raw_indices": torch.zeros(2, 0, dtype=torch.int32),
            "page_table": ints([1], [2]),
        },
        params={"page_size": 4},
    )
    got = spans.translate(case)
    assert (got.broken, got.visible.tolist()) == ({}, [4, 4])


@pytest.mark.parametrize("columns", [0, 12])
def test_an_empty_row_at_the_end_of_a_slot_map_looks_nothing_up(columns: int) -> None:
    """Its start is one past the last slot."""
    case = Case(
        op="topk_pages",
        inputs={
            "scores": torch.zeros(1, columns),
            "row_start": ints(columns),
            "row_end": ints(columns),
            "slot_map": torch.arange(columns, dtype=torch.int32) + 5,
        },
        params={"k": 2},
        recorded=({"raw_indices": ints([-1, -1]), "page_indices": ints([-1, -1])},),
    )
    assert judge.check(case).findings == ()
