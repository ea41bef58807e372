"""Composed pages of ranks that somebody else ran, judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from equivalence import judge as judges
from equivalence import ops, plain, replay, sides, specs
from equivalence.case import Case, held
from equivalence.checks.composed import weighing
from equivalence.contract import Contract
from equivalence.errors import InvalidCase, UsageError
from equivalence.verdict import Verdict
from equivalence.weighing import of_runs

_OP = "compose_pages"


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """A step before its outputs are there.

    Attributes:
        case: in memory, unless it is refused.
        verdict: without a finding, or that of a step that may not be composed.
        refused: whether it may not.
    """

    case: Case
    verdict: Verdict
    refused: bool = False


def begin(case: Case) -> Begun:
    """A step that may be composed, or why not: asked once, before any rank hears of it."""
    verdict = judges.under(judges.begin(case), Contract(), origin="default")
    try:
        ops.validate(case)
        whole = held(case)
        refused = judges.refusal(whole, verdict)
    except InvalidCase as error:
        return Begun(case=case, verdict=judges.invalid(verdict, str(error)), refused=True)
    if refused is not None:
        return Begun(case=whole, verdict=refused, refused=True)
    return Begun(case=whole, verdict=verdict)


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
            `checks.composed.strayed`.
        name: how the report calls them.
        earlier: the steps before on the same ranks, the latest last: pages of theirs are
            recognised.

    Returns:
        The verdict; a step that may not be composed is refused whatever the outputs hold.

    Raises:
        UsageError: a case is none or of another op, an output is none of the op's tensors, or an
            earlier step may not be composed.
    """
    if not isinstance(earlier, Sequence):
        raise UsageError(f"earlier is a {type(earlier).__name__}; it is the cases of steps before")
    for one in (case, *earlier):
        if not isinstance(one, Case):
            raise UsageError(f"a step is a Case, not {type(one).__name__}; load_cases reads files")
        if one.op != _OP:
            raise UsageError(f"{one.name} is a case of {one.op}: ranks compose pages of a step")
    given = _plain(outputs)
    before = [begin(one) for one in earlier]
    for begun in before:
        if begun.refused:
            why = begun.verdict.findings[0].reading
            raise UsageError(f"the earlier step {begun.case.name} may not be composed: {why}")
    now = begin(case)
    return now.verdict if now.refused else weigh(now, given, name=name, earlier=before)


def weigh(
    now: Begun, outputs: Mapping[str, Tensor], *, name: str, earlier: Sequence[Begun] = ()
) -> Verdict:
    """As `judge`, of steps that were begun and not refused."""
    try:
        side = sides.given(now.case, outputs, name)
        before = [one.case for one in earlier]
        return of_runs(now.verdict, *weighing.weigh(now.case, [side], earlier=before))
    except InvalidCase as error:
        return judges.invalid(now.verdict, str(error))


def _plain(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs as plain tensors."""
    known = specs.OPS[_OP].outputs
    if not isinstance(outputs, Mapping):
        raise UsageError(f"outputs are a {type(outputs).__name__}; they go by name")
    given = {}
    for name, tensor in outputs.items():
        if name not in known or not isinstance(tensor, Tensor):
            what = f"{name!r} ({type(tensor).__name__})"
            raise UsageError(
                plain.line(f"outputs hold {what}; they are tensors {', '.join(known)}")
            )
        try:
            given[name] = replay.plain_of(tensor)
        except TypeError as error:
            raise UsageError(f"outputs.{name}: {error}") from error
    return given
