"""Verdicts are data: three values, merged by the worst."""

import pytest

from equivalence.verdict import (
    Coverage,
    Finding,
    Run,
    Stage,
    Status,
    Verdict,
    merge,
    run_status,
    worst,
)

EQUAL, DIFFERENT, UNDECIDED = Status.EQUAL, Status.DIFFERENT, Status.UNDECIDED


def verdict(status: Status, *, selecting: int | None = 1, expected: bool = False) -> Verdict:
    """A verdict over one output of picks, or over logits alone."""
    counts = {"compared": 1} if selecting is None else {"rows": 1, "selecting": selecting}
    stage = Stage(status=status, counts=counts)
    return Verdict(
        case="x",
        op="ragged_topk",
        status=status,
        expected=expected,
        runs=(Run(name="run 0", stages={"raw_indices": stage}),),
    )


@pytest.mark.parametrize("value", [EQUAL, verdict(EQUAL)])
def test_three_values_have_no_truth(value: Status | Verdict) -> None:
    """bool() of a status or a verdict raises."""
    with pytest.raises(TypeError, match="compare"):
        bool(value)


@pytest.mark.parametrize(
    ("statuses", "want"),
    [
        ([], UNDECIDED),
        ([EQUAL, EQUAL], EQUAL),
        ([EQUAL, UNDECIDED], UNDECIDED),
        ([UNDECIDED, DIFFERENT, EQUAL], DIFFERENT),
    ],
)
def test_the_worst_status_stands(statuses: list[Status], want: Status) -> None:
    """DIFFERENT over UNDECIDED over EQUAL; nothing is never green."""
    assert worst(statuses) is want


def test_merging_stages_adds_counts_and_keeps_every_failing_row() -> None:
    """Two looks at one output become one."""
    one = Stage(status=EQUAL, counts={"rows": 2, "tied": 1}, power=False)
    two = Stage(
        status=DIFFERENT,
        counts={"rows": 2, "different": 1},
        rules={"pad": 1},
        failing=(1,),
    )
    assert merge([one, two]) == Stage(
        status=DIFFERENT,
        counts={"rows": 4, "tied": 1, "different": 1},
        power=True,
        rules={"pad": 1},
        failing=(1,),
    )


def test_a_finding_has_a_known_rule() -> None:
    """The set of rules is closed."""
    with pytest.raises(ValueError, match="no rule named 'looks-odd'"):
        Finding(stage="logits", rule="looks-odd")


@pytest.mark.parametrize(
    ("verdicts", "want"),
    [
        ([], UNDECIDED),
        ([verdict(EQUAL), verdict(DIFFERENT, expected=True)], EQUAL),
        ([verdict(EQUAL), verdict(DIFFERENT)], DIFFERENT),
        ([verdict(EQUAL, selecting=0)], UNDECIDED),
        ([verdict(EQUAL, selecting=0), verdict(EQUAL, selecting=3)], EQUAL),
        ([verdict(EQUAL, selecting=None)], EQUAL),
    ],
)
def test_a_run_is_its_worst_case_and_must_select(verdicts: list[Verdict], want: Status) -> None:
    """Expected differences count as equal; a run in which no row selects is undecided."""
    assert run_status(verdicts) is want


def test_a_structural_run_can_be_accepted() -> None:
    """allow_structural lets a run pass in which no row selects."""
    assert run_status([verdict(EQUAL, selecting=0)], allow_structural=True) is EQUAL


def test_coverage_is_sampled_when_rows_were_not_scored() -> None:
    """A sample never looks like the whole."""
    assert [Coverage(rows=4, scored_rows=n).sampled for n in (4, 3)] == [False, True]
