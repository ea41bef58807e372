"""Composed pages of ranks that somebody else ran, judged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from equivalence import composition, ops, sides, weighing
from equivalence.case import Case, held
from equivalence.contract import Contract, describe
from equivalence.errors import InvalidCase, UsageError
from equivalence.judge import invalid, refusal
from equivalence.verdict import Status, Verdict


def judge(
    case: Case,
    outputs: Mapping[str, Tensor],
    *,
    name: str = "candidate",
    earlier: Sequence[Case] = (),
) -> Verdict:
    """Judge what every rank holds after one step.

    Args:
        case: the step, of op `compose_pages`.
        outputs: by output, every rank's; `strays` are bytes that changed outside, see
            `checks.strayed`.
        name: how the report calls them.
        earlier: the steps before on the same ranks, the latest last: pages of theirs are
            recognised.

    Returns:
        The verdict; a step that may not be composed is refused whatever the outputs hold.

    Raises:
        UsageError: a case is of another op, or an earlier step may not be composed.
    """
    for one in (case, *earlier):
        if one.op != "compose_pages":
            raise UsageError(f"{one.name} is a case of {one.op}: ranks compose pages of a step")
    verdict = Verdict(
        case=case.name,
        op=case.op,
        path=case.path,
        status=Status.UNDECIDED,
        contract=describe(Contract(), origin="default"),
    )
    before = [_composable(one) for one in earlier]
    try:
        ops.validate(case)
        now = held(case)
        if (refused := refusal(now, verdict)) is not None:
            return refused
        side = sides.given(now, outputs, name)
        runs, coverage = composition.weigh(now, [side], earlier=before)
    except InvalidCase as error:
        return invalid(verdict, str(error))
    return weighing.sum_up(
        replace(verdict, runs=tuple(runs), scores="reference", coverage=coverage)
    )


def _composable(case: Case) -> Case:
    """An earlier step in memory."""
    try:
        ops.validate(case)
        whole = held(case)
    except InvalidCase as error:
        raise UsageError(f"the earlier step {case.name}: {error}") from error
    for found in composition.refused(whole):
        raise UsageError(f"the earlier step {case.name} may not be composed: {found.reading}")
    return whole
