"""Outputs that are already there: judged whole, by sampled rows, by a baseline's logits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from equivalence import generate, judge, memory, ops, sides
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.verdict import Coverage, Status, Verdict
from refimpl.layer import decode_indexer, prefill_indexer
from refimpl.topk import ragged_topk

LOOSE = Contract.parse("order=any,ties=any")


def layer(case: Case) -> dict[str, Tensor]:
    """The reference's outputs of a prefill layer."""
    return prefill_indexer(**case.inputs, **case.params)  # type: ignore[arg-type]


def weigh(case: Case, outputs: dict[str, Tensor], **rest: object) -> Verdict:
    """Judge one side."""
    side = sides.given(case, outputs, "candidate")
    return judge.weigh(case, [side], contract=Contract(), **rest)  # type: ignore[arg-type]


def test_right_outputs_are_equal_and_every_row_is_covered() -> None:
    """The reference's own outputs, all nine rows."""
    case = generate.prefill_indexer(0)
    verdict = weigh(case, layer(case))
    assert (verdict.status, verdict.coverage) == (
        Status.EQUAL,
        Coverage(rows=9, scored_rows=9),
    )
    assert list(verdict.stages) == ["logits", "raw_indices", "page_indices"]


@pytest.mark.parametrize("rows", [[0], [1, 4], [8]])
def test_only_the_rows_named_are_judged_under_their_own_numbers(rows: list[int]) -> None:
    """A wrong pick in row 4 shows where row 4 is among them, and as row 4."""
    case = generate.prefill_indexer(0)
    outputs = layer(case)
    outputs["logits"][4, int(case.inputs["row_start"][4])] += 1
    verdict = weigh(case, outputs, rows=torch.tensor(rows))
    assert verdict.coverage == Coverage(rows=len(rows), scored_rows=len(rows))
    assert verdict.failing == [row for row in rows if row == 4]


def test_decode_rows_are_completed_to_whole_requests() -> None:
    """Row 1 brings row 0, the other token of its request."""
    case = generate.decode_indexer(0)
    outputs = decode_indexer(**case.inputs, **case.params)  # type: ignore[arg-type]
    verdict = weigh(case, outputs, rows=torch.tensor([1]))
    assert (verdict.status, verdict.coverage.rows) == (Status.EQUAL, 2)


def test_a_baselines_logits_judge_rows_that_no_reference_scored() -> None:
    """Picks that are best by the baseline's logits are right, whatever the true scores are."""
    case = replace(generate.prefill_indexer(0, tie_rich=False), arithmetic=None)
    other = layer(case)
    other["logits"] = -other["logits"]
    other |= _picks(case, other["logits"])
    baseline = sides.given(case, {"logits": other["logits"]}, "baseline")
    rows = torch.arange(9)
    verdict = weigh(case, other, rows=rows, baseline=baseline)
    assert (verdict.status, verdict.scores) == (Status.EQUAL, "baseline")
    wrong = layer(case) | {"logits": other["logits"]}
    assert weigh(case, wrong, rows=rows, baseline=baseline).status is Status.DIFFERENT


def _picks(case: Case, logits: Tensor) -> dict[str, Tensor]:
    from refimpl.layer import prefill_picks  # noqa: PLC0415 - beside its only use

    names = {"block_table": "page_table", "row_to_request": "row_to_request"}
    given = {to: case.inputs[name] for name, to in names.items()}
    windows = {name: case.inputs[name] for name in ("row_start", "row_end")}
    params = {"k": case.params["topk"], "page_size": case.params["page_size"]}
    return prefill_picks(logits=logits, **windows, **given, **params)  # type: ignore[arg-type]


def test_several_sides_are_judged_each_for_itself() -> None:
    """The original is right and the candidate is not; the verdict says which."""
    case = generate.ragged_topk(0)
    right = ragged_topk(**case.inputs, k=16)  # type: ignore[arg-type]
    wrong = right.clone()
    wrong[0, 0] = wrong[0, 1]
    arms = [
        sides.given(case, {"raw_indices": picks}, name)
        for name, picks in (("original", right), ("candidate", wrong))
    ]
    verdict = judge.weigh(case, arms, contract=LOOSE)
    told = {run.name: run.stages["raw_indices"].status for run in verdict.runs}
    assert told == {"original": Status.EQUAL, "candidate": Status.DIFFERENT}


def test_a_case_that_cannot_be_is_undecided() -> None:
    """The sentence is in the verdict."""
    case = generate.ragged_topk(0)
    side = sides.given(case, {}, "candidate")
    broken = replace(case, params={})
    verdict = judge.weigh(broken, [side], contract=LOOSE)
    assert verdict.status is Status.UNDECIDED
    assert verdict.findings[0].reading == "params.k is missing"


def test_a_sample_of_wide_rows_is_judged_in_little_memory() -> None:
    """64 rows of 262,144 scores: a copy of them all would be 64 MiB, and three sides 192."""
    rows, columns = 128, 1 << 18
    scores = torch.arange(columns).float().expand(rows, columns).contiguous()
    case = Case(
        op="ragged_topk",
        inputs={
            "scores": scores,
            "row_start": torch.zeros(rows, dtype=torch.int32),
            "row_end": torch.full((rows,), columns, dtype=torch.int32),
        },
        params={"k": 64},
    )
    picks = (columns - 1 - torch.arange(64)).int().expand(rows, 64).contiguous()
    side = sides.given(case, {"raw_indices": picks}, "candidate")
    assert ops.validate(case)["rows"] == rows
    with memory.measured(scores.device) as meter:
        verdict = judge.weigh(case, [side], contract=LOOSE, rows=torch.arange(0, rows, 2))
    assert (verdict.status, verdict.coverage.rows) == (Status.EQUAL, 64)
    assert meter.peak < 256 << 20
