"""A bounded prefill is the one call of all rows, bit for bit; planted faults are named.

Ties that fall at random, and a winner lost in one row of fifty, are in test_ab.
"""

from __future__ import annotations

from collections import deque
from functools import cache, partial
from typing import TYPE_CHECKING

import batches
import pytest
import torch

from equivalence import ab, scenarios
from equivalence.errors import NotEquivalent
from equivalence.invariance import assert_row_count_invariant, check_row_count
from equivalence.judge import check
from equivalence.paths import tail, workspace
from equivalence.paths.chunked import chunked, original
from equivalence.paths.parts import Logits, reference_logits
from equivalence.paths.pipelined import pipelined
from equivalence.paths.plan import Batch
from equivalence.paths.planner import judge, planner
from equivalence.planted import paths, reused
from equivalence.scenarios import SCENARIOS
from equivalence.verdict import Status
from equivalence.versus.forwards import AGAIN, CANDIDATE, ORIGINAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from equivalence.candidate import Candidate
    from equivalence.case import Case
    from equivalence.verdict import Verdict

SCALE = 256
"""Prompts of 32 to 800 tokens, 8 picks a row."""

WAYS: dict[str, Candidate] = {
    "v4.1, 8 rows of up to 256 columns": partial(chunked, budget_bytes=8 << 10),
    "v4.1, 24 rows of up to 256 columns": partial(chunked, budget_bytes=24 << 10),
    "vllm, 2 KiB": partial(chunked, style="vllm", budget_bytes=2 << 10),
    "vllm, 5,000 bytes": partial(chunked, style="vllm", budget_bytes=5_000),
    "qsa, 3 KiB": partial(chunked, style="qsa", budget_bytes=3 << 10),
    "pipelined": partial(pipelined, style="vllm", budget_bytes=6 << 10),
    "workspace reused": partial(workspace.reused, budget_bytes=3 << 10),
    "workspaces of two micro-batches": partial(
        workspace.reused, budget_bytes=3 << 10, micro_batches=2
    ),
}
"""Style dsa is not among them: it cuts nothing below 8,000,000 scores."""


@cache
def last_chunk(name: str) -> tuple[scenarios.Forward, ...]:
    """The layer-forwards of the last chunk of a scenario, scaled down: ratios 1, 2 and 4."""
    made = scenarios.forwards(name, seed=1, scale=SCALE, heads=16, head_dim=32)
    return tuple(deque(made, maxlen=3))


@pytest.mark.parametrize("way", WAYS)
def test_every_scenario_is_that_of_one_call(way: str) -> None:
    """Logits bit for bit, picks and slots identical; one ratio of each, in turn."""
    turn = list(WAYS).index(way)
    forwards = [last_chunk(name)[(turn + i) % 3] for i, name in enumerate(SCENARIOS)]
    got = ab.compare(
        partial(original, keep_logits=True), partial(WAYS[way], keep_logits=True), forwards
    )
    assert (got.status, got.why) == (Status.EQUAL, ())
    assert got.arms == dict.fromkeys((ORIGINAL, AGAIN, CANDIDATE), Status.EQUAL)
    assert [forward.name for forward in got.forwards] == [each.case.name for each in forwards]
    assert got.total.census.selecting > 100
    for stages in got.total.agreement.values():
        assert stages.keys() == {"all", "logits", "raw_indices", "page_indices", "mask"}
        for stage, each in stages.items():
            publish = 1 if stage == "mask" else len(SCENARIOS)
            assert each.new_equal == each.control_equal == each.forwards == publish
            assert (each.new_rows, each.control_rows) == (0, 0)
    # The original makes one call a layer-forward; what is bounded really was cut.
    calls = {arm: max(one.calls for one in got.paths[arm]) for arm in (ORIGINAL, CANDIDATE)}
    assert calls[ORIGINAL] == len(SCENARIOS)
    assert calls[CANDIDATE] >= 2 * len(SCENARIOS)


def prefill() -> Case:
    """Two causal prompts behind their prefixes: 20 rows of 21 to 40 columns, 12 of 19 to 30."""
    return batches.case([(20, 40), (12, 30)], tie_rich=False)


def readings(verdict: Verdict, stage: str) -> dict[int | None, str]:
    """What is said of each row of an output."""
    assert verdict.status is Status.DIFFERENT
    return {found.row: found.reading for found in verdict.findings if found.stage == stage}


def test_a_chunk_that_forgets_its_row_offset_is_named() -> None:
    """By the window of the row that stands as far into the first chunk."""
    case = prefill()
    verdict = check(case, partial(paths.forgets_row_offset, keep_logits=True))
    sentence = (
        "row 9 sees only what is in the window of row 0 (request 0 token 0), 9 rows earlier,"
        " and {} more rows likewise: as when a chunk forgets its row offset"
    )
    assert readings(verdict, "logits")[9] == sentence.format(28)
    told = readings(check(case, paths.forgets_row_offset), "raw_indices")
    assert told[9] == sentence.format(12)
    # Rows of the other request pick columns of the first one, which fit nothing there.
    assert {text.split("as when ")[-1] for text in told.values() if text} == {
        "a chunk forgets its row offset"
    }


def test_a_last_chunk_short_by_one_row_is_named() -> None:
    """In every output, by the row that nobody wrote."""
    verdict = check(prefill(), partial(paths.last_chunk_short, keep_logits=True))
    sentence = (
        "row 31, the last of the call, was never written: as when the last chunk is one row short"
    )
    assert {found.stage: found.reading for found in verdict.findings} == dict.fromkeys(
        ("logits", "raw_indices", "page_indices"), sentence
    )
    assert verdict.failing == [31]


def test_a_stale_workspace_column_is_named() -> None:
    """By the columns that the row does not see, and those of its own that it does."""
    verdict = check(prefill(), partial(reused.stale_columns, budget_bytes=1_200))
    told = readings(verdict, "raw_indices")
    assert told[20] == (
        "reads past its 19 visible columns: columns 20 23 27 31,"
        " as when a stale workspace column is ranked"
    )
    assert told[24] == (
        "reads past its 23 visible columns: columns 23 27 31,"
        " as when a stale workspace column is ranked; the other picks are its best"
    )
    assert all("as when a stale workspace column is ranked" in text for text in told.values())


@pytest.mark.parametrize(
    ("fault", "by", "more"),
    [
        (paths.view_outlives_chunk, 3, 16),
        (partial(reused.view_kept, budget_bytes=1_200), 4, 7),
    ],
    ids=["late by one chunk", "late in pairs of chunks"],
)
def test_a_view_that_outlives_its_chunk_is_named(fault: Candidate, by: int, more: int) -> None:
    """By the row of the next chunk whose scores the row is ranked by."""
    told = readings(check(prefill(), fault), "raw_indices")
    assert told[1] == (
        f"row 1 is ranked by the scores of row {1 + by} (request 0 token {1 + by}),"
        f" {by} rows later, and {more} more rows likewise: as when a view outlives its chunk"
    )


def test_a_tail_off_by_one_is_named() -> None:
    """By the row before it; of each request's first tail row nobody judges that one."""
    case = tail.tail_case(prefill(), most=4)
    told = readings(check(case, partial(reused.tail_off_by_one, most=4)), "raw_indices")
    assert told[18] == (
        "row 18 holds the picks of row 17 (request 0 token 17), 1 row earlier,"
        " and 2 more rows likewise: as when a tail is off by one"
    )
    assert told[31] == (
        "row 31 holds the picks of row 30 (request 1 token 10), 1 row earlier,"
        " and 2 more rows likewise: as when a tail is off by one"
    )


def test_a_kernel_switched_at_row_64_is_named() -> None:
    """By the rows of the smallest call that loses the winner, which the row alone keeps."""
    case = batches.case([(40, 50), (30, 30)], tie_rich=False)
    with pytest.raises(NotEquivalent) as caught:
        assert_row_count_invariant(
            case, paths.FAULTS["row-64-loses-winner"].candidate, rows=(16, 64)
        )
    verdict = caught.value.verdict
    found = next(each for each in verdict.findings if each.rule == "row-variance")
    sentence = "row 64 is right in calls of up to 64 rows and wrong in one of 65"
    assert (found.stage, found.row, found.reading) == ("raw_indices", 64, sentence)
    assert f"    reading   {sentence}\n" in str(caught.value)


def test_a_plan_of_the_previous_batch_is_named() -> None:
    """By the batch it was made for and the first number that tells."""
    pages = [torch.tensor([table], dtype=torch.int32) for table in ([3, 5], [5, 3])]
    eight = torch.tensor([8], dtype=torch.int32)
    planned = [
        Batch(extend_lens=eight, seq_lens=eight, page_table=table, page_size=4) for table in pages
    ]
    verdict = judge(reused.changed_in_place(planned), reused.address_planner())
    assert readings(verdict, "slot_spans") == {
        None: "batch 2 has the plan of batch 1: slot_spans[0, 1] is 12, not 20"
    }
    assert judge(reused.changed_in_place(planned), planner()).status is Status.EQUAL


def returning(change: Callable[[Tensor], Tensor]) -> Candidate:
    """The original, whose scorer returns changed scores."""

    def scorer(**call: Tensor) -> Logits:
        logits = reference_logits(**call)
        return Logits(values=change(logits.values), column=logits.column)

    return partial(original, scorer=scorer)


def fails(**_: object) -> dict[str, Tensor]:
    """An original that raises."""
    raise RuntimeError("no luck")


NOTHING = "UsageError: budget_bytes is 0: it is a whole number, 1 or more"
SHORT = "values: want float32 [32, 70 or more], got float32 [31, 70]"


@pytest.mark.parametrize(
    ("candidate", "sentence"),
    [
        (partial(chunked, budget_bytes=0), NOTHING),
        (partial(workspace.reused, budget_bytes=0), "budget_bytes is 0"),
        (partial(pipelined, budget_bytes=0), NOTHING),
        (returning(lambda values: values[:-1]), SHORT),
        (fails, "RuntimeError: no luck"),
    ],
    ids=["chunked", "workspace", "pipelined", "wrong shape", "raises"],
)
def test_what_gives_nothing_leaves_it_undecided(candidate: Candidate, sentence: str) -> None:
    """As a candidate alone, in schedules, and on either side of a comparison."""
    case = prefill()
    alone, whole = check(case, candidate), check_row_count(case, candidate, rows=(8,))
    for verdict in (alone, whole):
        assert (verdict.status, len(verdict.findings)) == (Status.UNDECIDED, 1)
        assert sentence in verdict.findings[0].reading
    for old, new in ((original, candidate), (candidate, original)):
        got = ab.compare(old, new, [case])
        assert got.status is Status.UNDECIDED
        assert [sentence in told for told in got.failed] == [True] * len(got.failed) != []


def test_a_scorer_that_gives_nan_is_different() -> None:
    """Its logits are not the reference's, nor are the picks from them."""
    nan = returning(lambda values: values * torch.nan)
    verdict = check(prefill(), partial(nan, keep_logits=True))
    assert verdict.status is Status.DIFFERENT
    assert {found.rule for found in verdict.findings if found.stage == "logits"} == {"nan"}
    assert ab.compare(original, nan, [prefill()]).status is Status.DIFFERENT


def test_zero_rows_are_undecided_and_more_picks_than_columns_equal() -> None:
    """Nothing was compared; rows that see at most k columns are compared slot by slot."""
    few, wide = batches.case([(0, 6)]), batches.case([(3, 5)], topk=64)
    small = partial(chunked, style="vllm", budget_bytes=1)
    for case, status in ((few, Status.UNDECIDED), (wide, Status.EQUAL)):
        assert check(case, small).status is status
        assert check_row_count(case, small, rows=(1,)).status is status
        assert ab.compare(original, small, [case]).status is status
