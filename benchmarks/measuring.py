"""What the parts measured on a device share: times by its events, and a verdict in short."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch

from equivalence.verdict import Verdict

T = TypeVar("T")


def finish(device: torch.device) -> None:
    """Wait for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, call: Callable[[], T]) -> tuple[T, float]:
    """What a call gives, and its seconds: by events on a CUDA device, by the clock elsewhere."""
    if device.type != "cuda":
        start = perf_counter()
        return call(), perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    given = call()
    end.record()
    torch.cuda.synchronize(device)
    return given, float(begin.elapsed_time(end)) / 1e3


def best(device: torch.device, call: Callable[[], object], *, rounds: int) -> float:
    """Seconds of the fastest of a few calls."""
    return min(timed(device, call)[1] for _ in range(rounds))


def told(verdict: Verdict) -> dict[str, Any]:
    """Status, rows, counts by output, and findings as lines."""
    return {
        "status": verdict.status.value,
        "rows": verdict.coverage.rows,
        "scored_rows": verdict.coverage.scored_rows,
        "stages": {
            name: {"status": stage.status.value, **stage.counts}
            for name, stage in verdict.stages.items()
        },
        "findings": [f"{f.stage} {f.rule} row {f.row}: {f.reading}" for f in verdict.findings],
        "note": verdict.note,
    }
