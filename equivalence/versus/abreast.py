"""One layer-forward: its arms beside each other, all rows, and each of them judged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivalence import arms, judge, ops, sample, schema, stages
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.sides import Side
from equivalence.verdict import Finding, Run, Status, Verdict, worst
from equivalence.versus import between, census
from equivalence.versus.forwards import AGAIN, ARMS, CANDIDATE, ORIGINAL, Arm, Forward, Label

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How layer-forwards are judged.

    Attributes:
        contract: what every arm may do differently.
        count: rows of the sample.
        seed: of the sample.
    """

    contract: Contract
    count: int = sample.LEAST
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """Which rows are judged, and by whom.

    Attributes:
        sampled: rows of the sample, ascending.
        judge: whose logits judge them; None for the reference or the scores among the inputs.
        further: the other rows where arms differ.
    """

    sampled: Tensor
    judge: Side | None
    further: Tensor


def failed(case: Case, note: str, *, place: Mapping[str, Label]) -> Forward:
    """A layer-forward of which nothing may be concluded."""
    return Forward(name=case.name, op=case.op, rows=0, columns=0, place=place, note=note)


def abreast(
    case: Case,
    sides: Mapping[str, Side],
    *,
    rules: Rules,
    place: Mapping[str, Label],
    baseline: Side | None = None,
) -> Forward:
    """Compare the arms of one layer-forward bit for bit, and judge each.

    Args:
        case: what every arm was called with, held in memory.
        sides: what each arm gave, by its name in ARMS.
        rules: how to judge.
        place: layer, ratio and rank.
        baseline: whose logits judge, where no bit model exists.

    Raises:
        InvalidCase: the case cannot be read.
    """
    sizes, windows = ops.validate(case), ops.find(case.op).windows(case)
    record = Forward(
        name=case.name,
        op=case.op,
        rows=sizes["rows"],
        columns=stages.columns_of(case),
        place=place,
    )
    for name in (ORIGINAL, CANDIDATE):
        if not sides[name].outputs and not _wrong(sides[name]):
            note = f"the {name} gave nothing: {_why(sides[name])}"
            return replace(record, note=note, arms=_unjudged(sides))
    sides = {name: _whole_of(side, sides[ORIGINAL]) for name, side in sides.items()}
    new = between.differences(case, windows, sides[ORIGINAL], sides[CANDIDATE])
    again = sides.get(AGAIN)
    control = None
    if again is not None and (again.outputs or _wrong(again)):
        control = between.differences(case, windows, sides[ORIGINAL], again)
    minded = torch.zeros_like(windows.start, dtype=torch.bool)
    for name, found in ((CANDIDATE, new), (AGAIN, control or {})):
        if found:
            pair = sides[ORIGINAL], sides[name]
            minded |= between.minded(case, windows, pair, found, contract=rules.contract)
    apart = minded.nonzero()[:, 0]
    # Where only some rows are published, few of all would have a mask to judge.
    told = torch.cat([apart, arms.published(case, windows)]) if "rows" in case.inputs else apart
    drawn = sample.rows_of(case, windows, count=rules.count, seed=rules.seed, first=told)
    drawn = _whole(case, drawn)
    plan = _Plan(
        sampled=drawn,
        judge=_judging(case, sides[ORIGINAL], baseline),
        further=apart[~torch.isin(apart, drawn)],
    )
    first = _weighed(case, sides, plan.sampled, rules.contract, plan.judge)
    verdicts, unclassified = [first], plan.further[:0]
    if len(plan.further):
        second, unclassified = _further(case, sides, plan, first, rules)
        verdicts += second
    record = replace(
        record,
        new={name: each.counts for name, each in new.items()},
        masks=tuple(n for n in stages.MASKS if n in new) if stages.publishes(case) else (),
        control=None if control is None else {n: each.counts for n, each in control.items()},
        arms={name: _arm(name, sides[name], verdicts) for name in ARMS if name in sides},
        sampled=len(plan.sampled),
        further=len(plan.further) - len(unclassified),
        unclassified=tuple(unclassified.tolist()),
        census=census.look(
            case,
            windows,
            plan.sampled,
            logits=sides[ORIGINAL].outputs.get("logits"),
            contract=rules.contract,
        ),
    )
    return record if record.status is Status.EQUAL else replace(record, verdicts=tuple(verdicts))


def _whole_of(side: Side, original: Side) -> Side:
    """The side, undecided where it lacks what the original gave; logits are free to be kept."""
    told = {found.stage for found in side.findings}
    lacks = original.outputs.keys() - side.outputs.keys() - told - {"logits"}
    found = [
        Finding(
            stage=stage,
            rule="not-compared",
            status=Status.UNDECIDED,
            run=side.name,
            reading=f"the {ORIGINAL} gives it, and the {side.name} does not",
        )
        for stage in sorted(lacks)
        if side.outputs
    ]
    return replace(side, findings=(*side.findings, *found)) if found else side


def _judging(case: Case, original: Side, baseline: Side | None) -> Side | None:
    """Whose logits judge the sample; None for the reference, or for what the call was given."""
    if baseline is None and not _scored(case) and "logits" in original.outputs:
        return original
    return baseline


def _further(
    case: Case, sides: Mapping[str, Side], plan: _Plan, first: Verdict, rules: Rules
) -> tuple[list[Verdict], Tensor]:
    """Judge the rows outside the sample where arms differ; those that nothing can judge.

    Where the original's logits judge and find fault, the reference says whether they may.
    """
    rows, judging = plan.further, plan.judge
    if judging is None and not _free(case):
        if "logits" in sides[ORIGINAL].outputs and not _misscores(first):
            judging = sides[ORIGINAL]
        else:
            rows = rows[: rules.count] if _scored(case) else rows[:0]
    if not len(rows):
        return [], plan.further
    verdict = _weighed(case, sides, _whole(case, rows), rules.contract, judging)
    if judging is not plan.judge and verdict.failing:
        doubted = rows.new_tensor(verdict.failing[: rules.count])
        again = _weighed(case, sides, _whole(case, doubted), rules.contract, None)
        if _misscores(again):
            rows, verdict = doubted, again
    return [verdict], plan.further[~torch.isin(plan.further, rows)]


def _free(case: Case) -> bool:
    """Whether picks can be judged without computing scores."""
    return "scores" in case.inputs or "raw_indices" in case.inputs


def _scored(case: Case) -> bool:
    """Whether a reference, or what the call was given, can judge a row."""
    model = case.arithmetic is not None and ops.find(case.op).score is not None
    return model or _free(case)


def _misscores(verdict: Verdict) -> bool:
    """Whether the original's own logits are wrong, so that they cannot judge."""
    own = [run.stages.get("logits") for run in verdict.runs if run.name == ORIGINAL]
    return any(stage is not None and stage.status is not Status.EQUAL for stage in own)


def _whole(case: Case, rows: Tensor) -> Tensor:
    return schema.whole_requests(rows, next_n=ops.validate(case).get("n", 1))


def _weighed(
    case: Case,
    sides: Mapping[str, Side],
    rows: Tensor,
    contract: Contract,
    baseline: Side | None,
) -> Verdict:
    """Judge some rows of every arm."""
    given = [replace(sides[name], memory=None, paths=()) for name in ARMS if name in sides]
    verdict = judge.weigh(case, given, contract=contract, rows=rows, baseline=baseline)
    # Arms are not runs of one kernel: that their bits differ is told apart from right and wrong.
    runs = tuple(
        replace(run, findings=tuple(f for f in run.findings if f.rule != "nondeterminism"))
        for run in verdict.runs
    )
    same = runs == verdict.runs
    return verdict if same else replace(verdict, runs=runs, status=worst(_statuses(runs)))


def _statuses(runs: Iterable[Run]) -> Iterator[Status]:
    for run in runs:
        yield from (stage.status for stage in run.stages.values())
        yield from (finding.status for finding in run.findings)


def _arm(name: str, side: Side, verdicts: Sequence[Verdict]) -> Arm:
    """What the verdicts say of one arm, and of the call itself."""
    every = [run for verdict in verdicts for run in verdict.runs]
    own = [run for run in every if run.name == name]
    about = [
        replace(run, findings=tuple(f for f in run.findings if f.run in {"", "baseline", name}))
        for run in every
        if run.name not in ARMS
    ]
    stages = [stage for run in own for stage in run.stages.values()]
    wrong = sorted({row for stage in stages for row in stage.failing})
    return Arm(
        status=worst(_statuses([*own, *about])),
        power=any(stage.power for stage in stages),
        wrong=len(wrong),
        failing=tuple(wrong[:_SHOWN]),
        memory=side.memory,
        paths=side.paths,
    )


def _unjudged(sides: Mapping[str, Side]) -> dict[str, Arm]:
    """Arms of a call that was not compared."""
    return {
        name: Arm(status=Status.UNDECIDED, memory=side.memory, paths=side.paths)
        for name, side in sides.items()
    }


def _wrong(side: Side) -> bool:
    """Whether the call gave something that no contract allows."""
    return any(found.status is Status.DIFFERENT for found in side.findings)


def _why(side: Side) -> str:
    """Why an arm gave nothing."""
    first = next(iter(side.findings), None)
    return "no output" if first is None else ": ".join(filter(None, [first.rule, first.reading]))
