"""Which rule names a wrong row of picks, in what order they come, and what a finding says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from equivalence.case import Case
from equivalence.judge import check
from equivalence.verdict import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equivalence.verdict import Finding, Verdict

POISON = -1_347_440_721
INF, NAN = float("inf"), float("nan")
FREE = "order=any,ties=any"
# Columns 0-7 of the window; 3 and 0 win, two of 1, 2, 4 and 6 tie with them, 5 and 7 lose.
WINDOW = (5.0, 3.0, 3.0, 9.0, 3.0, 1.0, 3.0, 0.0)
RIGHT = [3, 0, 1, 2]


def row_case(
    picks: Sequence[int],
    *,
    window: Sequence[float] = WINDOW,
    k: int = 4,
    before: Sequence[float] = (8.0, 8.0),
    after: Sequence[float] = (8.0, 8.0),
) -> Case:
    """One row: its window lies between scores that are better than nearly all of it."""
    scores = torch.tensor([[*before, *window, *after]])
    start, end = len(before), len(before) + len(window)
    return Case(
        op="ragged_topk",
        inputs={
            "scores": scores,
            "row_start": torch.tensor([start], dtype=torch.int32),
            "row_end": torch.tensor([end], dtype=torch.int32),
        },
        params={"k": k},
        recorded=({"raw_indices": torch.tensor([picks], dtype=torch.int32)},),
        provenance={"poison.raw_indices": str(POISON)},
    )


def classed(verdict: Verdict) -> str:
    """The class or rule of the only row."""
    stage = verdict.stages["raw_indices"]
    names = [name for name in ("identical", "reordered", "tied") if stage.counts[name]]
    names += list(stage.rules)
    (name,) = names
    assert (verdict.status is Status.DIFFERENT) == (name in stage.rules)
    return name


def finding(case: Case, contract: str = "strict") -> Finding:
    """The only finding."""
    (found,) = check(case, contract=contract).findings
    return found


STRICTLY = {
    "identical": [RIGHT, [*RIGHT, -1, -1]],
    "reordered": [[3, 0, 2, 1]],
    "unwritten": [[POISON] * 4, [3, 0, -1, POISON], [3, 3, 99, POISON], [*RIGHT, POISON]],
    "pad": [[*RIGHT, 4], [3, 3, 1, 2, 2], [*RIGHT, 99]],
    "hole": [[3, 0, -1, 1], [-1, -1, -1, -1], [3, 3, 99, -1], [3, 0, 1, -1]],
    "out-of-window": [[3, 0, 1, 8], [3, 0, 1, 10], [3, 3, 1, 99], [3, 0, 1, -2], [-3, -4, 9, 9]],
    "duplicate": [[3, 0, 1, 1], [3, 3, 3, 3], [3, 3, 5, 7], [2, 2, 1, 1]],
    "lost-winner": [[3, 1, 2, 4], [3, 0, 1, 5], [0, 1, 2, 4], [5, 7, 1, 2], [7, 6, 5, 4]],
    "wrong-tie": [[3, 0, 1, 4], [3, 0, 4, 6], [6, 4, 0, 3]],
    "order": [[0, 3, 1, 2], [1, 2, 3, 0], [3, 1, 0, 2]],
}


@pytest.mark.parametrize(
    ("rule", "picks"), [(rule, picks) for rule, rows in STRICTLY.items() for picks in rows]
)
def test_the_first_rule_that_holds_names_the_row(rule: str, picks: list[int]) -> None:
    """Structure comes before scores, scores before the choice of ties, that before the order."""
    assert classed(check(row_case(picks), contract="strict")) == rule


@pytest.mark.parametrize(
    ("contract", "picks", "kind"),
    [
        ("order=any", [2, 1, 0, 3], "reordered"),
        ("order=any", [6, 1, 0, 3], "wrong-tie"),
        ("ties=any", [3, 0, 6, 4], "tied"),
        ("ties=any", [3, 0, 2, 1], "reordered"),
        ("ties=any", [0, 3, 6, 4], "order"),
        ("ties=highest", [3, 0, 6, 4], "identical"),
        ("ties=highest", [3, 0, 1, 2], "wrong-tie"),
        ("order=ascending", [0, 1, 2, 3], "identical"),
        ("order=ascending", RIGHT, "order"),
        ("order=ascending,ties=any", [0, 3, 4, 6], "tied"),
        (FREE, [6, 4, 0, 3], "tied"),
        (FREE, [6, 4, 2, 3], "lost-winner"),
        (FREE, [6, 4, 3, 3], "duplicate"),
        (FREE, [6, 4, 0, -1], "hole"),
        ("holes=allow", [3, 0, -1, 1], "hole"),
    ],
)
def test_a_freedom_moves_the_line(contract: str, picks: list[int], kind: str) -> None:
    """Each freedom lets through what it names and nothing else."""
    assert classed(check(row_case(picks), contract=contract)) == kind


@pytest.mark.parametrize(
    ("contract", "picks", "kind"),
    [
        ("strict", [0, 1, 2, -1], "identical"),
        (FREE, [2, 1, 0, -1], "order"),
        (FREE, [0, 1, 2, 2], "pad"),
        (FREE, [0, 1, -1, -1], "hole"),
        (FREE, [0, 2, 1, -1], "order"),
        ("short_rows=any", [2, 1, 0, -1], "identical"),
        ("short_rows=any", [0, 1, 2, -1], "order"),
        ("short_rows=any,order=any", [1, 0, 2, -1], "reordered"),
        ("short_rows=any,minus_inf=pad", [2, 1, -1, -1], "identical"),
        ("short_rows=any,minus_inf=pad", [2, 1, 0, -1], "pad"),
        ("short_rows=any,minus_inf=pad", [2, 0, -1, -1], "lost-winner"),
        ("short_rows=any,minus_inf=pad,holes=allow", [-1, 2, 1, -1], "reordered"),
        ("short_rows=any,minus_inf=pad,holes=allow", [2, 1, 0, -1], "pad"),
        ("short_rows=any,minus_inf=pad,holes=allow", [2, -1, -1, 1], "pad"),
        ("short_rows=any,minus_inf=pad", [-1, 2, 1, -1], "pad"),
    ],
)
def test_a_short_row_is_its_columns(contract: str, picks: list[int], kind: str) -> None:
    """Three columns and k 4: 0, 1, 2 unread, unless short_rows=any ranks them."""
    assert classed(check(row_case(picks, window=(-INF, 1.0, 2.0)), contract=contract)) == kind


@pytest.mark.parametrize(
    ("contract", "picks", "kind"),
    [
        ("strict", [-1, -1], "identical"),
        ("strict", [0, -1], "pad"),
        ("empty_rows=first", [0, -1], "identical"),
        ("empty_rows=first", [-1, -1], "hole"),
        ("empty_rows=first", [1, -1], "out-of-window"),
        ("empty_rows=first", [-1, 0], "pad"),
    ],
)
def test_an_empty_row_holds_pads(contract: str, picks: list[int], kind: str) -> None:
    """No column, no pick, unless the contract names column 0."""
    assert classed(check(row_case(picks, window=(), k=2), contract=contract)) == kind


@pytest.mark.parametrize(
    ("contract", "negative", "positive"),
    [
        ("strict", "lost-winner", "identical"),
        ("zero_sign=equal", "identical", "wrong-tie"),
        ("zero_sign=equal,ties=any", "identical", "tied"),
        ("zero_sign=equal,ties=highest", "wrong-tie", "identical"),
    ],
)
def test_the_sign_of_zero_ranks(contract: str, negative: str, positive: str) -> None:
    """-0 in column 0 lies below +0 in column 1, or beside it where zero_sign=equal."""
    for picks, kind in (([2, 0], negative), ([2, 1], positive)):
        case = row_case(picks, window=(-0.0, 0.0, 1.0, -1.0), k=2)
        assert classed(check(case, contract=contract)) == kind


def test_a_nan_leaves_its_row_undecided() -> None:
    """nan=reject decides nothing of the row, however broken, and says where the NaN stands."""
    window = (5.0, NAN, 3.0, 9.0, 3.0)
    for picks in (RIGHT, [3, 3, 3, 3], [99, -1, 0, 0]):
        verdict = check(row_case(picks, window=window))
        assert verdict.status is Status.UNDECIDED
        (found,) = verdict.findings
        assert (found.rule, found.status) == ("nan", Status.UNDECIDED)
        (line,) = found.evidence
        assert (line.place, line.value, line.bits) == ("column 1 (K 3)", "nan", "7FC00000")
    assert (
        classed(check(row_case([1, 3, 0, 2], window=window), contract="nan=first")) == "identical"
    )
    assert classed(check(row_case([3, 0, 2, 4], window=window), contract="nan=last")) == "identical"


def test_a_nan_beyond_the_window_is_not_read() -> None:
    """Neither what precedes a window nor what follows it makes a row undecided."""
    assert classed(check(row_case(RIGHT, before=(NAN,), after=(NAN, NAN)))) == "identical"
    short = row_case([0, 1, -1, -1], window=(NAN, 1.0))
    assert check(short).status is not Status.DIFFERENT
    assert check(short).findings == ()


@pytest.mark.parametrize(
    ("picks", "reading"),
    [
        (
            [3, 1, 2, 4],
            "a tied column more than there is room for was kept and a strictly greater one lost",
        ),
        (
            [1, 2, 4, 6],
            "2 tied columns more than there is room for were kept and 2 strictly greater ones lost",
        ),
        ([3, 1, 2, 5], "1 of 4 picks lost to lower scores"),
        ([3, 0, 5, 7], "2 picks below the cutoff in place of columns at it"),
        ([3, 0, 1, 4], "the picks at the cutoff are not the ones the contract names"),
        ([0, 3, 1, 2], "the picks are right, order=score is not kept"),
        ([3, 3, 3, 3], "the whole row is column 3"),
        ([3, 3, 3, 1], ""),
        ([11, 10, 9, 8], "every pick lies past the window: fits another base for the indices"),
        (
            [3, 0, 1, 8],
            "reads past its 8 visible columns: column 8,"  # noqa: ISC004 - one sentence
            " as when a stale workspace column is ranked; the other picks are its best",
        ),
        ([3, 0, 5, 8], ""),
        # The best four of columns 0-9 are 5, 0, 1 and 2, relative to the window or not.
        ([5, 0, 1, -1], ""),
        ([3, -2, -3, 0], ""),
    ],
)
def test_a_reading_names_the_likely_cause(picks: list[int], reading: str) -> None:
    """One sentence says what the row looks like, where the evidence shows it."""
    assert finding(row_case(picks)).reading == reading


def test_a_row_that_ranks_from_column_0_is_recognised() -> None:
    """Picks that are right for [0, end) name the start that was not passed on."""
    case = row_case([5, 0], before=(8.0,) * 3, window=(1.0, 2.0, 9.0), k=2)
    assert finding(case).reading == "row 0 ranks from column 0, not from its start 3"


def test_a_short_row_says_that_it_reads_no_scores() -> None:
    """A short row in another order is shown against 0, 1, 2, ..."""
    found = finding(row_case([1, 0, -1, -1], window=(1.0, 2.0)))
    assert found.rule == "order"
    assert found.reading == "a row of at most k columns is 0, 1, 2, ... and reads no scores"
    assert [(line.label, line.place) for line in found.evidence] == [("slot 0", "column 1 (K 3)")]


@pytest.mark.parametrize(
    ("picks", "rule", "slots", "note"),
    [
        ([3, POISON, 1, POISON], "unwritten", ["1", "3"], "the buffer's poison"),
        ([*RIGHT, 4], "pad", ["4"], "the row owes 4 picks, then pads (-1)"),
        ([3, -1, 1, -1], "hole", ["1", "3"], "a pad among the first 4 slots"),
        ([3, 0, 9, -5], "out-of-window", ["2", "3"], "the window has 8 columns"),
        ([3, 0, 3, 0], "duplicate", ["2", "3"], "already picked"),
    ],
)
def test_broken_slots_are_shown(picks: list[int], rule: str, slots: list[str], note: str) -> None:
    """Each slot that breaks a rule of structure stands in the finding with its value."""
    found = finding(row_case(picks))
    assert found.rule == rule
    assert [line.place for line in found.evidence] == slots
    assert {line.note for line in found.evidence} == {note}
    assert [line.value for line in found.evidence] == [f"holds {picks[int(s)]}" for s in slots]


def test_a_lost_winner_is_shown_with_its_scores() -> None:
    """Cutoff, missing and extra columns come in decimal, in bits and in ulps from the cutoff."""
    found = finding(row_case([3, 1, 2, 4]))
    assert (found.row, found.place) == (0, "columns 2-10   k 4")
    assert [
        (line.label, line.place, line.value, line.bits, line.note) for line in found.evidence
    ] == [
        ("cutoff", "rank 3", "3", "40400000", "shared by columns 1 2 4 6"),
        ("missing", "column 0 (K 2)", "5", "40A00000", "+6,291,456 ulp above the cutoff"),
        ("extra", "column 4 (K 6)", "3", "40400000", "at the cutoff"),
    ]


def test_a_row_with_the_picks_of_another_says_so() -> None:
    """Two rows exchanged are called by each other's numbers."""
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    zero = torch.zeros(2, dtype=torch.int32)
    case = Case(
        op="ragged_topk",
        inputs={"scores": scores, "row_start": zero, "row_end": zero + 4},
        params={"k": 2},
        recorded=({"raw_indices": torch.tensor([[3, 2], [0, 1]], dtype=torch.int32)},),
    )
    assert [found.reading for found in check(case).findings] == [
        "row 0 holds the picks of row 1",
        "row 1 holds the picks of row 0",
    ]


def test_only_selecting_rows_give_power() -> None:
    """A case without a row that leaves a column out is UNDECIDED, and says why."""
    short = check(row_case([0, 1, -1, -1], window=(1.0, 2.0)))
    assert short.status is Status.UNDECIDED
    assert short.note == "no power: no row of raw_indices had a choice to get wrong"
    same = row_case([0, 1, 2, 3], window=(1.0,) * 6)
    assert check(same, contract=FREE).status is Status.UNDECIDED
    assert check(same).status is Status.EQUAL
