"""Plays: a schedule call by call, its rows compared with those of the whole call."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence import replay
from equivalence.arms import apart
from equivalence.rowcount.schedules import Schedule
from equivalence.rowcount.trials import Trial, call_rows, ranges, side_of, weigh, windows_of
from equivalence.units import many
from equivalence.verdict import Evidence, Finding, Run, Stage, Status
from refimpl.bits import as_int

_PIECE_BYTES = 256 << 20


@dataclass(kw_only=True, eq=False)
class Played:
    """What came of a schedule.

    Attributes:
        schedule: what was played.
        rows: live rows that were called.
        call_of: the call that made each row, int64 [T]; -1 for none.
        changed: rows that are not those of the whole call, bool [T], by output.
        other_set: of these the rows that are not the same set.
        cells: logits compared, and those that differ.
        picks: outputs that are not scores, of all rows; uncalled ones are those of the whole call.
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
    cells: Counter[str] = field(default_factory=Counter)
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
        picks={stage: tensor.clone() for stage, tensor in trial.picks.items()},
    )
    for number, rows in enumerate(schedule.calls):
        here = rows.to(none.device)
        outcome = call_rows(trial, schedule, here)
        found = _unusable(trial, schedule, here, outcome)
        if found is not None:
            played.findings.append(found)
            break
        got = {stage: outcome.outputs[stage].to(none.device) for stage in trial.whole.outputs}
        played.call_of[here] = number
        for stage, tensor in played.picks.items():
            tensor[here] = got[stage]
        for piece in _pieces(got):
            _compare(trial, played, here[piece], {stage: t[piece] for stage, t in got.items()})
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
        got, want = outcome.outputs[stage], (len(rows), whole.shape[1])
        if tuple(got.shape) != want or got.dtype != whole.dtype:
            rule = "dtype" if tuple(got.shape) == want else "shape"
            sizes = f"want {list(want)} {whole.dtype}   got {list(got.shape)} {got.dtype}"
            line = Evidence(label=rule, place="", value=sizes.replace("torch.", ""))
            wrong = Status.DIFFERENT
            return replace(found, stage=stage, rule=rule, status=wrong, evidence=(line,))
    return None


def _misfits(trial: Trial) -> set[str]:
    """Outputs of the whole call that were refused for their shape or dtype."""
    return {f.stage for f in trial.whole.findings if f.rule in ("shape", "dtype")}


def _pieces(got: Mapping[str, Tensor]) -> Iterator[slice]:
    """Row ranges of bounded bytes."""
    rows = max(len(tensor) for tensor in got.values())
    width = sum(tensor.shape[1] for tensor in got.values())
    step = max(1, _PIECE_BYTES // (4 * width + 1))
    for first in range(0, rows, step):
        yield slice(first, first + step)


def _compare(trial: Trial, played: Played, rows: Tensor, got: Mapping[str, Tensor]) -> None:
    """Compare these rows of one call with those of the whole call."""
    windows = windows_of(trial, rows)
    want = {stage: _cut(tensor, rows) for stage, tensor in trial.whole.outputs.items()}
    found = apart(trial.case, windows, want, got)
    live = trial.live[rows]
    for stage, changed in found.changed.items():
        played.changed[stage][rows] = changed & live
        played.other_set[stage][rows] = found.other_set[stage] & live
    if "logits" in got:
        here = (found.changed["logits"] & live).nonzero()[:, 0]
        if len(here) and played.logits is None:
            played.logits = int(rows[here[0]]), got["logits"][here[0]].clone()
        first, count = windows.column[here, None], windows.visible[here, None]
        column = torch.arange(got["logits"].shape[1], device=rows.device)
        inside = (column >= first) & (column < first + count)
        differ = as_int(want["logits"][here]) != as_int(got["logits"][here])
        played.cells["compared"] += int(windows.visible[live].sum())
        played.cells["different"] += int((differ & inside).sum())


def _cut(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows: a view where they are consecutive."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return tensor[int(rows[0]) : int(rows[0]) + len(rows)]
    return tensor[rows]


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
        elif trial.contract.order == "score" and trial.contract.ties != "any":
            played.wrong[stage] = played.here[stage] = mine
        else:
            played.unjudged[stage] = mine
    undecided = [found for found in verdict.findings if found.status is Status.UNDECIDED]
    played.findings += [replace(found, run=played.schedule.name) for found in undecided[:1]]


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
    called = trial.live & (played.call_of >= 0)
    findings = list(played.findings)
    stages: dict[str, Stage] = {}
    for stage, changed in played.changed.items() if bool(called.any()) else ():
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
        if stage == "logits":
            compared, different = played.cells["compared"], played.cells["different"]
            counts = {
                "compared": compared,
                "identical": compared - different,
                "different": different,
            }
        failing = wrong.nonzero()[:, 0].tolist()
        rule = "nondeterminism" if played.schedule.again else "row-variance"
        status = Status.UNDECIDED if bool(unjudged.any()) else Status.EQUAL
        stages[stage] = Stage(
            status=Status.DIFFERENT if failing else status,
            counts=counts,
            rules={rule: len(failing)} if failing else {},
            failing=tuple(failing),
        )
        if bool(unjudged.any()):
            count = many(int(unjudged.sum()), "row")
            reading = f"{count} changed, and no scores say whether legally: give a baseline"
            told = Finding(
                stage=stage,
                rule="not-compared",
                status=Status.UNDECIDED,
                run=played.schedule.name,
                reading=reading,
            )
            findings.append(told)
    return Run(name=played.schedule.name, stages=stages, findings=tuple(findings))
