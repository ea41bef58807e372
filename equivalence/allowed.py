"""Which freedoms judge a case, and which of them this version or this case cannot give."""

from equivalence import ops, stages
from equivalence.case import Case
from equivalence.contract import OF_MASKS, Contract
from equivalence.errors import InvalidCase, UsageError


def of_case(
    case: Case, contract: Contract | str | None, *, candidate: bool, baseline: bool
) -> tuple[Contract, str]:
    """The contract that judges a case, and where it comes from: argument, record or default.

    Args:
        case: what is judged.
        contract: the one given; None leaves a candidate strict and a record its own.
        candidate: whether a candidate is judged.
        baseline: whether its reference is another implementation.

    Raises:
        UsageError: the one given cannot be read or judged.
        InvalidCase: the case's own cannot, or the case has nothing to derive a bound from.
    """
    free, origin = Contract(), "default"
    if contract is not None:
        free, origin = freedoms(contract, case), "argument"
    elif not candidate and case.contract is not None:
        try:
            free, origin = freedoms(case.contract, case), "record"
        except UsageError as error:
            raise InvalidCase(f"contract: {error}") from error
    if free.scores == "bound" and baseline:
        raise UsageError("scores=bound is derived from a reference: leave the baseline out")
    if free.scores == "bound" and case.arithmetic is None:
        raise InvalidCase("scores=bound is derived from an arithmetic, and the case names none")
    return free, origin


def freedoms(contract: Contract | str, case: Case | None = None) -> Contract:
    """The contract, where every freedom in it is one that this version judges.

    Args:
        contract: or its text.
        case: what it is about, where that is known.

    Raises:
        UsageError: it cannot be read, or not be judged.
    """
    if not isinstance(contract, Contract | str):
        raise UsageError(f"a contract is a Contract or a text, not {type(contract).__name__}")
    free = contract if isinstance(contract, Contract) else Contract.parse(contract)
    if free.ranks != Contract().ranks:
        raise UsageError(f"ranks={free.ranks} is not judged by this version")
    if case is None and free.scores != Contract().scores:
        raise UsageError(f"scores={free.scores} is not judged by this version")
    if case is None or case.op not in ops.OPS:
        return free
    if free.scores == "bound" and ops.find(case.op).bound is None:
        raise UsageError(f"scores=bound is derived where a reference scores; {case.op} does not")
    if not stages.publishes(case):
        for key, value in OF_MASKS.items():
            if getattr(free, key) == value:
                raise UsageError(f"{key}={value} speaks of masks: this {case.op} publishes none")
    return free
