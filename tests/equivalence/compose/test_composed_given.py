"""What a caller hands to the judge of composed pages: all of it, and nothing else."""

from typing import Any

import pytest
import torch

from equivalence import generate
from equivalence.checks.composed import weighing
from equivalence.compose import judging
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.verdict import Status


def test_locations_that_were_not_given_are_not_equal() -> None:
    """Row locations are owed as pages are."""
    case = generate.compose_pages(0)
    pages = {n: t for n, t in weighing.reference(case).items() if n != "row_locations"}
    for verdict in (judging.judge(case, pages), check(case, lambda **_: pages)):
        assert verdict.status is Status.UNDECIDED
        (found,) = verdict.findings
        assert (found.stage, found.rule) == ("row_locations", "not-compared")


def test_expanded_outputs_are_left_as_they_are() -> None:
    """One memory for all ranks, handed out again and again."""
    case = generate.compose_pages(0)
    right = weighing.reference(case)
    for repeats in (2, 1):
        assert check(case, lambda **_: right, repeats=repeats).status is Status.EQUAL


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (None, "outputs are a NoneType; they go by name"),
        ([1], "outputs are a list; they go by name"),
        ({"foo": torch.zeros(1)}, r"outputs hold 'foo' \(Tensor\); they are tensors token_pages"),
        ({3: torch.zeros(1)}, r"outputs hold 3 \(Tensor\)"),
        ({"token_pages": None}, r"outputs hold 'token_pages' \(NoneType\)"),
        ({"token_pages": torch.zeros(1, device="meta")}, r"outputs\.token_pages: a .* on meta"),
    ],
)
def test_what_is_no_output_is_a_mistake(outputs: Any, sentence: str) -> None:  # noqa: ANN401 - garbage
    """It is told in one sentence."""
    with pytest.raises(UsageError, match=sentence):
        judging.judge(generate.compose_pages(0), outputs)


def test_what_is_no_step_is_a_mistake() -> None:
    """The step, and the steps before."""
    case = generate.compose_pages(0)
    right = weighing.reference(case)
    garbage: Any = None
    with pytest.raises(UsageError, match="a step is a Case, not NoneType"):
        judging.judge(garbage, right)
    with pytest.raises(UsageError, match="a step is a Case, not NoneType"):
        judging.judge(case, right, earlier=[garbage])
    with pytest.raises(UsageError, match="earlier is a Case; it is the cases of steps before"):
        judging.judge(case, right, earlier=case)  # type: ignore[arg-type]
