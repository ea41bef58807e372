"""Pages composed by ranks on GPUs, every way over every scenario, judged by the reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from equivalence import ranks
from equivalence.compose import requests, running, steps
from equivalence.compose.matrix import Cell
from equivalence.paths.ipc.ways import WAYS


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the part `compose` runs with; the defaults are the claims', a test takes small ones.

    Attributes:
        device: as `ranks.start` takes it; None for all GPUs in turn.
        transport: between ranks.
        ranks: processes.
        ways: names of `paths.ipc.ways.WAYS`.
        scenarios: names of `requests.NAMES`.
        layers: of each kind.
        scale: divides the scenarios.
        timeout: seconds that a rank may be silent.
    """

    device: str | None = None
    transport: str = "cuda"
    ranks: int = 8
    ways: tuple[str, ...] = tuple(WAYS)
    scenarios: tuple[str, ...] = requests.NAMES
    layers: int = 8
    scale: int = 1
    timeout: float = 120.0


def compose(setup: Setup) -> Iterator[dict[str, Any]]:
    """Every way over every scenario on one pool of ranks, each step judged by the reference."""
    about = {
        "transport": setup.transport,
        "ranks": setup.ranks,
        "gpus": min(setup.ranks, torch.cuda.device_count()),
    }
    with ranks.start(
        setup.ranks, transport=setup.transport, timeout=setup.timeout, device=setup.device
    ) as pool:
        for scenario in setup.scenarios:
            cases = steps.sequence(scenario, cp=setup.ranks, layers=setup.layers, scale=setup.scale)
            for way in setup.ways:
                start = perf_counter()
                cell = running.played(pool, way, cases, scenario=scenario)
                yield {**about, **_told(cell), "whole_seconds": perf_counter() - start}


def _told(cell: Cell) -> dict[str, Any]:
    """A way over a scenario, in short."""
    findings = [
        f"{each.verdict.case} {f.stage} {f.rule} {f.place}: {f.reading}"
        for each in cell.steps
        for f in each.verdict.findings
    ]
    return {
        "scenario": cell.scenario,
        "way": cell.way,
        "status": cell.status.value,
        "steps": len(cell.steps),
        "planned": cell.planned,
        "pages": cell.pages,
        "bytes": cell.bytes,
        "different": cell.different,
        "seconds": sum(each.seconds for each in cell.steps),
        "findings": findings[:5],
    }
