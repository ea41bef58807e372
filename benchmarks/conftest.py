"""Results carry where they come from: versions, device, and a digest of the references measured."""

import os
from pathlib import Path
from typing import Any

import torch
import xxhash

from equivalence.report.as_json import environment

os.environ.setdefault("OMP_NUM_THREADS", "1")
REFIMPL = Path(__file__).parent.parent / "refimpl"


def refimpl_digest() -> str:
    """XXH3-128 over the reference's source files, names and bytes, in order."""
    whole = xxhash.xxh3_128()
    for path in sorted(REFIMPL.glob("*.py")):
        whole.update(path.name.encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Say what was measured on what; leave out what names a host."""
    cpu = machine_info.get("cpu", {})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    machine_info.clear()
    machine_info |= {
        **environment(),
        "cpu": cpu.get("brand_raw", "unknown"),
        "threads": torch.get_num_threads(),
        "cuda_device": device,
        "refimpl": refimpl_digest(),
    }


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Keep the figures, drop the raw rounds."""
    for bench in output_json["benchmarks"]:
        for name in ("min", "median", "rounds"):
            bench[name] = bench["stats"][name]
        del bench["stats"], bench["options"], bench["fullname"]
