"""Weighing: the sides of a job block after block, and what they come to."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from equivalence import blocks, compare, control, digest, ops, stages
from equivalence.blocks import Job
from equivalence.case import published_of
from equivalence.tally import KEPT, RunTally
from equivalence.verdict import Coverage, Finding, Run, Status, Verdict, worst
from refimpl.profiles import PUBLISHED

if TYPE_CHECKING:
    from collections import Counter

Progress = Callable[[int, int], None]


def weigh_job(job: Job, verdict: Verdict, progress: Progress) -> Verdict:
    """Judge block after block, then sum up.

    Args:
        job: what is judged.
        verdict: what is known before: the case, the contract.
        progress: told (rows done, rows in all).
    """
    whole = ops.find(job.case.op).weigh
    if whole is not None:
        return of_runs(verdict, *whole(job.case, job.sides, progress))
    tallies = [
        RunTally(name=side.name, findings=list(side.findings), memory=side.memory, paths=side.paths)
        for side in job.sides
    ]
    compared: dict[str, Counter[str]] = {}
    hashed = digest.Rows()
    anything = any(side.outputs for side in job.sides)
    unwritten: list[Finding] = []
    for span in blocks.spans(job) if anything else ():
        block = blocks.refer(job, span)
        if block is not None:
            if block.logits is not None and job.case.reference:
                hashed.add(block.logits, block.column, block.visible)
            for side, tally in zip(job.sides, tallies, strict=True):
                decided = compare.decide(job, block, side)
                tally.blame.update(compare.blame(job, block, side, decided))
                for stage, each in decided.items():
                    names = block.names if each.ids is None else each.ids
                    tally.stages[stage].add(each, names, run=side.name)
            unwritten += compare.unwritten_scores(job, block) if not unwritten else []
            control.count_picks(job, block, compared)
            control.compare_logits(job, block, tallies)
        progress(span.stop, job.count)
    runs = [tally.run() for tally in tallies]
    about = [*_broken(job), *_of_inputs(job), *_of_baseline(job), *unwritten]
    about += _drifted(job, hashed)
    live = job.live if job.rows is None else job.live[job.rows]
    about += [*_unscored(job, runs), *_without_picks(job)] if bool(live.any()) else []
    about += _without_exact(job) if bool(live.any()) else []
    if about:
        runs.append(Run(name="record", stages={}, findings=tuple(about)))
    judged = int(live.sum()) if anything else 0
    arithmetic = job.case.arithmetic or "" if job.source == "reference" else ""
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


def _of_inputs(job: Job) -> list[Finding]:
    """Faults of the call itself, which equal outputs would not clear."""
    faults = ops.find(job.case.op).faults
    return [] if faults is None else list(faults(job.case))


def _unscored(job: Job, runs: Sequence[Run]) -> list[Finding]:
    """Outputs that nothing could judge."""
    return [
        Finding(
            stage=stage,
            rule="not-compared",
            status=Status.UNDECIDED,
            run=run.name,
            reading=reading,
        )
        for side, run in zip(job.sides, runs, strict=True)
        for stage in side.outputs
        if stage not in run.stages and (stage != "logits" or job.source == "none")
        if (reading := _why_unscored(job, stage))
    ]


def _why_unscored(job: Job, stage: str) -> str:
    """Why nothing judges an output; "" where something else says so, or nothing was owed."""
    case, op = job.case, ops.find(job.case.op)
    if stages.is_mask(case, stage) and job.source != "none":
        rows = torch.arange(job.count, device=job.live.device) if job.rows is None else job.rows
        owed = len(published_of(job.case, rows[job.live[rows]]))
        only = set(op.spec.outputs) == set(stages.MASKS)
        return "no row that is judged is published" if only and not owed else ""
    if op.exact is not None:
        missing = "nothing among the inputs makes it"
        return "" if op.faults is not None and any(op.faults(case)) else missing
    if case.arithmetic in PUBLISHED and job.contract.scores == "bits":
        return f"no bits of {case.arithmetic} are claimed: judge with scores=bound"
    if job.contract.scores == "bound":
        return "slots alone are not judged within a bound: give the picks beside them"
    return "no reference scores: name an arithmetic, or give a baseline that has logits"


def _without_exact(job: Job) -> list[Finding]:
    """Outputs that the reference gives whole, and a side left out."""
    exact = ops.find(job.case.op).exact
    if exact is None:
        return []
    owed = exact(job.case, job.live.nonzero()[:1, 0])
    return [
        Finding(
            stage=stage,
            rule="not-compared",
            status=Status.UNDECIDED,
            run=side.name,
            reading=f"{stage} was not given: {', '.join(owed)} are what {job.case.op} makes",
        )
        for side in job.sides
        if side.outputs
        for stage in owed
        if stage not in side.outputs and not any(found.stage == stage for found in side.findings)
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
    whole = job.source == "reference" and not job.windows.broken
    now = hashed.result() if whole else {}
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


def of_runs(verdict: Verdict, runs: Sequence[Run], coverage: Coverage) -> Verdict:
    """The verdict of runs that were judged whole, against the reference."""
    return _sum_up(replace(verdict, runs=tuple(runs), scores="reference", coverage=coverage))


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
