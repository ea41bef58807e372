"""The centre: judge what a case recorded, or what a candidate gives for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from equivalence import blocks, compare, control, digest, ops, plain, schema, sides, windows
from equivalence.blocks import Job
from equivalence.candidate import Candidate, name_of
from equivalence.case import Case, held, take_rows
from equivalence.contract import Contract, describe
from equivalence.errors import InvalidCase, NotEquivalent, Undecided, UsageError
from equivalence.report import as_text
from equivalence.tally import KEPT, RunTally
from equivalence.verdict import Coverage, Finding, Run, Status, Verdict, worst

if TYPE_CHECKING:
    from collections import Counter

Progress = Callable[[int, int], None]


def check(
    case: Case,
    candidate: Candidate | None = None,
    *,
    baseline: Candidate | None = None,
    contract: Contract | str | None = None,
    device: torch.device | str | None = None,
    repeats: int = 1,
    rows: Sequence[int] | None = None,
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
        progress: told (rows done, rows in all) as blocks are judged.

    Returns:
        The verdict; a bad case or a failing candidate is in it, as UNDECIDED.

    Raises:
        UsageError: for a contract that cannot be read or judged, a device that is not there,
            a row that is not there, or repeats below 1.
    """
    _check_call(case, baseline, repeats)
    torch.set_flush_denormal(False)  # the reference needs subnormals
    if device is not None:
        check_device(device)
    free, origin = Contract(), "default"
    verdict = Verdict(
        case=case.name,
        op=case.op,
        path=case.path,
        status=Status.UNDECIDED,
        candidate=name_of(candidate),
    )
    if contract is not None:
        free, origin = _judged(_read(contract)), "argument"
    elif candidate is None and case.contract is not None:
        try:
            free, origin = _judged(Contract.parse(case.contract)), "record"
        except UsageError as error:
            return invalid(verdict, f"contract: {error}")
    verdict = replace(
        verdict,
        contract=describe(free, origin=origin),
        contract_origin=origin,
        allowed_by=free.name or "",
    )
    try:
        sizes = ops.validate(case)
        loaded = held(case, device=device)
        names = None
        if rows is not None:
            names = chosen(case, rows, sizes).to(next(iter(loaded.inputs.values())).device)
            loaded = take_rows(loaded, names)
        spans = ops.find(case.op).windows(loaded)
        loaded = windows.emptied(loaded, spans)
        shared = candidate is not None and baseline is not None
        old = None
        if baseline is not None:
            (old,) = sides.called(loaded, baseline, free, shared=shared)
        judged = (
            sides.recorded(loaded)
            if candidate is None
            else sides.called(loaded, candidate, free, repeats=repeats, shared=shared)
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
        return _judge(job, verdict, progress or _quiet)
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
) -> Verdict:
    """Judge one case as `check` does, and raise unless all is equal.

    Raises:
        NotEquivalent: something differs; `.verdict` has the evidence.
        Undecided: nothing could be concluded.
        UsageError: as `check`.
    """
    __tracebackhide__ = True
    verdict = check(
        case, candidate, baseline=baseline, contract=contract, device=device, repeats=repeats
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


def _read(contract: Contract | str) -> Contract:
    if isinstance(contract, Contract):
        return contract
    if not isinstance(contract, str):
        raise UsageError(f"a contract is a Contract or a text, not {type(contract).__name__}")
    return Contract.parse(contract)


def _judged(contract: Contract) -> Contract:
    """The contract, where every freedom in it is one that this version judges."""
    strict = Contract()
    for key in ("scores", "ranks"):
        if getattr(contract, key) != getattr(strict, key):
            raise UsageError(f"{key}={getattr(contract, key)} is not judged by this version")
    return contract


def chosen(case: Case, rows: Sequence[int], sizes: Mapping[str, int]) -> torch.Tensor:
    """The rows asked for, ascending, completed to whole requests.

    Raises:
        UsageError: the case has no such row.
    """
    for row in rows:
        if not 0 <= row < sizes["rows"]:
            count = f"{sizes['rows']:,} rows, from 0 on"
            raise UsageError(f"row {row} of {case.name}: it has {count}")
    chosen = torch.tensor(sorted(set(rows)), dtype=torch.int64)
    return schema.whole_requests(chosen, next_n=sizes.get("n", 1))


def _quiet(_done: int, _rows: int) -> None:
    """Tell nobody."""


def invalid(verdict: Verdict, sentence: str) -> Verdict:
    """The record contradicts itself or cannot be read: nothing may be concluded."""
    found = Finding(
        stage="inputs", rule="invalid-record", status=Status.UNDECIDED, reading=sentence
    )
    run = Run(name="record", stages={}, findings=(found,))
    return replace(verdict, status=Status.UNDECIDED, runs=(run,))


def _judge(job: Job, verdict: Verdict, progress: Progress) -> Verdict:
    """Judge block after block, then sum up."""
    tallies = [RunTally(name=side.name, findings=list(side.findings)) for side in job.sides]
    compared: dict[str, Counter[str]] = {}
    hashed = digest.Rows()
    rows = len(job.windows.start)
    anything = any(side.outputs for side in job.sides)
    unwritten: list[Finding] = []
    for span in blocks.spans(job) if anything else ():
        block = blocks.refer(job, span)
        if block is not None:
            if block.logits is not None:
                hashed.add(block.logits, block.column, block.visible)
            for side, tally in zip(job.sides, tallies, strict=True):
                decided = compare.decide(job, block, side)
                tally.blame.update(compare.blame(job, block, side, decided))
                for stage, each in decided.items():
                    tally.stages[stage].add(each, block.names, run=side.name)
            unwritten += compare.unwritten_scores(job, block) if not unwritten else []
            control.count_picks(job, block, compared)
            control.compare_logits(job, block, tallies)
        progress(span.stop, rows)
    runs = [tally.run() for tally in tallies]
    about = [*_broken(job), *_of_baseline(job), *unwritten, *_drifted(job, hashed)]
    about += [*_unscored(job, runs), *_without_picks(job)] if bool(job.live.any()) else []
    if about:
        runs.append(Run(name="record", stages={}, findings=tuple(about)))
    judged = int(job.live.sum()) if anything else 0
    arithmetic = job.case.arithmetic if job.source == "reference" else ""
    return _sum_up(
        replace(
            verdict,
            runs=tuple(runs),
            scores=f"{job.source} {arithmetic}".strip(),
            coverage=Coverage(rows=judged, scored_rows=judged),
            control={stage: dict(counts) for stage, counts in compared.items()},
        )
    )


def _broken(job: Job) -> list[Finding]:
    """Live rows whose metadata cannot be; the others were judged."""
    told = [
        Finding(
            stage="inputs",
            rule="invalid-record",
            status=Status.UNDECIDED,
            row=row if job.names is None else int(job.names[row]),
            reading=sentence,
        )
        for row, sentence in sorted(job.windows.broken.items())
    ]
    if len(told) > KEPT:
        rest = Finding(
            stage="inputs",
            rule="invalid-record",
            status=Status.UNDECIDED,
            reading=f"{len(told) - KEPT:,} more rows are broken",
        )
        return [*told[:KEPT], rest]
    return told


def _unscored(job: Job, runs: Sequence[Run]) -> list[Finding]:
    """Outputs that nothing could judge."""
    return [
        Finding(
            stage=stage,
            rule="not-compared",
            status=Status.UNDECIDED,
            run=run.name,
            reading="no reference scores: name an arithmetic, or give a baseline that has logits",
        )
        for side, run in zip(job.sides, runs, strict=True)
        for stage in side.outputs
        if stage not in run.stages and (stage != "logits" or job.source == "none")
    ]


def _without_picks(job: Job) -> list[Finding]:
    """A layer of which no run gave any picks: that output was never compared."""
    given = {stage for side in job.sides for stage in side.outputs}
    if not job.k or given != {"logits"}:
        return []
    reading = f"no picks were given: {job.case.op} picks, mqa_logits and its kin only score"
    return [
        Finding(stage="raw_indices", rule="not-compared", status=Status.UNDECIDED, reading=reading)
    ]


def _of_baseline(job: Job) -> list[Finding]:
    """What is wrong with the baseline: nothing may be concluded from it."""
    findings = () if job.baseline is None else job.baseline.findings
    return [replace(found, status=Status.UNDECIDED, run="baseline") for found in findings]


def _drifted(job: Job, hashed: digest.Rows) -> list[Finding]:
    """A stored digest that the present reference no longer gives."""
    told = []
    now = hashed.result() if job.source == "reference" and not job.windows.broken else {}
    for stage, got in now.items():
        want = job.case.reference.get(stage, got)
        if want != got:
            told.append(
                Finding(
                    stage=stage,
                    rule="reference-drift",
                    status=Status.UNDECIDED,
                    reading=f"the case was stored with reference digest {want}, now it is {got}",
                )
            )
    return told


def _sum_up(verdict: Verdict) -> Verdict:
    """The status of a case from its runs, and a note where it is not plain why."""
    statuses = [stage.status for run in verdict.runs for stage in run.stages.values()]
    statuses += [finding.status for run in verdict.runs for finding in run.findings]
    if not statuses:
        note = "nothing was compared: the case holds no recorded run and no candidate was given"
        note = note if verdict.coverage.rows or not verdict.candidate else "nothing was compared"
        return replace(verdict, status=Status.UNDECIDED, note=note)
    status, stages = worst(statuses), verdict.stages
    if status is Status.EQUAL and not any(stage.power for stage in stages.values()):
        note = f"no power: no row of {', '.join(stages)} had a choice to get wrong"
        return replace(verdict, status=Status.UNDECIDED, note=note)
    return replace(verdict, status=status)


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
