"""A required path: a silent fallback is undecided, whatever it picked."""

import json

import pytest
from torch import Tensor

from equivalence import generate, receipt
from equivalence.judge import check
from equivalence.report import as_json, as_text
from equivalence.verdict import Status
from refimpl.topk import ragged_topk

CASE = generate.ragged_topk(0)


def fused(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """A kernel that says it ran."""
    receipt.leave("my_kernels.fused", rows=len(scores), version="2.0", arch="sm90", k=k)
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


def fallback(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """A fallback that says so."""
    receipt.leave("torch.topk", rows=len(scores))
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


def silent(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """A kernel that says nothing."""
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


@pytest.mark.parametrize("name", ["my_kernels", "my_kernels.fused"])
def test_the_kernel_that_ran_is_named_and_the_verdict_stands(name: str) -> None:
    """A receipt of the required module or kernel leaves EQUAL."""
    verdict = check(CASE, fused, require_path=name)
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    assert as_text.case_lines(verdict).splitlines()[1].strip() == (
        "ran             my_kernels.fused 2.0 sm90   1 call of 9 rows   k=16"
    )


@pytest.mark.parametrize(
    ("candidate", "was"), [(fallback, "torch.topk"), (silent, "nothing")], ids=["told", "silent"]
)
def test_a_fallback_is_undecided(candidate: object, was: str) -> None:
    """Right picks of another kernel prove nothing about the required one."""
    verdict = check(CASE, candidate, require_path=("my_kernels",))  # type: ignore[arg-type]
    assert verdict.status is Status.UNDECIDED
    assert [(f.stage, f.rule, f.reading) for f in verdict.findings] == [
        (
            "path",
            "not-compared",
            f"no call of my_kernels was told of, and it is required; it was {was}",
        )
    ]


def test_a_verdict_with_paths_and_memory_travels_as_json() -> None:
    """What JSON says of a verdict is the whole verdict."""
    verdict = check(CASE, fused)
    data = json.loads(json.dumps(as_json.case_data(verdict)))
    assert as_json.verdict_of(data).runs == verdict.runs
