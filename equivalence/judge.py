"""The centre: judge what a case recorded, or what a candidate gives for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from equivalence import (
    allowed,
    blocks,
    digest,
    eligible,
    ops,
    plain,
    schema,
    sides,
    specs,
    windows,
)
from equivalence.blocks import Job
from equivalence.candidate import Candidate, name_of
from equivalence.case import Case, held, take_rows
from equivalence.contract import Contract, describe
from equivalence.demands import Demands
from equivalence.errors import InvalidCase, NotEquivalent, Undecided, UsageError
from equivalence.report import as_text
from equivalence.sides import Side
from equivalence.verdict import Finding, Run, Status, Verdict, worst
from equivalence.weighing import Progress, weigh_job


def check(
    case: Case,
    candidate: Candidate | None = None,
    *,
    baseline: Candidate | None = None,
    contract: Contract | str | None = None,
    device: torch.device | str | None = None,
    repeats: int = 1,
    rows: Sequence[int] | None = None,
    max_transient: int | None = None,
    require_path: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Verdict:
    """Judge one case.

    Args:
        case: what was called, and what was recorded of it.
        candidate: `f(**inputs, **params)` giving a tensor or a mapping of outputs.
            With one, recorded runs are not judged.
        baseline: the old implementation, whose outcome is then the reference.
        contract: what may differ; of a candidate strict by default, of recorded runs the
            case's own.
        device: where the inputs go and the reference runs.
        repeats: how often the candidate is called.
        rows: judge these rows alone, as a call of their own; decode rows by whole requests.
        max_transient: bytes a call of the candidate may hold at once beyond inputs and outputs.
        require_path: kernels or modules of which each call must leave a receipt, or the verdict
            is UNDECIDED.
        progress: told (rows done, rows in all) as blocks are judged.

    Returns:
        The verdict; a bad case or a failing candidate is in it, as UNDECIDED.

    Raises:
        UsageError: for a contract that cannot be read or judged, a device that is not there,
            a row that is not there, repeats below 1, or a demand that cannot be met by recorded
            runs.
    """
    paths = (require_path,) if isinstance(require_path, str) else tuple(require_path)
    demands = Demands(max_transient=max_transient, require_path=paths)
    _check_call(case, baseline, repeats)
    for name, function in (("candidate", candidate), ("baseline", baseline)):
        if function is not None and not callable(function):
            raise UsageError(f"a {name} is a callable; candidate.load reads MODULE:FUNCTION")
    if candidate is None and demands != Demands():
        raise UsageError("max_transient and require_path ask something of a candidate: give one")
    torch.set_flush_denormal(False)  # the reference needs subnormals
    if device is not None:
        check_device(device)
    verdict = replace(begin(case), candidate=name_of(candidate))
    try:
        free, origin = allowed.of_case(
            case, contract, candidate=candidate is not None, baseline=baseline is not None
        )
    except InvalidCase as error:
        return invalid(verdict, str(error))
    verdict = under(verdict, free, origin=origin)
    try:
        sizes = ops.validate(case)
        loaded = held(case, device=device)
        names = None
        if rows is not None:
            ops.find(case.op).windows(loaded)
            names = chosen(case, rows, sizes).to(next(iter(loaded.inputs.values())).device)
            loaded = take_rows(loaded, names)
        spans = ops.find(case.op).windows(loaded)
        eligible.expect(loaded, spans)
        if (refused := refusal(loaded, verdict)) is not None:
            return refused
        loaded = windows.emptied(loaded, spans)
        shared = candidate is not None and baseline is not None
        old = None
        if baseline is not None:
            (old,) = sides.called(loaded, baseline, free, shared=shared)
        judged = (
            sides.recorded(loaded)
            if candidate is None
            else sides.called(
                loaded, candidate, free, repeats=repeats, shared=shared, demands=demands
            )
        )
        job = Job(
            case=loaded,
            windows=spans,
            contract=free,
            sides=tuple(judged),
            baseline=old,
            called=candidate is not None,
            names=names,
        )
        return weigh_job(job, verdict, progress or _quiet)
    except InvalidCase as error:
        return invalid(verdict, str(error))


def weigh(
    case: Case,
    given: Sequence[Side],
    *,
    contract: Contract,
    baseline: Side | None = None,
    rows: torch.Tensor | None = None,
) -> Verdict:
    """Judge outputs that are already there, all of them or these rows.

    Args:
        case: held in memory; what was recorded of it is left alone.
        given: the outputs, each under its name; see `sides.given`.
        contract: what each of them may do differently.
        baseline: the side whose logits judge, in place of the reference.
        rows: int64, ascending; their numbers stay those of the whole call.

    Returns:
        The verdict; UNDECIDED where the case cannot be computed.
    """
    free = allowed.freedoms(contract, case)
    verdict = under(begin(case), free, origin="argument")
    try:
        sizes = ops.validate(case)
        spans = ops.find(case.op).windows(case)
        eligible.expect(case, spans)
        if (refused := refusal(case, verdict)) is not None:
            return refused
        if rows is not None:
            rows = schema.whole_requests(rows.to(spans.start), next_n=sizes.get("n", 1))
        job = Job(
            case=windows.emptied(replace(case, recorded=(), reference={}), spans),
            windows=spans,
            contract=free,
            sides=tuple(given),
            baseline=baseline,
            called=True,
            rows=rows,
        )
        return weigh_job(job, verdict, _quiet)
    except InvalidCase as error:
        return invalid(verdict, str(error))


def assert_equivalent(
    case: Case,
    candidate: Candidate | None = None,
    *,
    baseline: Candidate | None = None,
    contract: Contract | str | None = None,
    device: torch.device | str | None = None,
    repeats: int = 1,
    max_transient: int | None = None,
    require_path: str | Sequence[str] = (),
) -> Verdict:
    """Judge one case as `check` does, and raise unless all is equal.

    Raises:
        NotEquivalent: something differs; `.verdict` has the evidence.
        Undecided: nothing could be concluded.
        UsageError: as `check`.
    """
    __tracebackhide__ = True
    verdict = check(
        case,
        candidate,
        baseline=baseline,
        contract=contract,
        device=device,
        repeats=repeats,
        max_transient=max_transient,
        require_path=require_path,
    )
    raise_unless_equal(verdict)
    return verdict


def raise_unless_equal(verdict: Verdict, *, message: str | None = None) -> None:
    """The one place where a verdict becomes an exception."""
    __tracebackhide__ = True
    if verdict.status is not Status.EQUAL:
        kind = NotEquivalent if verdict.status is Status.DIFFERENT else Undecided
        raise kind(message or as_text.failure(verdict), verdict)


def check_device(device: torch.device | str) -> None:
    """Raise UsageError unless tensors can live on this device."""
    try:
        torch.empty(1, device=device).fill_(1.0).item()
    # What torch raises depends on how it was built.
    except Exception as error:
        raise UsageError(plain.line(f"device {str(device)!r}: {error}", most=160)) from error


def _check_call(case: Case, baseline: Candidate | None, repeats: int) -> None:
    """Refuse what no case could make right."""
    if not isinstance(case, Case):
        raise UsageError(f"check wants a Case, not {type(case).__name__}; load_cases reads files")
    if type(repeats) is not int or repeats < 1:
        raise UsageError(f"repeats is {repeats!r}; a candidate is called at least once")
    if baseline is not None and case.op in ops.OPS and ops.find(case.op).score is None:
        raise UsageError(
            f"a baseline gives the scores that judge; {case.op} has its own among the inputs:"
            " judge the old kernel as a candidate of its own"
        )


def chosen(case: Case, rows: Sequence[int], sizes: Mapping[str, int]) -> torch.Tensor:
    """The rows asked for, ascending, completed to whole requests.

    Raises:
        UsageError: the case has no such row.
    """
    if specs.OPS[case.op].whole:
        raise UsageError(f"{case.op} is judged whole: it takes no rows")
    for row in rows:
        if type(row) is not int:
            raise UsageError(f"row {row!r} is no number")
        if not 0 <= row < sizes["rows"]:
            count = f"{sizes['rows']:,} rows, from 0 on"
            raise UsageError(f"row {row} of {case.name}: it has {count}")
    chosen = torch.tensor(sorted(set(rows)), dtype=torch.int64)
    return schema.whole_requests(chosen, next_n=sizes.get("n", 1))


def _quiet(_done: int, _rows: int) -> None:
    """Tell nobody."""


def begin(case: Case) -> Verdict:
    """The verdict of a case of which nothing is known yet."""
    return Verdict(case=case.name, op=case.op, path=case.path, status=Status.UNDECIDED)


def under(verdict: Verdict, free: Contract, *, origin: str) -> Verdict:
    """The verdict with the contract in force, and where that comes from."""
    return replace(
        verdict,
        contract=describe(free, origin=origin),
        contract_origin=origin,
        allowed_by=free.name or "",
    )


def invalid(verdict: Verdict, sentence: str) -> Verdict:
    """The record contradicts itself or cannot be read: nothing may be concluded."""
    found = Finding(
        stage="inputs", rule="invalid-record", status=Status.UNDECIDED, reading=sentence
    )
    run = Run(name="record", stages={}, findings=(found,))
    return replace(verdict, status=Status.UNDECIDED, runs=(run,))


def refusal(case: Case, verdict: Verdict) -> Verdict | None:
    """The verdict of a call that may not be made at all, whatever it would give; else None."""
    op = ops.find(case.op)
    if op.weigh is None or op.faults is None or not (found := tuple(op.faults(case))):
        return None
    run = Run(name="record", stages={}, findings=found)
    return replace(verdict, status=worst(each.status for each in found), runs=(run,))


def reference_digests(case: Case) -> dict[str, str]:
    """Digests of what the reference gives for a case, by output; empty where it computes nothing.

    Raises:
        InvalidCase: the case cannot be computed.
    """
    torch.set_flush_denormal(False)
    loaded = held(case)
    job = Job(case=loaded, windows=ops.find(case.op).windows(loaded), contract=Contract(), sides=())
    hashed = digest.Rows()
    if job.source != "reference" or job.windows.broken:
        return {}
    for span in blocks.spans(job):
        block = blocks.refer(job, span)
        if block is not None and block.logits is not None:
            hashed.add(block.logits, block.column, block.visible)
    return dict(hashed.result())
