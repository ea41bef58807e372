"""Row-count invariance: what a kernel gives for a row may not depend on how the call was made."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivalence import allowed, eligible, judge, ops, sides, windows
from equivalence.candidate import Candidate, name_of
from equivalence.case import Case, held
from equivalence.contract import Contract, describe
from equivalence.errors import InvalidCase
from equivalence.report import as_text
from equivalence.rowcount import asked, given, schedules
from equivalence.rowcount.launch import launch_of
from equivalence.rowcount.plays import decide, play, run_of
from equivalence.rowcount.schedules import Plan
from equivalence.rowcount.trials import Trial
from equivalence.rowcount.witness import Suspect, explain, plainness, suspect_of
from equivalence.sample import LEAST, rows_of
from equivalence.units import many
from equivalence.verdict import Run, Status, Verdict, merge, worst

WHOLE = "whole call"
"""The name of the run that is the one call of all rows."""

Progress = Callable[[int, int], None]


def check_row_count(
    case: Case,
    candidate: Candidate,
    *,
    rows: Sequence[int] | None = None,
    contract: Contract | str | None = None,
    baseline: Candidate | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    repeats: int = 2,
    sample: int = LEAST,
    progress: Progress | None = None,
) -> Verdict:
    """Judge one call of all rows, then compare it with other ways to make the same call.

    Logits of another call are those of the whole one, bit for bit, inside the windows.
    So is every other output, or the contract allows both.

    Args:
        case: what is called.
        candidate: `f(**inputs, **params)` giving a tensor or a mapping of outputs.
        rows: chunk sizes; only these schedules then. All of `schedules.plan_of` by default.
        contract: what the picks may do; strict by default.
        baseline: the old implementation, whose logits then judge.
        device: where the inputs go and the reference runs.
        seed: of random schedules and samples.
        repeats: how often the whole call is made in all.
        sample: rows that the reference judges, where all of them would take more than seconds.
        progress: told (calls done, calls in all).

    Returns:
        The verdict: a run for the whole call and one for each schedule. EQUAL where every
        schedule that can run agrees and one is of other rows; its note names those that cannot.

    Raises:
        UsageError: for a contract that cannot be read or judged, a device that is not there, a
            baseline of an op that has its scores among the inputs, a count below 1 or a seed
            below 0.
    """
    asked.check(case, baseline, rows, seed=seed, repeats=repeats, sample=sample)
    free = Contract() if contract is None else allowed.freedoms(contract, case)
    if device is not None:
        judge.check_device(device)
    origin = "default" if contract is None else "argument"
    blank = Verdict(
        case=case.name,
        op=case.op,
        path=case.path,
        status=Status.UNDECIDED,
        contract=describe(free, origin=origin),
        contract_origin=origin,
        allowed_by=free.name or "",
        candidate=name_of(candidate),
    )
    torch.set_flush_denormal(False)  # the reference needs subnormals
    try:
        trial = _trial(held(case, device=device), candidate, baseline, free, sample)
        first = _judge_whole(trial, seed)
        launch = launch_of(trial.sent, trial.windows)
        plan = schedules.plan_of(launch, rows=rows, repeats=repeats, seed=seed)
        shown, calls = _play_all(trial, plan, seed, progress)
        runs = _explained(trial, shown)
    except InvalidCase as error:
        return judge.invalid(blank, str(error))
    whole, *record = first.runs
    return replace(
        blank,
        status=_status(first, runs, plan),
        note="; ".join(_notes(first, trial, plan, calls, len(runs))),
        scores=first.scores,
        coverage=replace(first.coverage, rows=int(trial.live.sum())),
        runs=(whole, *runs, *record),
    )


def assert_row_count_invariant(
    case: Case,
    candidate: Candidate,
    *,
    rows: Sequence[int] | None = None,
    contract: Contract | str | None = None,
    baseline: Candidate | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    repeats: int = 2,
    sample: int = LEAST,
    progress: Progress | None = None,
) -> Verdict:
    """Judge as `check_row_count` does, and raise unless all schedules agree with what is right.

    Raises:
        NotEquivalent: something differs; `.verdict` has the evidence.
        Undecided: nothing could be concluded.
        UsageError: as `check_row_count`.
    """
    __tracebackhide__ = True
    verdict = check_row_count(
        case,
        candidate,
        rows=rows,
        contract=contract,
        baseline=baseline,
        device=device,
        seed=seed,
        repeats=repeats,
        sample=sample,
        progress=progress,
    )
    judge.raise_unless_equal(verdict, message=as_text.failure(in_short(verdict)))
    return verdict


def in_short(verdict: Verdict) -> Verdict:
    """The verdict with all its schedules as one run, as reports for people want it."""
    whole = [run for run in verdict.runs if run.name == WHOLE]
    rest = [run for run in verdict.runs if run.name not in (WHOLE, "record")]
    record = [run for run in verdict.runs if run.name == "record"]
    if not rest:
        return verdict
    names = dict.fromkeys(stage for run in rest for stage in run.stages)
    one = Run(
        name=many(len(rest), "schedule"),
        stages={
            name: merge(run.stages[name] for run in rest if name in run.stages) for name in names
        },
        findings=tuple(found for run in rest for found in run.findings),
    )
    return replace(verdict, runs=(*whole, one, *record))


def _trial(
    case: Case,
    candidate: Candidate,
    baseline: Candidate | None,
    contract: Contract,
    sample: int,
) -> Trial:
    """Make the whole call, and the baseline's.

    Raises:
        InvalidCase: the case does not fit its op.
    """
    ops.validate(case)
    spans = ops.find(case.op).windows(case)
    eligible.expect(case, spans)
    sent = windows.emptied(case, spans)
    old = None
    if baseline is not None:
        (old,) = sides.called(sent, baseline, contract, shared=True)
    # Shared: other calls may write into the buffers that this one hands out.
    (whole,) = sides.called(sent, candidate, contract, shared=True)
    every = torch.arange(len(spans.start), device=spans.start.device)
    return Trial(
        case=case,
        sent=replace(sent, recorded=(), reference={}),
        windows=spans,
        candidate=candidate,
        contract=contract,
        whole=replace(whole, name=WHOLE, outputs=given.declared(case, whole.outputs, every)),
        old=old,
        sample=sample,
    )


def _judge_whole(trial: Trial, seed: int) -> Verdict:
    """The whole call against the reference: all of its rows, or a sample."""
    rows = None
    if not trial.cheap:
        listed = trial.case.inputs.get("rows")
        first = None if listed is None else listed.long()
        rows = rows_of(trial.sent, trial.windows, count=trial.sample, seed=seed, first=first)
    return judge.weigh(
        trial.case, [trial.whole], contract=trial.contract, baseline=trial.old, rows=rows
    )


Shown = tuple[Run, tuple[Suspect, ...]]


def _play_all(
    trial: Trial, plan: Plan, seed: int, progress: Progress | None
) -> tuple[list[Shown], int]:
    """Play every schedule, and count the calls.

    Where the same call gives something else, no other schedule can tell anything.
    """
    every, done = sum(len(schedule.calls) for schedule in plan.schedules), 0
    shown: list[Shown] = []

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, every)

    for schedule in plan.schedules if trial.whole.outputs else ():
        played = play(trial, schedule, tell)
        decide(trial, played, seed=seed)
        found = (suspect_of(trial, played, stage) for stage in trial.whole.outputs)
        suspects = tuple(each for each in found if each is not None)
        shown.append((run_of(trial, played), suspects))
        if schedule.again and suspects:
            break
    return shown, done


def _explained(trial: Trial, shown: Sequence[Shown]) -> list[Run]:
    """The runs, with a finding where an output was wrong in the smallest call."""
    runs = {run.name: run for run, _ in shown}
    for stage in trial.whole.outputs:
        suspects = [each for _, found in shown for each in found if each.stage == stage]
        if suspects:
            first = min(suspects, key=plainness)
            found = explain(trial, first, others=len(suspects) - 1)
            run = runs[found.run]
            runs[found.run] = replace(run, findings=(found, *run.findings))
    return list(runs.values())


def _status(first: Verdict, runs: Sequence[Run], plan: Plan) -> Status:
    """The worst of all; without a call of other rows nothing may be concluded."""
    seen = [stage.status for run in runs for stage in run.stages.values()]
    seen += [found.status for run in runs for found in run.findings]
    moved = bool(seen) and any(schedule.moves_rows for schedule in plan.schedules)
    return worst([first.status, *seen, *([] if moved else [Status.UNDECIDED])])


def _notes(first: Verdict, trial: Trial, plan: Plan, calls: int, count: int) -> list[str]:
    """How much was done, and what was not."""
    if not trial.whole.outputs:
        return ["no schedule ran: the whole call gave nothing to compare"]
    scored, live = first.coverage.scored_rows, int(trial.live.sum())
    done = f"{many(count, 'schedule')} in {many(calls, 'call')}" if count else "no schedule ran"
    notes = [first.note, done] if first.note and len(trial.live) else [done]
    if scored < live:
        notes.append(f"{scored:,} of {many(live, 'row')} judged by their scores")
    for schedule in plan.schedules[:count]:
        if schedule.unmade:
            made = len(schedule.calls)
            notes.append(f"{schedule.name}: {made:,} of {made + schedule.unmade:,} calls")
    if count and not any(schedule.moves_rows for schedule in plan.schedules):
        notes.append("no call of other rows can be made")
    left = [f"{each.name} ({each.reason})" for each in plan.left_out]
    if len(plan.schedules) > count:
        rest = many(len(plan.schedules) - count, "schedule")
        left.append(f"{rest} (the same call does not repeat)")
    return [*notes, *([f"not run: {', '.join(left)}"] if left else [])]
