"""Witnesses: the smallest call that shows a row to depend on how the call was made."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence import judge
from equivalence.rowcount import given, shrink
from equivalence.rowcount.bench import Bench, differing, outputs_at, rows_of_units, side_by_side
from equivalence.rowcount.plays import Played
from equivalence.rowcount.schedules import WIDER, Schedule
from equivalence.rowcount.shrink import Fewest
from equivalence.rowcount.trials import Trial, ranges
from equivalence.sides import Side
from equivalence.units import many
from equivalence.verdict import Evidence, Finding

_PLAIN = Schedule(name="whole call", calls=())


@dataclass(frozen=True, kw_only=True, eq=False)
class Suspect:
    """A row of one output that two calls give differently, one of them wrongly.

    Attributes:
        stage: the output.
        row: its number.
        schedule: the one that showed it.
        here: the rows of the schedule's call, int64 in order.
        whole: whether it is the whole call that is wrong.
        both: whether both are, each in its way.
        size: rows of the call that is wrong.
        got: the row as the schedule gave it, where that was kept.
    """

    stage: str
    row: int
    schedule: Schedule
    here: Tensor
    whole: bool
    both: bool
    size: int
    got: Tensor | None


def suspect_of(trial: Trial, played: Played, stage: str) -> Suspect | None:
    """The wrong row of a schedule in the smallest call, and of several the first."""
    rows = played.wrong[stage].nonzero()[:, 0]
    if not len(rows):
        return None
    every = len(trial.live)
    sizes = torch.tensor([len(rows_) for rows_ in played.schedule.calls], device=rows.device)
    whole = ~played.here[stage][rows]
    size = torch.where(whole, every, sizes[played.call_of[rows]])
    both = (played.here[stage] & played.there[stage])[rows]
    # The whole call's rows stand in their own order, and both wrong says little.
    best = int((2 * (size + both * every) + ~whole).argmin())
    row = int(rows[best])
    here = played.schedule.calls[int(played.call_of[row])]
    return Suspect(
        stage=stage,
        row=row,
        schedule=played.schedule,
        here=here,
        whole=bool(whole[best]),
        both=bool(played.here[stage][row] & played.there[stage][row]),
        size=int(size[best]),
        got=_kept(trial, played, stage, row),
    )


def plainness(suspect: Suspect) -> tuple[bool, bool, int, bool, int]:
    """What sorts the suspect first that tells most."""
    moves = suspect.schedule.moves_rows
    return suspect.both, not moves, suspect.size, not suspect.whole, suspect.row


def _kept(trial: Trial, played: Played, stage: str, row: int) -> Tensor | None:
    """The row as the schedule gave it."""
    if stage != "logits":
        rows = torch.tensor([row], device=played.call_of.device)
        return given.taken(trial.case, stage, played.picks[stage], rows)[0]
    kept = played.logits
    return kept[1] if kept is not None and kept[0] == row else None


def explain(trial: Trial, suspect: Suspect, *, others: int) -> Finding:
    """Shrink the call that is wrong, and say what the row depends on.

    Args:
        trial: the whole call.
        suspect: the row.
        others: schedules beside its own that show this output to change.
    """
    next_n, row = trial.next_n, suspect.row
    unit = rows_of_units([row // next_n], next_n).to(trial.windows.start.device)
    place = suspect.here.tolist().index(int(unit[0]))
    whole = {
        stage: given.every(trial.case, stage, given.taken(trial.case, stage, tensor, unit), unit)
        for stage, tensor in trial.whole.outputs.items()
    }
    here = outputs_at(trial, suspect.schedule, suspect.here, place, next_n)
    judged = trial.judges
    right = here if suspect.whole and here is not None else whole
    if suspect.stage == "logits":
        judged, suspect, right = _of_logits(trial, suspect, unit, here)
    wrong = suspect.whole
    called = torch.arange(len(trial.live)) if wrong else suspect.here.cpu()
    bench = Bench(
        trial=trial,
        stage=suspect.stage,
        unit=unit,
        at=row % next_n,
        under=_PLAIN if wrong else suspect.schedule,
        right=right,
    )
    members = (called[::next_n] // next_n).tolist()
    at = members.index(row // next_n)
    found = Finding(stage=suspect.stage, rule="row-variance", run=suspect.schedule.name, row=row)
    also = (Evidence(label="also", place=f"in {many(others, 'other schedule')}"),) if others else ()
    if suspect.schedule.again or not bench.fails(members, at):
        seen = suspect.got
        lines = (
            ()
            if seen is None
            else side_by_side(trial, suspect.stage, row, whole[suspect.stage][bench.at], seen)
        )
        told = Evidence(label="call", place=ranges(called.tolist()))
        reading = _unstable(suspect)
        return replace(
            found, rule="nondeterminism", evidence=(*lines, told, *also), reading=reading
        )
    least = shrink.fewest(members, at, bench.fails, copies=next_n == 1)
    # What was tried last is not always what is left.
    bench.fails(least.members, least.place)
    kept = rows_of_units(least.members, next_n).tolist()
    told = Evidence(label="call", place=ranges(kept))
    return replace(
        found,
        place=_place(trial, row, bench.found),
        evidence=(*bench.evidence(), told, *also),
        reading=_reading(suspect, least, next_n, judged=judged, rows=len(trial.live)),
    )


def _of_logits(
    trial: Trial, suspect: Suspect, unit: Tensor, here: dict[str, Tensor] | None
) -> tuple[bool, Suspect, dict[str, Tensor]]:
    """Whether logits can be judged, which of the two calls is wrong, and what is right.

    Where nothing judges them, what the row is alone stands for right.
    """
    row, logits = suspect.row, trial.whole.outputs["logits"]
    whole, at = {"logits": logits[unit]}, row % len(unit)

    def is_right(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
        differ = differing(trial, "logits", row, want["logits"][at], got["logits"][at])
        return not bool(differ.any())

    side = Side(name="whole call", outputs={"logits": logits})
    rows = torch.tensor([row], device=logits.device)
    stage = (
        judge.weigh(trial.case, [side], contract=trial.contract, baseline=trial.old, rows=rows)
        .runs[0]
        .stages.get("logits")
    )
    if stage is not None and row not in stage.failing:
        # Within a bound both may be right, and a row still may not vary.
        return trial.contract.scores == "bits", suspect, whole
    if here is None:
        return stage is not None, suspect, whole
    if stage is None:
        alone = outputs_at(trial, _PLAIN, unit, 0, len(unit))
        unlike = alone is not None and is_right(here, alone) and not is_right(whole, alone)
        return False, replace(suspect, whole=unlike), here if unlike else whole
    known = trial.judging
    if known is None or known.name == "whole call":
        return True, replace(suspect, whole=True), here
    right = {"logits": known.outputs["logits"][unit]}
    both = not is_right(here, right)
    return True, replace(suspect, whole=not both, both=both), right


def _place(trial: Trial, row: int, found: Finding | None) -> str:
    """The window of the row, and what the judge calls its picks."""
    if found is not None:
        return f"{found.place}   {found.rule}"
    first = int(trial.windows.column[row])
    return f"columns {first}-{first + int(trial.windows.visible[row])}"


def _unstable(suspect: Suspect) -> str:
    """A row that another call of the same rows gives otherwise."""
    if suspect.schedule.again:
        number = suspect.schedule.again
        return f"call {number} of the same rows gave row {suspect.row} otherwise than the first"
    return f"row {suspect.row} was wrong in a call of these rows, and not when it was made again"


def _reading(suspect: Suspect, least: Fewest, next_n: int, *, judged: bool, rows: int) -> str:
    """What the row depends on, in one sentence."""
    good, bad = ("right", "wrong") if judged else ("unchanged", "changed")
    other = f"{bad} in another way" if suspect.both else good
    row, schedule = f"row {suspect.row}", suspect.schedule
    count = len(least.members) * next_n
    if not schedule.moves_rows:
        first, then = (bad, other) if suspect.whole else (other, bad)
        told = _CONDITIONS[schedule.wide or ("streams" if schedule.streams else "poison")]
        return told.format(row=row, first=first, then=then)
    if len(least.members) == 1:
        size = len(suspect.here) if suspect.whole else rows
        return f"{row} is {bad} in a call of {many(count, 'row')} and {other} in one of {size:,}"
    if least.counted:
        fewer = many(count - next_n, "row")
        return f"{row} is {good} in calls of up to {fewer} and {bad} in one of {count:,}"
    where = "after" if least.place else "before"
    if least.place not in (0, len(least.members) - 1):
        where = "among"
    others = [unit for i, unit in enumerate(least.members) if i != least.place]
    listed = ranges(rows_of_units(others, next_n).tolist())
    stopped = f"; shrinking stopped after {least.calls} calls" if least.stopped else ""
    return f"{row} alone is {good}; {where} {listed} it is {bad}{stopped}"


_CONDITIONS = {
    "poison": "{row} is {first} over one poison of fresh memory and {then} over another:"
    " something is read before it is written",
    "stride": "{row} is {first} where rows are packed and {then} where they lie"
    f" {WIDER} columns further apart",
    "columns": "{row} is {first} in a buffer of its own width and {then} in one"
    f" {WIDER} columns wider: the buffer's width is read in place of the row's",
    "streams": "{row} is {first} in one launch and {then} in one of two that run at once",
}
