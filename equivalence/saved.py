"""Failing rows kept as a case of their own, and the command that runs them again."""

import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from equivalence import header, ops, schema, specs, store
from equivalence.case import Case, take_rows
from equivalence.units import size
from equivalence.verdict import Verdict

MOST_ROWS = 64
"""Rows a saved case holds at most, before requests are completed."""

MOST_BYTES = 64 << 20
"""Bytes of inputs of a case that is kept whole."""

_SHOWN = 4


def save_failing(
    verdict: Verdict, case: Case, folder: Path, *, still: Callable[[Case], bool] | None = None
) -> tuple[Path, str] | None:
    """Save the rows that fail or could not be decided, with what was recorded of them.

    Decode rows come by whole requests, and a call that cannot be cut stays whole.
    Rows that the verdict shows come first, then others in order, up to MOST_ROWS.
    A folder that is made here gets a `.gitignore` that keeps everything in it out of git.

    Args:
        verdict: of `case`.
        case: what was judged.
        folder: where the file goes, named after the case and a digest of its contents.
        still: whether a smaller call fails as this one did; a candidate may fail by how many rows
            it is called with, and then the whole case is kept.

    Returns:
        The file and a sentence on what it holds; None where no single row is at fault, unless the
        case stands in no file and is small enough to be kept whole, and where rows pass alone
        that stand in a file or are too many bytes.

    Raises:
        OSError: the folder cannot be written.
    """
    shown = [found.row for found in verdict.findings if found.row is not None]
    sizes = ops.validate(case)
    wrong = list(dict.fromkeys([*shown, *verdict.failing]))
    if not wrong and not case.path and sizes["rows"] <= MOST_ROWS:
        wrong = list(range(sizes["rows"]))
    if specs.OPS[case.op].whole:
        return _whole(case, folder, f"{case.op} cannot be cut")
    if not wrong:
        return None
    next_n = sizes.get("n", 1)
    rows = schema.whole_requests(torch.tensor(sorted(wrong[:MOST_ROWS])), next_n=next_n)
    numbers = [str(row) for row in rows.tolist()]
    part = take_rows(case, rows)
    if still is not None and len(rows) < sizes["rows"] and not still(part):
        return _whole(case, folder, "those that fail pass alone")
    about = {"rows": f"{' '.join(numbers)} of {case.name}"}
    path = _write(replace(part, provenance={**case.provenance, **about}), folder)
    held = f", of {len(wrong):,} that fail" if len(wrong) > MOST_ROWS else ""
    return path, f"{_rows(numbers)}{held}, {size(path.stat().st_size)}"


def _whole(case: Case, folder: Path, why: str) -> tuple[Path, str] | None:
    """Save all rows, unless they stand in a file or are too many bytes."""
    if case.path or sum(t.nbytes for t in case.inputs.values()) > MOST_BYTES:
        return None
    path = _write(case, folder)
    return path, f"all rows: {why}, {size(path.stat().st_size)}"


def _write(case: Case, folder: Path) -> Path:
    """Write a case under a name that tells its contents."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    part = folder / f".{os.getpid()}{store.SUFFIX}.part"
    store.save(case, part)
    seal = json.loads(header.read(part).metadata[header.KEY])["digest"]
    name = re.sub(r"[^\w.-]+", "-", case.name)
    return part.replace(folder / f"{name}-{seal[:12]}{store.SUFFIX}")


def _rows(numbers: Sequence[str]) -> str:
    more = len(numbers) - _SHOWN
    listed = " ".join(numbers[:_SHOWN]) if more > 1 else " ".join(numbers)
    return f"row{'' if len(numbers) == 1 else 's'} {listed}" + (
        f" and {more} more" if more > 1 else ""
    )


def again(
    path: Path | str,
    *,
    command: str = "replay",
    candidate: str = "",
    contract: str = "",
    device: str = "",
    repeats: int = 1,
    rows: Sequence[int] = (),
    seed: int = 0,
    max_transient: int | None = None,
    require_path: Sequence[str] = (),
) -> str:
    """The command that judges a file again, to paste into a shell.

    Args:
        path: the case; shown from the working directory where it is below it.
        command: which one.
        candidate: MODULE:FUNCTION, or "" for the recorded runs.
        contract: as given to the judge, or "" for the case's own or the strict one.
        device: where the inputs go, or "".
        repeats: how often the candidate is called.
        rows: only these, or all where there are none.
        seed: of what is random, where that is not 0.
        max_transient: bytes a call may hold, or None.
        require_path: kernels each call must have run.
    """
    options = {
        "--candidate": candidate,
        "--contract": contract,
        "--device": device,
        "--repeats": str(repeats) if repeats > 1 else "",
        "--rows": ",".join(map(str, rows)),
        "--seed": str(seed) if seed else "",
        "--max-transient": "" if max_transient is None else str(max_transient),
    }
    words = ["equivalence", command, here(path)]
    words += [word for name, value in options.items() if value for word in (name, value)]
    words += [word for name in require_path for word in ("--require-path", name)]
    return python_path(candidate) + shlex.join(words)


def here(path: Path | str) -> str:
    """A path from the working directory where it is below it."""
    whole, work = Path(path).absolute(), Path.cwd()
    return str(whole.relative_to(work) if whole.is_relative_to(work) else whole)


def python_path(candidate: str) -> str:
    """What a module in a folder below the working directory needs so that it can be imported."""
    top = candidate.partition(":")[0].partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if not file:
        return ""
    place = Path(file).resolve().parent
    home = place.parent if Path(file).name == "__init__.py" else place
    installed = "site-packages" in home.parts or home == Path(sysconfig.get_path("stdlib"))
    found = installed or home == Path.cwd()
    return "" if found else f"PYTHONPATH={shlex.quote(here(home))} "
