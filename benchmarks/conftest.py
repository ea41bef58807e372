"""Results carry where they come from, and keep the figures without the raw rounds."""

import os
from typing import Any

from benchmarks.provenance import provenance

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Say what was measured on what; leave out what names a host."""
    cpu = machine_info.get("cpu", {})
    machine_info.clear()
    machine_info |= {**provenance(), "cpu": cpu.get("brand_raw", "unknown")}


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Keep the figures, drop the raw rounds."""
    for bench in output_json["benchmarks"]:
        for name in ("min", "median", "rounds"):
            bench[name] = bench["stats"][name]
        del bench["stats"], bench["options"], bench["fullname"]
