"""Ways by scenarios as text: a line for each, the counted sentence, what failed, and JSON."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from equivalence.compose.matrix import Cell, Matrix, Step
from equivalence.report import as_json, as_text
from equivalence.units import many, size
from equivalence.verdict import Status, Verdict

SCHEMA = 1


def line(cell: Cell, *, width: int = 0) -> str:
    """One way over one scenario: its status, what was compared, and what differs.

    Args:
        cell: any.
        width: of the column that holds the scenario's name.
    """
    told = _equal(cell) if cell.status is Status.EQUAL else _otherwise(cell)
    told += "".join(f"; it ran as {way}" for way in cell.ran if way != cell.way)
    return f"{cell.scenario:<{width}}  {cell.way:<8}  {cell.status.value:<9}  {told}"


def failure(cell: Cell, *, again: str = "") -> str:
    """Why one is not equal: its first step that is not, in full.

    Args:
        cell: DIFFERENT or UNDECIDED.
        again: the command that runs it again.
    """
    wrong = _failing(cell)
    if not wrong:
        return f"{cell.scenario} {cell.way}: no step ran"
    number, step = wrong[0]
    head = f"{cell.way}, step {number} of {cell.planned}"
    head += f", {many(len(wrong) - 1, 'more step')} after it" if len(wrong) > 1 else ""
    return f"{head}\n{as_text.failure(step.verdict, again=again)}"


def wrong(cell: Cell) -> bool:
    """Whether there is a failure to tell of."""
    return cell.status is not Status.EQUAL


def summary(matrix: Matrix) -> str:
    """The counted sentence over a whole run."""
    cells = matrix.cells
    ways, scenarios = ({getattr(cell, what) for cell in cells} for what in ("way", "scenario"))
    steps = sum(len(cell.steps) for cell in cells)
    head = (
        f"{many(matrix.ranks, 'rank')} ({matrix.transport}), {many(len(ways), 'way')}, "
        f"{many(len(scenarios), 'scenario')}: {many(steps, 'composition')} of "
        f"{many(sum(cell.pages for cell in cells), 'page')}, "
        f"{size(sum(cell.bytes for cell in cells))}"
    )
    fault = f"; injected: {matrix.fault}" if matrix.fault else ""
    return f"{head}: {_outcome(matrix)}{fault}"


def render(matrix: Matrix) -> str:
    """JSON: sorted keys, no times."""
    data = {**as_data(matrix), "environment": as_json.environment()}
    return json.dumps(data, indent=1, sort_keys=True)


def as_data(matrix: Matrix) -> dict[str, Any]:
    """The run as plain data, all but the seconds it took and the environment.

    A step that is EQUAL has its counts alone; any other has its verdict, as `as_json` writes one.
    """
    return {
        "schema": SCHEMA,
        "kind": "compose",
        "status": matrix.status.value,
        "ranks": matrix.ranks,
        "transport": matrix.transport,
        "settings": dict(matrix.settings),
        "fault": matrix.fault or None,
        "note": matrix.note,
        "cells": [_cell_data(cell) for cell in matrix.cells],
    }


def _cell_data(cell: Cell) -> dict[str, Any]:
    return {
        "way": cell.way,
        "scenario": cell.scenario,
        "path": cell.path,
        "status": cell.status.value,
        "planned": cell.planned,
        "pages": cell.pages,
        "bytes": cell.bytes,
        "steps": [_step_data(step) for step in cell.steps],
    }


def _step_data(step: Step) -> dict[str, Any]:
    equal = step.verdict.status is Status.EQUAL
    return {
        "case": step.verdict.case,
        "status": step.verdict.status.value,
        "pages": step.pages,
        "bytes": step.bytes,
        "rules": dict(_rules(step.verdict)),
        "verdict": None if equal else as_json.case_data(step.verdict),
    }


def _equal(cell: Cell) -> str:
    return f"{many(cell.planned, 'step')}, {many(cell.pages, 'page')}"


def _otherwise(cell: Cell) -> str:
    """What differs, or why nothing may be concluded."""
    if cell.status is Status.DIFFERENT:
        rules: Counter[str] = Counter()
        for step in cell.steps:
            rules.update(_rules(step.verdict))
        what = f"{cell.different:,} of {many(cell.pages, 'page')} differ"
        return f"{what} ({', '.join(rules)})"
    return next(_undecided(cell), f"none of {many(cell.planned, 'step')} ran")


def _undecided(cell: Cell) -> Iterator[str]:
    for number, step in _failing(cell):
        findings = step.verdict.findings
        why = step.verdict.note or (findings[0].reading if findings else "")
        rule = f"{findings[0].rule}: " if findings else ""
        yield f"step {number} of {cell.planned}: {rule}{why}"


def _failing(cell: Cell) -> list[tuple[int, Step]]:
    """Steps that are not equal, by number from 1; those of the cell's own status first."""
    wrong = [
        (number, step)
        for number, step in enumerate(cell.steps, start=1)
        if step.verdict.status is not Status.EQUAL
    ]
    return sorted(wrong, key=lambda each: each[1].verdict.status is not cell.status)


def _rules(verdict: Verdict) -> Counter[str]:
    """How often each rule was broken."""
    found: Counter[str] = Counter()
    for run in verdict.runs:
        for stage in run.stages.values():
            found.update(stage.rules)
        for finding in run.findings:
            found[finding.rule] += finding.rule not in found
    return found


def _outcome(matrix: Matrix) -> str:
    by_status = Counter(cell.status for cell in matrix.cells)
    undecided = f"{by_status[Status.UNDECIDED]} undecided"
    if not matrix.cells:
        return f"nothing was composed; {undecided}"
    if matrix.note:
        return f"undecided, {matrix.note}"
    if by_status[Status.EQUAL] == len(matrix.cells):
        return f"all equal; {undecided}"
    equal, different = by_status[Status.EQUAL], by_status[Status.DIFFERENT]
    return f"{equal} equal, {different} different; {undecided}"
