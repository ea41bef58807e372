"""Slots beside picks are judged one by one, slots alone as the image of some legal row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from equivalence import generate
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.generate import Scores
from equivalence.judge import check
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equivalence.verdict import Finding, Verdict

POISON = -1_347_440_721
# Columns 2 and 1 win, 0 and 3 tie at the cutoff of k 3, 4 loses.
WINDOW = (3.0, 4.0, 5.0, 3.0, 1.0)
SLOTS = (11, 12, 13, 14, 15)
RIGHT = [2, 1, 0]


def slots_case(
    slots: Sequence[int],
    picks: Sequence[int] | None = None,
    *,
    window: Sequence[float] = WINDOW,
    table: Sequence[int] = SLOTS,
    k: int = 3,
) -> Case:
    """One row whose every column is a page."""
    recorded = {"page_indices": torch.tensor([slots], dtype=torch.int32)}
    if picks is not None:
        recorded = {"raw_indices": torch.tensor([picks], dtype=torch.int32), **recorded}
    return Case(
        op="topk_pages",
        inputs={
            "scores": torch.tensor([window]).reshape(1, -1),
            "row_start": torch.zeros(1, dtype=torch.int32),
            "row_end": torch.tensor([len(window)], dtype=torch.int32),
            "page_table": torch.tensor([table], dtype=torch.int32),
        },
        params={"k": k, "page_size": 1},
        recorded=(recorded,),
        provenance={"poison.page_indices": str(POISON), "poison.raw_indices": str(POISON)},
    )


def classed(verdict: Verdict) -> str:
    """The class or rule of the only row of slots."""
    stage = verdict.stages["page_indices"]
    names = [name for name in ("identical", "reordered", "tied") if stage.counts[name]]
    (name,) = [*names, *stage.rules]
    return name


def finding(verdict: Verdict) -> Finding:
    """The only finding about slots."""
    (found,) = (each for each in verdict.findings if each.stage == "page_indices")
    return found


@pytest.mark.parametrize(
    ("picks", "slots", "contract", "kind"),
    [
        (RIGHT, [13, 12, 11], "strict", "identical"),
        ([2, 1, 3], [13, 12, 14], "ties=any", "tied"),
        ([1, 2, 0], [12, 13, 11], "order=any", "reordered"),
        (RIGHT, [13, 12, 14], "ties=any", "page-mismatch"),
        (RIGHT, [12, 13, 11], "order=any", "page-mismatch"),
        (RIGHT, [13, 12, -1], "strict", "hole"),
        (RIGHT, [13, -1, 99], "strict", "hole"),
        (RIGHT, [13, 12, POISON], "strict", "unwritten"),
        ([*RIGHT, -1], [13, 12, 11, 14], "strict", "pad"),
        ([*RIGHT, -1], [13, 12, 11, -1], "strict", "identical"),
        # The picks are wrong, the slots are theirs.
        ([2, 1, 4], [13, 12, 15], "strict", "identical"),
        ([2, 2, 1], [13, 13, 12], "strict", "identical"),
        # A column outside the window has no slot, but a slot that was never written is named.
        ([2, 1, 9], [13, 12, 77], "strict", "identical"),
        ([2, 1, 9], [13, 77, 77], "strict", "page-mismatch"),
        ([POISON] * 3, [POISON] * 3, "strict", "unwritten"),
        ([2, 1, POISON], [13, 12, 77], "strict", "identical"),
    ],
)
def test_slots_beside_picks(picks: list[int], slots: list[int], contract: str, kind: str) -> None:
    """Each slot belongs to the pick beside it, whether or not that pick is right."""
    assert classed(check(slots_case(slots, picks), contract=contract)) == kind


@pytest.mark.parametrize(
    ("slots", "contract", "kind"),
    [
        ([13, 12, 11], "strict", "identical"),
        ([13, 12, 14], "strict", "wrong-tie"),
        ([13, 12, 14], "ties=any", "tied"),
        ([13, 12, 14], "ties=highest", "identical"),
        ([12, 13, 11], "strict", "order"),
        ([12, 13, 11], "order=any", "reordered"),
        ([14, 12, 13], "order=any,ties=any", "tied"),
        ([12, 13, 14], "order=ascending,ties=any", "tied"),
        ([12, 14, 13], "order=ascending,ties=any", "order"),
        ([13, 12, 15], "order=any,ties=any", "lost-winner"),
        ([13, 11, 14], "order=any,ties=any", "lost-winner"),
        ([13, 13, 12], "order=any,ties=any", "duplicate"),
        ([13, 12, 99], "order=any,ties=any", "out-of-window"),
        ([13, 13, 99], "order=any,ties=any", "out-of-window"),
        ([13, 12, -1], "order=any,ties=any", "hole"),
        ([13, -1, 99], "order=any,ties=any", "hole"),
        ([13, 12, 11, 14], "order=any,ties=any", "pad"),
        ([13, 12, POISON], "order=any,ties=any", "unwritten"),
        ([13, 12, 11, POISON], "order=any,ties=any", "unwritten"),
    ],
)
def test_slots_alone(slots: list[int], contract: str, kind: str) -> None:
    """Slots of a launch of their own follow the rules of picks."""
    assert classed(check(slots_case(slots), contract=contract)) == kind


@pytest.mark.parametrize(
    ("slots", "contract", "kind"),
    [
        # Columns 1 and 3 share slot 12: two picks may hold it, three may not.
        ([13, 12, 12], "ties=any", "tied"),
        ([13, 12, 11], "ties=any", "identical"),
        ([12, 12, 12], "ties=any,order=any", "duplicate"),
        ([13, 12, 12], "strict", "wrong-tie"),
        ([12, 12, 13], "ties=any", "order"),
        ([12, 13, 12], "ties=any,order=ascending", "tied"),
        ([13, 12, 12], "ties=any,order=ascending", "order"),
        ([12, 12, 13], "ties=any,order=ascending", "order"),
    ],
)
def test_two_columns_may_share_a_slot(slots: list[int], contract: str, kind: str) -> None:
    """A slot stands as often as legal columns lie behind it."""
    case = slots_case(slots, table=(11, 12, 13, 12, 15))
    assert classed(check(case, contract=contract)) == kind


def test_a_losing_column_behind_a_slot_does_not_count_for_the_order() -> None:
    """Ascending picks 1 and 2 map to slots 8 and 7, though losing column 0 has slot 7 too."""
    case = slots_case([8, 7], window=(0.0, 5.0, 9.0, 1.0), table=(7, 8, 7, 9), k=2)
    assert classed(check(case, contract="order=ascending")) == "identical"
    tied = slots_case([8, 7, 9], window=(0.0, 5.0, 9.0, 1.0, 1.0), table=(7, 8, 7, 9, 9), k=3)
    assert classed(check(tied, contract="order=ascending,ties=any")) == "identical"
    other = slots_case([8, 7, 6], window=(0.0, 5.0, 9.0, 1.0, 1.0), table=(7, 8, 7, 9, 6), k=3)
    assert classed(check(other, contract="order=ascending,ties=any")) == "tied"
    assert classed(check(other, contract="order=ascending")) == "wrong-tie"


def test_a_winner_is_not_left_out_for_a_tie_with_its_slot() -> None:
    """Slots 7 and 8 ascend only as columns 1 and 2, which leaves out winning column 0."""
    case = slots_case([7, 8], window=(9.0, 5.0, 5.0), table=(8, 7, 8), k=2)
    assert classed(check(case, contract="order=ascending,ties=any")) == "order"
    assert classed(check(case, contract="order=any,ties=any")) == "reordered"


def test_a_loser_does_not_lend_its_slot_to_a_tie() -> None:
    """Slot 11 stands twice only if tied column 0 and losing column 4 are both picked."""
    case = slots_case([13, 12, 11, 11], table=(11, 12, 13, 14, 11), k=4)
    assert classed(check(case, contract="order=any,ties=any")) == "lost-winner"


@pytest.mark.parametrize("beside", [True, False], ids=["beside picks", "alone"])
def test_no_pick_lands_on_a_reserved_page(beside: bool) -> None:  # noqa: FBT001 - pytest's way
    """Slots of reserved pages hold no key, even where the table leads there."""
    case = slots_case([13, 0, 11], RIGHT if beside else None, table=(11, 0, 13, 14, 15))
    verdict = check(case)
    assert classed(verdict) == "page-zero"
    assert finding(verdict).reading.startswith("slots 0-0 are reserved")
    assert classed(check(case, contract="reserved_pages=0")) == "identical"
    assert classed(check(case, contract="reserved_pages=12")) == "page-zero"


@pytest.mark.parametrize(
    ("slots", "reading"),
    [
        ([12, 13, 11], "the same slots in another order than the picks beside them"),
        ([14, 13, 12], "every wrong slot is off by +1"),
        ([13, 12, 61], ""),
        ([63, 12, 61], "every wrong slot is off by +50"),
    ],
)
def test_a_mismatch_has_a_reading(slots: list[int], reading: str) -> None:
    """One sentence says how the slots lie beside their picks."""
    found = finding(check(slots_case(slots, RIGHT)))
    assert (found.rule, found.reading) == ("page-mismatch", reading)


def test_a_mismatch_is_shown_slot_by_slot() -> None:
    """The finding gives slot, column, both values and their distance."""
    found = finding(check(slots_case([13, 62, 11], RIGHT)))
    assert (found.row, found.place) == (0, "1 of 3 slots")
    (line,) = found.evidence
    assert (line.place, line.value, line.note) == ("1   column 1", "want 12   got 62", "+50")


def test_slots_alone_are_shown_with_their_columns() -> None:
    """Missing and extra slots come with the columns behind them."""
    found = finding(check(slots_case([13, 15, 99])))
    assert [(line.label, line.place, line.note) for line in found.evidence] == [
        ("missing", "slot 12", "column 1"),
        ("missing", "slot 11", "column 0"),
        ("extra", "slot 15", "column 4"),
        ("extra", "slot 99", "no column of the row"),
    ]


def test_slots_beside_undecided_picks_are_judged_on_their_own() -> None:
    """A NaN leaves the picks undecided; the slots beside them are still theirs, or not."""
    case = generate.topk_pages(1, scores=Scores(nan=True))
    right = right_outputs(case)
    verdict = check(replace(case, recorded=(right,)))
    assert verdict.status is Status.UNDECIDED
    assert verdict.stages["raw_indices"].counts["undecided"] == 2
    assert verdict.stages["page_indices"].status is Status.EQUAL
    wrong = right["page_indices"].clone()
    wrong[0, 0] += 1
    verdict = check(replace(case, recorded=({**right, "page_indices": wrong},)))
    assert verdict.stages["page_indices"].rules == {"page-mismatch": 1}


@pytest.mark.parametrize(
    ("slots", "kind"),
    [([11, -1], "identical"), ([-1, 11], "pad"), ([12, -1], "out-of-window"), ([-1, -1], "hole")],
)
def test_an_empty_row_may_hold_the_slot_of_column_0(slots: list[int], kind: str) -> None:
    """Under empty_rows=first a row without columns gives the slot of column 0, and no other."""
    case = slots_case(slots, window=(), table=(11, 12), k=2)
    assert classed(check(case, contract="empty_rows=first")) == kind


def test_an_empty_window_may_begin_where_the_slot_map_ends() -> None:
    """A row [L, L) has no column to look up in a map of L slots."""
    case = generate.topk_pages(1, form="slot_map")
    edges = {}
    for name in ("row_start", "row_end"):
        edges[name] = case.inputs[name].clone()
        edges[name][7] = case.inputs["scores"].shape[1]
    case = replace(case, inputs={**case.inputs, **edges})
    right = right_outputs(case, contract=Contract())
    assert right["page_indices"][7].tolist() == [-1] * 16
    assert check(replace(case, recorded=(right,))).status is Status.EQUAL
    alone = {"page_indices": right["page_indices"]}
    assert check(replace(case, recorded=(alone,))).status is Status.EQUAL


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_highest_slot_of_int32_is_a_slot(page_size: int) -> None:
    """Page numbers are compared in 64 bits: the last page of int32 slots exists."""
    last = (1 << 31) // page_size - 1
    case = Case(
        op="translate_pages",
        inputs={
            "raw_indices": torch.tensor([[0, page_size - 1]], dtype=torch.int32),
            "page_table": torch.tensor([[last]], dtype=torch.int32),
        },
        params={"page_size": page_size},
    )
    right = right_outputs(case)
    assert right["page_indices"].tolist()[0][1] == (1 << 31) - 1
    assert check(replace(case, recorded=(right,))).status is Status.EQUAL
