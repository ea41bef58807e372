"""An A/B comparison as JSON."""

import json
from dataclasses import asdict
from typing import Any

from equivalence.report import as_json
from equivalence.versus.forwards import Census, Comparison, Forward, Group
from equivalence.versus.spread import Spread

SCHEMA = 1
_MOST_ROWS = 16


def render(comparison: Comparison) -> str:
    """JSON: sorted keys, no time stamps."""
    data = {**as_data(comparison), "environment": as_json.environment()}
    return json.dumps(data, indent=1, sort_keys=True)


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data, all but the seconds it took and the environment."""
    return {
        "schema": SCHEMA,
        "kind": "ab",
        "op": comparison.op,
        "original": comparison.original,
        "candidate": comparison.candidate,
        "contract": comparison.contract,
        "status": comparison.status.value,
        "why": list(comparison.why),
        "arms": {name: status.value for name, status in comparison.arms.items()},
        "control": comparison.control,
        "total": _group_data(comparison.total),
        "groups": [_group_data(group) for group in comparison.groups],
        "evidence": [asdict(test) for test in comparison.evidence],
        "paths": {
            name: [{**asdict(one), "rows": list(one.rows)} for one in paths]
            for name, paths in comparison.paths.items()
        },
        "forwards": [_forward_data(one) for one in comparison.forwards],
        "failing": [
            {"name": one.name, "verdicts": [as_json.case_data(each) for each in one.verdicts]}
            for one in comparison.failing
        ],
        "calls": comparison.calls,
        "left_out": dict(comparison.left_out),
        "failed": dict(comparison.failed),
        "sample": comparison.sample,
        "seed": comparison.seed,
    }


def _group_data(group: Group) -> dict[str, Any]:
    return {
        "place": dict(group.place),
        "rows_to": group.rows,
        "columns_to": group.columns,
        "forwards": group.forwards,
        "undecided": group.undecided,
        "different": group.different,
        "agreement": {
            view: {stage: asdict(each) for stage, each in stages.items()}
            for view, stages in group.agreement.items()
        },
        "masks": {name: asdict(each) for name, each in group.masks.items()} or None,
        "census": _census_data(group.census),
        "memory": {name: asdict(held) for name, held in group.memory.items()},
        "sampled": group.sampled,
        "further": group.further,
        "unclassified": group.unclassified,
    }


def _forward_data(one: Forward) -> dict[str, Any]:
    control = one.control
    return {
        "name": one.name,
        "place": dict(one.place),
        "rows": one.rows,
        "columns": one.columns,
        "status": one.status.value,
        "new": {stage: asdict(each) for stage, each in one.new.items()},
        "control": None if control is None else {s: asdict(each) for s, each in control.items()},
        "arms": {
            name: {
                "status": arm.status.value,
                "power": arm.power,
                "wrong": arm.wrong,
                "failing": list(arm.failing),
                "memory": None if arm.memory is None else asdict(arm.memory),
            }
            for name, arm in one.arms.items()
        },
        "sampled": one.sampled,
        "further": one.further,
        "unclassified": list(one.unclassified[:_MOST_ROWS]),
        "census": _census_data(one.census),
        "masks": list(one.masks),
        "note": one.note,
    }


def _census_data(census: Census) -> dict[str, Any]:
    return {
        "rows": census.rows,
        "selecting": census.selecting,
        "looked_at": census.looked_at,
        "cut": census.cut,
        "cut_at_zero": census.cut_at_zero,
        "multiplicity": _spread_data(census.multiplicity),
        "margin": _spread_data(census.margin),
        "scores": census.scores,
    }


def _spread_data(spread: Spread) -> dict[str, Any]:
    counts = {str(value): count for value, count in sorted(spread.counts.items())}
    return {
        "least": spread.least,
        "median": spread.median,
        "most": spread.most,
        "counts": counts,
    }
