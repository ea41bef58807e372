"""A run as JSON: sorted keys, no time stamps inside cases."""

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

from equivalence.receipt import Receipt
from equivalence.verdict import (
    Coverage,
    Evidence,
    Finding,
    Memory,
    Run,
    Stage,
    Status,
    Verdict,
    run_status,
)

SCHEMA = 1
_PACKAGES = ("indexer-equivalence", "torch", "numpy", "safetensors")
_MOST_ROWS = 64


def render(verdicts: Iterable[Verdict], *, allow_structural: bool = False) -> str:
    """The whole run."""
    data = as_data(verdicts, allow_structural=allow_structural)
    return json.dumps(data, indent=1, sort_keys=True)


def as_data(verdicts: Iterable[Verdict], *, allow_structural: bool = False) -> dict[str, Any]:
    """The whole run as plain data."""
    cases = list(verdicts)
    return {
        "schema": SCHEMA,
        "status": run_status(cases, allow_structural=allow_structural).value,
        "cases": [case_data(verdict) for verdict in cases],
        "environment": environment(),
    }


def case_data(verdict: Verdict) -> dict[str, Any]:
    """One verdict as plain data."""
    return {
        "case": verdict.case,
        "path": verdict.path,
        "op": verdict.op,
        "status": verdict.status.value,
        "expected": verdict.expected,
        "note": verdict.note,
        "candidate": verdict.candidate,
        "contract": verdict.contract,
        "contract_origin": verdict.contract_origin,
        "allowed_by": verdict.allowed_by,
        "scores": verdict.scores,
        "coverage": {
            "rows": verdict.coverage.rows,
            "scored_rows": verdict.coverage.scored_rows,
            "sampled": verdict.coverage.sampled,
        },
        "stages": {
            name: {**_stage(stage), "runs": sum(name in run.stages for run in verdict.runs)}
            for name, stage in verdict.stages.items()
        },
        "findings": [_finding(finding) for finding in verdict.findings],
        "runs": [_run(run) for run in verdict.runs],
        "control": {stage: dict(counts) for stage, counts in verdict.control.items()},
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "run": run.name,
        "stages": {name: _stage(stage) for name, stage in run.stages.items()},
        "blame": dict(run.blame),
        "findings": len(run.findings),
        "memory": None if run.memory is None else asdict(run.memory),
        "paths": [{**asdict(receipt), "rows": list(receipt.rows)} for receipt in run.paths],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "status": stage.status.value,
        "power": stage.power,
        "rules": dict(stage.rules),
        "failing": list(stage.failing[:_MOST_ROWS]),
        **({} if stage.unit == "row" else {"unit": stage.unit}),
        **stage.counts,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "stage": finding.stage,
        "rule": finding.rule,
        "status": finding.status.value,
        "run": finding.run,
        "row": finding.row,
        "detail": {
            "place": finding.place,
            "evidence": [asdict(line) for line in finding.evidence],
        },
        "reading": finding.reading,
    }


def verdict_of(data: Mapping[str, Any]) -> Verdict:
    """The verdict that `case_data` described; of failing rows, those it lists."""
    findings = iter(data["findings"])
    coverage = {key: data["coverage"][key] for key in ("rows", "scored_rows")}
    plain = ("case", "path", "op", "expected", "note", "candidate", "contract")
    return Verdict(
        **{
            key: data[key] for key in (*plain, "contract_origin", "allowed_by", "scores", "control")
        },
        status=Status(data["status"]),
        coverage=Coverage(**coverage),
        runs=tuple(
            Run(
                name=run["run"],
                stages={name: _stage_of(stage) for name, stage in run["stages"].items()},
                findings=tuple(map(_finding_of, islice(findings, run["findings"]))),
                blame=run["blame"],
                memory=None if run["memory"] is None else Memory(**run["memory"]),
                paths=tuple(Receipt(**{**r, "rows": tuple(r["rows"])}) for r in run["paths"]),
            )
            for run in data["runs"]
        ),
    )


def _stage_of(data: Mapping[str, Any]) -> Stage:
    own = {"status", "power", "rules", "failing", "unit"}
    return Stage(
        status=Status(data["status"]),
        counts={key: count for key, count in data.items() if key not in own},
        power=data["power"],
        rules=data["rules"],
        failing=tuple(data["failing"]),
        unit=data.get("unit", "row"),
    )


def _finding_of(data: Mapping[str, Any]) -> Finding:
    plain = {key: data[key] for key in ("stage", "rule", "run", "row", "reading")}
    return Finding(
        **plain,
        status=Status(data["status"]),
        place=data["detail"]["place"],
        evidence=tuple(Evidence(**line) for line in data["detail"]["evidence"]),
    )


def environment() -> Mapping[str, str]:
    """What the run depended on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
