"""Compositions: what forbids one before any byte moves, and every rank's pages against one process.

Pages are counted and named by slot: a failing slot is one that some rank holds wrongly in some
layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from equivalence.case import Case
from equivalence.checks.composed import locations, pages, strayed, wanted
from equivalence.checks.composed.wanted import Kind, Step
from equivalence.tally import KEPT
from equivalence.verdict import Coverage, Finding, Run, Stage, Status
from refimpl import batch as batches
from refimpl import refusals
from refimpl.compose import compose_pages

if TYPE_CHECKING:
    from torch import Tensor

    from equivalence.sides import Side


def refused(case: Case) -> Iterator[Finding]:
    """Everything that forbids to compose the batch of a case, with the ids.

    Ids that do not exist make the record invalid, and nothing else is said then.
    """
    step = wanted.of_case(case)
    if why := refusals.misfit(step.batch):
        yield _invalid(why)
        return
    pools = next(iter(step.kinds.values())).pools
    found = list(refusals.problems(step.batch, pool_pages=pools.shape[2], limits=step.limits))
    strange = [each for each in found if each.rule == "out-of-window"]
    told: Counter[str] = Counter()
    for problem in strange or found:
        told[problem.rule] += 1
        if told[problem.rule] > KEPT:
            continue
        place = {"slot": problem.slot, "page": problem.page, "ranks": problem.ranks or None}
        words = [f"{what} {_told(value)}" for what, value in place.items() if value is not None]
        one = Finding(
            stage="inputs",
            rule=problem.rule,
            place=" ".join(words),
            reading=problem.sentence + _offset(step, problem),
        )
        yield replace(one, rule="invalid-record", status=Status.UNDECIDED) if strange else one
    for rule, count in told.items():
        if count > KEPT:
            rest = Finding(stage="inputs", rule=rule, reading=f"{count - KEPT:,} more of them")
            if strange:
                rest = replace(rest, rule="invalid-record", status=Status.UNDECIDED)
            yield rest


def weigh(
    case: Case,
    sides: Sequence["Side"],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    earlier: Sequence[Case] = (),
) -> tuple[list[Run], Coverage]:
    """Every page, on every rank, of every side against the reference.

    Args:
        case: may be composed, see `refused`.
        sides: what each gave, for all ranks.
        progress: told (pages done, pages in all).
        earlier: the steps before this one on the same ranks, the latest last.
    """
    step = wanted.of_case(case)
    before = tuple(wanted.of_case(one) for one in earlier)
    layers = len(next(iter(step.kinds.values())).pools)
    each = step.batch.cp * layers * len(step.batch.slot_pages)
    count = each * len(step.kinds)
    runs = []
    for i, side in enumerate(sides):
        done = i * count
        stages: dict[str, Stage] = {}
        findings = list(side.findings)
        for kind in step.kinds.values():
            looked, found = _pages(step, kind, side, before)
            stages |= looked
            findings += found
            done += each
            progress(done, len(sides) * count)
        for stage, check in (("row_locations", locations.decide), ("strays", strayed.decide)):
            if stage == "row_locations" and stage not in side.outputs:
                findings += _missing(side, stage)
            if stage in side.outputs:
                stages[stage], found = check(step, side.outputs[stage])
                findings += found
        runs.append(
            Run(
                name=side.name,
                stages=stages,
                findings=tuple(replace(one, run=side.name) for one in findings),
                memory=side.memory,
                paths=side.paths,
            )
        )
    judged = count if any(side.outputs for side in sides) else 0
    return runs, Coverage(rows=judged, scored_rows=judged)


def _pages(
    step: Step, kind: Kind, side: "Side", before: tuple[Step, ...]
) -> tuple[dict[str, Stage], list[Finding]]:
    """The pages of one kind of one side: its stage, where it gave them."""
    stage = f"{kind.name}_pages"
    if stage not in side.outputs:
        return {}, _missing(side, stage)
    looked, found = pages.decide(
        pages.Held(
            step=step,
            kind=kind,
            got=side.outputs[stage],
            earlier=before,
            poison=_byte(side, stage),
        )
    )
    return {stage: looked}, found


def reference(case: Case) -> "dict[str, Tensor]":
    """What every rank must hold, by output; the parts of ranks are one memory.

    Raises:
        ValueError: the batch may not be composed.
    """
    step = wanted.of_case(case)
    batch, made = step.batch, {}
    given: dict[str, Any] = {name: case.inputs[name] for name in batches.TENSORS}
    for name, kind in step.kinds.items():
        dense = compose_pages(
            pools=kind.pools,
            rows=kind.rows,
            **given,
            cp=batch.cp,
            kind=name,
            page_size=batch.page_size,
            pool_group=batch.pool_group,
            **asdict(step.limits),
        )
        dense = dense.view(case.inputs[f"{name}_pools"].dtype)
        made[f"{name}_pages"] = dense.expand(batch.cp, *dense.shape)
    rows = batches.row_locations(batch)
    return {**made, "row_locations": rows.expand(batch.cp, *rows.shape)}


def _missing(side: "Side", stage: str) -> list[Finding]:
    """An output that every rank owes and a side left out, unless something else says why."""
    if not side.outputs or any(found.stage == stage for found in side.findings):
        return []
    reading = f"{stage} was not given: every rank holds pages of each kind, and row_locations"
    return [Finding(stage=stage, rule="not-compared", status=Status.UNDECIDED, reading=reading)]


def _byte(side: "Side", stage: str) -> int | None:
    """What a buffer held before the launch, where known."""
    return None if stage not in side.poison else int(side.poison[stage])


def _invalid(sentence: str) -> Finding:
    return Finding(stage="inputs", rule="invalid-record", status=Status.UNDECIDED, reading=sentence)


def _told(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else " ".join(map(str, value))


def _offset(step: Step, problem: refusals.Problem) -> str:
    """A hint where a local page that does not exist is the byte offset of one that does."""
    page, batch = problem.page, step.batch
    if problem.rule != "out-of-window" or page is None or not problem.ranks:
        return ""
    local = int(batch.local_page[page])
    for kind in step.kinds.values():
        many, width = kind.pools.shape[2:]
        if local > 0 and local % width == 0 and local // width < many:
            return f"; as a byte offset it is {kind.name} page {local // width}: a descriptor"
    return ""
