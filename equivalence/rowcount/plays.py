"""Plays: a schedule call by call, its rows compared with those of the whole call."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence import layout, replay, stages
from equivalence.arms import apart
from equivalence.checks import maskwords
from equivalence.rowcount import given
from equivalence.rowcount.schedules import Schedule
from equivalence.rowcount.trials import Trial, call_rows, ranges, side_of, weigh, windows_of
from equivalence.units import many
from equivalence.verdict import Evidence, Finding, Run, Stage, Status
from refimpl.bits import as_int

_PIECE_BYTES = 256 << 20
SCORES = ("logits", "scores")
"""Outputs that are compared cell by cell inside the windows."""


@dataclass(kw_only=True, eq=False)
class Played:
    """What came of a schedule.

    Attributes:
        schedule: what was played.
        rows: live rows that were called.
        call_of: the call that made each row, int64 [T]; -1 for none.
        changed: rows that are not those of the whole call, bool [T], by output.
        other_set: of these the rows that are not the same set.
        cells: of each output of scores the cells compared, and those that differ.
        picks: outputs that are not logits, of all rows; uncalled ones are those of the whole call.
        logits: a row whose logits changed, and they, [W]; None where none did.
        wrong: changed rows that the contract does not allow, bool [T], by output.
        here: of these the rows that are illegal here; of logits nobody knows yet.
        there: those that are illegal in the whole call, likewise.
        unjudged: changed rows that nothing can judge.
        open: changed rows that were left out of the sample that was judged.
        findings: what else is to be said.
    """

    schedule: Schedule
    call_of: Tensor
    changed: dict[str, Tensor]
    other_set: dict[str, Tensor]
    picks: dict[str, Tensor]
    logits: tuple[int, Tensor] | None = None
    cells: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: dict[str, Tensor] = field(default_factory=dict)
    here: dict[str, Tensor] = field(default_factory=dict)
    there: dict[str, Tensor] = field(default_factory=dict)
    unjudged: dict[str, Tensor] = field(default_factory=dict)
    open: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def play(trial: Trial, schedule: Schedule, told: Callable[[], None]) -> Played:
    """Make the calls of a schedule, one after another, until one of them fails.

    Args:
        trial: the whole call.
        schedule: its calls; none of them is kept longer than it takes to compare it.
        told: called after each call.
    """
    none = torch.zeros_like(trial.live)
    played = Played(
        schedule=schedule,
        call_of=torch.full_like(trial.windows.start, -1),
        changed={stage: none.clone() for stage in trial.whole.outputs},
        other_set={stage: none.clone() for stage in trial.whole.outputs},
        picks={stage: layout.copied(tensor) for stage, tensor in trial.picks.items()},
    )
    for number, rows in enumerate(schedule.calls):
        here = rows.to(none.device)
        outcome = call_rows(trial, schedule, here)
        found = _unusable(trial, schedule, here, outcome)
        if found is not None:
            played.findings.append(found)
            break
        got = {
            stage: layout.moved(outcome.outputs[stage], none.device)
            for stage in trial.whole.outputs
        }
        played.call_of[here] = number
        for stage, tensor in played.picks.items():
            played.picks[stage] = given.put(trial.case, stage, tensor, here, got[stage])
        for piece in _pieces(got, len(here)):
            part = {
                stage: given.between(trial.case, stage, tensor, here, piece)
                for stage, tensor in got.items()
            }
            _compare(trial, played, here[piece], part)
        told()
    return played


def _unusable(
    trial: Trial, schedule: Schedule, rows: Tensor, outcome: replay.Outcome
) -> Finding | None:
    """Why a call's outputs cannot be compared with the whole call's, or None."""
    found = Finding(
        stage="candidate",
        rule=outcome.rule or "not-compared",
        status=Status.UNDECIDED,
        run=schedule.name,
        place=f"{schedule.name}   {ranges(rows.tolist())}",
        reading=outcome.message,
    )
    if outcome.rule:
        return found
    missing = sorted((trial.whole.outputs.keys() ^ outcome.outputs.keys()) - _misfits(trial))
    if missing:
        reading = f"{', '.join(missing)}: given by this call or by the whole one, and not by both"
        return replace(found, stage=missing[0], reading=reading)
    for stage, whole in trial.whole.outputs.items():
        spans = windows_of(trial, rows)
        problem = given.misfit(
            trial.case, stage, whole, rows, outcome.outputs[stage], windows=spans
        )
        if problem is not None:
            rule, want, got = problem
            line = Evidence(label=rule, place="", value=f"want {want}   got {got}")
            wrong = Status.DIFFERENT
            return replace(found, stage=stage, rule=rule, status=wrong, evidence=(line,))
    return None


def _misfits(trial: Trial) -> set[str]:
    """Outputs of the whole call that were refused for their shape or dtype."""
    return {f.stage for f in trial.whole.findings if f.rule in ("shape", "dtype")}


def _pieces(got: Mapping[str, Tensor], rows: int) -> Iterator[slice]:
    """Row ranges of bounded bytes."""
    step = max(1, _PIECE_BYTES // sum(given.width_of(tensor) for tensor in got.values()))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _compare(trial: Trial, played: Played, rows: Tensor, got: Mapping[str, Tensor]) -> None:
    """Compare these rows of one call with those of the whole call."""
    windows = windows_of(trial, rows)
    live = trial.live[rows]
    want = {
        stage: given.taken(trial.case, stage, tensor, rows)
        for stage, tensor in trial.whole.outputs.items()
    }
    masks = [stage for stage in got if stages.is_mask(trial.case, stage)]
    for stage in masks:
        which = given.kept(trial.case, stage, rows)
        visible = windows.visible[which]
        differ = maskwords.differing(want=want[stage], got=got[stage], visible=visible)
        played.changed[stage][rows[which]] = differ & live[which]
        played.other_set[stage][rows[which]] = differ & live[which]
    one, two = (
        {stage: given.flat(tensor) for stage, tensor in side.items() if stage not in masks}
        for side in (want, got)
    )
    found = apart(trial.case, windows, one, two)
    for stage, changed in found.changed.items():
        played.changed[stage][rows] = changed & live
        played.other_set[stage][rows] = found.other_set[stage] & live
        if stage in SCORES:
            here = (changed & live).nonzero()[:, 0]
            if stage == "logits" and len(here) and played.logits is None:
                played.logits = int(rows[here[0]]), two[stage][here[0]].clone()
            first, count = windows.column[here, None], windows.visible[here, None]
            column = torch.arange(two[stage].shape[1], device=rows.device)
            inside = (column >= first) & (column < first + count)
            differ = as_int(one[stage][here]) != as_int(two[stage][here])
            cells = played.cells.setdefault(stage, Counter())
            cells["compared"] += int(windows.visible[live].sum())
            cells["different"] += int((differ & inside).sum())


def decide(trial: Trial, played: Played, *, seed: int) -> None:
    """Say which changed rows the contract allows.

    Logits may not change. Changed picks are judged, the whole call's beside these: a row of which
    either is illegal is wrong. Where that is slow, `sample` changed rows are judged.
    """
    for stage, changed in played.changed.items():
        none = torch.zeros_like(changed)
        played.wrong[stage] = changed if stage == "logits" else none
        played.here[stage] = played.wrong[stage]
        played.there[stage] = played.unjudged[stage] = played.open[stage] = none
    rows = any_of(trial, played.changed).nonzero()[:, 0]
    if not len(rows):
        return
    judged = rows
    if not trial.cheap and len(rows) > trial.sample:
        random = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(rows), generator=random)[: trial.sample].sort().values
        judged = rows[some.to(rows.device)]
    whole_side = side_of("whole call", trial.picks, poison=0)
    here_side = side_of("here", played.picks, poison=played.schedule.poison)
    verdict = weigh(trial, [whole_side, here_side], judged)
    for stage in trial.picks:
        mine = played.changed[stage]
        known = [run.stages[stage] for run in verdict.runs[:2] if stage in run.stages]
        if len(known) == 2:  # noqa: PLR2004 - the whole call's and these
            whole, here = (_marked(trial, looked.failing) for looked in known)
            played.there[stage], played.here[stage] = mine & whole, mine & here
            played.wrong[stage] = mine & (whole | here)
            played.open[stage] = mine.clone()
            played.open[stage][judged] = False
        elif _fixed(trial, stage):
            played.wrong[stage] = played.here[stage] = mine
        else:
            played.unjudged[stage] = mine
    undecided = [found for found in verdict.findings if found.status is Status.UNDECIDED]
    played.findings += [replace(found, run=played.schedule.name) for found in undecided[:1]]


def _fixed(trial: Trial, stage: str) -> bool:
    """Whether the contract leaves an output no choice."""
    if stages.is_mask(trial.case, stage):
        return trial.contract.ties != "any"
    chosen = stage in (*stages.picked(trial.case), "page_indices", "packed")
    return not chosen or (trial.contract.order == "score" and trial.contract.ties != "any")


def any_of(trial: Trial, rows: Mapping[str, Tensor]) -> Tensor:
    """Rows that are among those of any output but the logits, bool [T]."""
    found = torch.zeros_like(trial.live)
    for stage in trial.picks:
        found |= rows[stage]
    return found


def _marked(trial: Trial, rows: Sequence[int]) -> Tensor:
    """These row numbers as bool [T]."""
    marked = torch.zeros_like(trial.live)
    marked[list(rows)] = True
    return marked


def run_of(trial: Trial, played: Played) -> Run:
    """What a schedule came to."""
    every = trial.live & (played.call_of >= 0)
    findings = list(played.findings)
    told: dict[str, Stage] = {}
    for stage, changed in played.changed.items() if bool(every.any()) else ():
        called = every & trial.has(stage)
        wrong, unjudged = played.wrong[stage], played.unjudged[stage]
        allowed = changed & ~wrong & ~unjudged & ~played.open[stage]
        rows, other = int(called.sum()), played.other_set[stage]
        counts = {
            "rows": rows,
            "identical": rows - int(changed.sum()),
            "reordered": int((allowed & ~other).sum()),
            "tied": int((allowed & other).sum()),
            "open": int((played.open[stage] & ~wrong).sum()),
            "undecided": int(unjudged.sum()),
            "different": int(wrong.sum()),
        }
        if stage in SCORES:
            cells = played.cells.get(stage, Counter())
            compared, different = cells["compared"], cells["different"]
            counts = {
                "compared": compared,
                "identical": compared - different,
                "different": different,
            }
        failing = wrong.nonzero()[:, 0].tolist()
        rule = "nondeterminism" if played.schedule.again else "row-variance"
        status = Status.UNDECIDED if bool(unjudged.any()) else Status.EQUAL
        told[stage] = Stage(
            status=Status.DIFFERENT if failing else status,
            counts=counts,
            rules={rule: len(failing)} if failing else {},
            failing=tuple(failing),
        )
        if bool(unjudged.any()):
            count = many(int(unjudged.sum()), "row")
            reading = f"{count} changed, and no scores say whether legally: give a baseline"
            open_ = Finding(
                stage=stage,
                rule="not-compared",
                status=Status.UNDECIDED,
                run=played.schedule.name,
                reading=reading,
            )
            findings.append(open_)
    return Run(name=played.schedule.name, stages=told, findings=tuple(findings))
