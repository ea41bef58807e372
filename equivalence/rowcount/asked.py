"""Asked: what is wanted of a check of the row count, refused where it cannot be."""

from collections.abc import Sequence

from equivalence import ops, specs
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.errors import UsageError


def check(
    case: Case,
    baseline: Candidate | None,
    rows: Sequence[int] | None,
    *,
    seed: int,
    repeats: int,
    sample: int,
) -> None:
    """Refuse what no case could make right.

    Raises:
        UsageError: in one sentence.
    """
    if not isinstance(case, Case):
        kind = type(case).__name__
        raise UsageError(f"check_row_count wants a Case, not {kind}; load_cases reads files")
    if case.op in specs.OPS and specs.OPS[case.op].whole:
        raise UsageError(
            f"{case.op} cannot be cut into calls of fewer rows: it has no invariance to check"
        )
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed!r}; it is a whole number from 0 to 2**63 - 1")
    for name, count in {"repeats": repeats, "sample": sample}.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{name} is {count!r}; it is a whole number from 1 on")
    if rows is not None and not rows:
        raise UsageError("rows is empty; it is the chunk sizes to call with, as in rows=(128, 256)")
    for size in rows or ():
        if type(size) is not int or size < 1:
            raise UsageError(f"rows holds {size!r}; a chunk has a whole number of rows, 1 or more")
    if baseline is not None and case.op in ops.OPS and ops.find(case.op).score is None:
        raise UsageError(
            f"a baseline gives the scores that judge; {case.op} has its own among the inputs"
        )
