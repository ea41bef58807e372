"""Where a result comes from: commit, versions, device, and a digest of the references measured."""

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import xxhash

from equivalence.report.as_json import environment

ROOT = Path(__file__).parent.parent


def refimpl_digest() -> str:
    """XXH3-128 over the reference's source files, names and bytes, in order."""
    whole = xxhash.xxh3_128()
    for path in sorted((ROOT / "refimpl").glob("*.py")):
        whole.update(path.name.encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()


def provenance() -> dict[str, Any]:
    """What was measured on what; nothing that names a host."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        **environment(),
        "threads": torch.get_num_threads(),
        "cuda_device": device,
        "refimpl": refimpl_digest(),
    }


def commit() -> str:
    """The commit measured: EQUIVALENCE_COMMIT where a checkout travels without its history."""
    told = os.environ.get("EQUIVALENCE_COMMIT", "")
    if told:
        return told
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    return done.stdout.strip() or "unknown"
