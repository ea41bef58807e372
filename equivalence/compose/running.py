"""Ways to compose pages, run over ranks on the steps of scenarios, each step judged."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from equivalence import receipt
from equivalence.checks.composed import wanted
from equivalence.compose import judging, requests, steps
from equivalence.compose.matrix import Cell, Step
from equivalence.errors import UsageError
from equivalence.paths.ipc import candidate, faulty
from equivalence.paths.ipc.candidate import Pool, RanksFailed
from equivalence.paths.ipc.ways import WAYS
from equivalence.verdict import PAGES, Finding, Run, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from equivalence.candidate import Candidate
    from equivalence.case import Case
    from equivalence.compose.judging import Begun
    from equivalence.paths.ipc.faulty import Fault

    Progress = Callable[[str, int, int], None]


def over(
    pool: Pool,
    ways: Sequence[str] | None = None,
    scenarios: Sequence[str] | None = None,
    *,
    layers: int = 8,
    kinds: Sequence[str] = ("token", "index"),
    seed: int = 0,
    scale: int = 1,
    fault: Fault | None = None,
    timeout: float | None = None,
    judged: bool = True,
    progress: Progress | None = None,
) -> Iterator[Cell]:
    """Run every way over every scenario on one pool of ranks, and judge every step.

    Args:
        pool: of the ranks that the batches are split over.
        ways: names of `paths.ipc.ways.WAYS`; None for all.
        scenarios: names of `requests.NAMES`; None for all.
        layers: of every kind.
        kinds: token, index or both.
        seed: of the scenarios.
        scale: divides their lengths.
        fault: what ranks do wrong on demand, or None.
        timeout: seconds that a rank may be silent; None for the pool's own.
        judged: False to run the steps alone, as all but one of joined ranks do.
        progress: told (scenario and way, steps done, steps in all).

    Yields:
        One result a scenario and way, scenario by scenario.

    Raises:
        UsageError: before anything runs: a name or a number is none of those.
    """
    chosen = known("way", ways, tuple(WAYS))
    named = known("scenario", scenarios, requests.NAMES)
    total = len(chosen) * sum(len(requests.plan(name)) for name in named)
    done = 0
    for name in named:
        cases = steps.sequence(
            name, cp=pool.ranks, layers=layers, kinds=kinds, seed=seed, scale=scale
        )
        for way in chosen:
            if progress is not None:
                progress(f"{name} {way}", done, total)
            yield played(
                pool, way, cases, scenario=name, fault=fault, timeout=timeout, judged=judged
            )
            done += len(cases)


def known(what: str, asked: Sequence[str] | None, names: Sequence[str]) -> tuple[str, ...]:
    """The names asked for, each once; all of them for None.

    Raises:
        UsageError: one does not exist, or none is asked for.
    """
    if asked is None:
        return tuple(names)
    for name in asked:
        if name not in names:
            raise UsageError(f"no {what} is named {name!r}: there are {', '.join(names)}")
    if not asked:
        raise UsageError(f"no {what} is named at all: there are {', '.join(names)}")
    return tuple(dict.fromkeys(asked))


def unseen(fault: Fault | None, cells: Sequence[Cell]) -> str:
    """Why nothing may be concluded where a fault changed nothing in any step, or "".

    Args:
        fault: that was injected, as `over`; one that may happen need not show.
        cells: all that ran with it.
    """
    if fault is None or any(cell.status is not Status.EQUAL for cell in cells):
        return ""
    if not faulty.FAULTS[fault.name].rules:
        return ""
    why = faulty.unmet(fault, [step.lacks for cell in cells for step in cell.steps])
    return f"{fault.name} changed nothing in these steps: {why}"


def played(
    pool: Pool,
    way: str,
    cases: Sequence[Case],
    *,
    scenario: str,
    fault: Fault | None = None,
    timeout: float | None = None,
    judged: bool = True,
    path: str = "",
) -> Cell:
    """Run one way over steps in order, on the same ranks, up to the first in which a rank fails.

    Args:
        pool: of as many ranks as the cases have.
        way: its name.
        cases: of op `compose_pages`.
        scenario: what they are called together.
        fault: as `over`.
        timeout: as `over`.
        judged: as `over`.
        path: the file they stand in, or "".
    """
    compose = candidate.over(pool, way, fault=fault, timeout=timeout)
    done: list[Step] = []
    before: list[Begun] = []
    for case in cases:
        now = judging.begin(case)
        if now.refused:
            done.append(Step(verdict=now.verdict, pages=0, bytes=0, seconds=0.0))
        else:
            step = _step(compose, way, now, before, judged=judged)
            equal = step.verdict.status is Status.EQUAL
            done.append(replace(step, lacks=_lacks(fault, now, before)) if equal else step)
        if not done[-1].pages:
            break
        before.append(now)
    return Cell(way=way, scenario=scenario, steps=tuple(done), planned=len(cases), path=path)


def _step(
    compose: Candidate, way: str, now: Begun, earlier: Sequence[Begun], *, judged: bool
) -> Step:
    """One step composed and judged."""
    case = now.case
    start = perf_counter()
    with receipt.collected() as left:
        try:
            outputs = compose(**case.inputs, **case.params)
        except RanksFailed as error:
            seconds = perf_counter() - start
            failed = _failed(now.verdict, way, error)
            return Step(verdict=failed, pages=0, bytes=0, seconds=seconds)
    seconds = perf_counter() - start
    verdict = replace(now.verdict, note="another rank judges this")
    if judged:
        verdict = judging.weigh(now, outputs, name=way, earlier=earlier)
        runs = tuple(replace(run, paths=tuple(left)) for run in verdict.runs)
        verdict = replace(verdict, runs=runs)
    pages = [outputs[name] for name in PAGES if name in outputs]
    return Step(
        verdict=verdict,
        pages=sum(kind.shape[:3].numel() for kind in pages),
        bytes=sum(kind.nbytes for kind in pages),
        seconds=seconds,
    )


def _lacks(fault: Fault | None, now: Begun, earlier: Sequence[Begun]) -> tuple[str, ...]:
    """What a step lacks for a fault to show."""
    if fault is None:
        return ()
    step = wanted.of_case(now.case)
    return tuple(
        faulty.lacking(
            fault,
            batch=step.batch,
            kinds=len(step.kinds),
            layers=max((len(kind.rows) for kind in step.kinds.values()), default=0),
            earlier=[wanted.of_case(begun.case).batch for begun in earlier],
        )
    )


def _failed(blank: Verdict, way: str, error: RanksFailed) -> Verdict:
    """Nothing may be concluded of a step in which a rank ended or was silent."""
    found = Finding(
        stage="candidate",
        rule=error.rule,
        status=Status.UNDECIDED,
        run=way,
        place=f"rank {error.rank}",
        reading=str(error),
    )
    return replace(blank, runs=(Run(name=way, stages={}, findings=(found,)),))
