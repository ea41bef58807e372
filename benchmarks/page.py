"""docs/results.md, made of the files in benchmarks/results: `python -m benchmarks.page`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page_ranks
from benchmarks.markdown import line as _line
from benchmarks.markdown import table as _table

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "results.md"

_GIB, _MIB = 1 << 30, 1 << 20
_WAYS = ("per call", "workspace")


def measured(part: str, folder: Path = FOLDER) -> bool:
    """Whether a run has this part."""
    return any(folder.glob(f"hopper-{part}*.json"))


def load(part: str, folder: Path = FOLDER) -> dict[str, Any]:
    """One part of a run on a Hopper GPU; the table's rows come from a file a scenario."""
    files = sorted(folder.glob(f"hopper-{part}*.json"))
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    first: dict[str, Any] = parts[0]
    return first | {"rows": [row for each in parts for row in each["rows"]]}


def render(folder: Path = FOLDER) -> str:
    """The whole page."""
    parts = {name: load(name, folder) for name in SECTIONS if measured(name, folder)}
    text = _HEAD.format(about="".join(_about(part) for part in parts.values()))
    for name, part in parts.items():
        text += "\n" + SECTIONS[name](part)
    return text + _LIMITS


_HEAD = """\
# Results on a Hopper GPU

Written by `python -m benchmarks.page` from `benchmarks/results/hopper-*.json`,
which `make gpu` writes on a machine with a Hopper GPU, the kernels and nvcc.
A test fails when this page and those files part.

| part | commit | device | torch | kernels | references |
| --- | --- | --- | --- | --- | --- |
{about}"""

_LIMITS = """
## What these figures do not say

- Keys, queries and texts are drawn from a seed (`equivalence/scenarios.py`); no model made them,
  and a real prompt has other ties.
- One device, one launch at a time: nothing else ran beside it.
- Times are the best of a few launches, by device events; the judge's own is one launch.
- "new == original" speaks of every row and slot.
  Legality is judged by the reference on the sampled rows, and by the original's own logits,
  which were compared bit for bit, on each further row that differs.
"""


def _about(part: dict[str, Any]) -> str:
    found = part["provenance"]
    cells = (
        part["part"],
        f"`{found['commit'][:12]}`",
        found["cuda_device"],
        found["torch"],
        found["kernels"],
        f"`{found['refimpl'][:12]}`",
    )
    return _line(cells)


def _gib(count: float) -> str:
    return f"{count / _GIB:.2f}"


def _invariance(part: dict[str, Any]) -> str:
    setup = part["setup"]
    rows = [
        (
            f"{row['columns']:,}",
            " ".join(f"{size:,}" for size in row["chunks"]),
            row["status"],
            f"{row['stages']['logits']['compared']:,}",
            f"{row['stages']['logits']['different']:,}",
            f"{row['scored_rows']:,} of {row['rows']:,}",
        )
        for row in part["rows"]
    ]
    head = ("columns", "chunks of", "verdict", "logits by the reference", "different", "rows")
    return (
        "## Scoring does not depend on the row count\n\n"
        f"{setup['rows']:,} rows in one call against the same rows in chunks:\n"
        "every logit bit for bit, and the whole call against the reference on a sample of rows.\n\n"
        + _table(head, rows)
    )


def _sweep(part: dict[str, Any]) -> str:
    rows = [
        (
            row["way"],
            "-" if row["budget"] is None else _gib(row["budget"]),
            _gib(row["transient"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in part["rows"]
    ]
    columns = part["rows"][0]["columns"]
    head = ("way", "budget GiB", "transient GiB", "ms", "time / original")
    return (
        f"## Budgets\n\n{part['setup']['rows']:,} rows, {columns:,} columns.\n"
        "Pipelined: two chunks alive, each of half the budget, so small budgets make it launch\n"
        "twice as many and smaller kernels.\n\n" + _table(head, rows)
    )


def _transient(part: dict[str, Any]) -> str:
    rows = [
        (
            f"{row['columns']:,}",
            name,
            _gib(way["transient"]),
            _gib(way["formula"]),
            "-" if way["reserved"] is None else _gib(way["reserved"]),
            f"{way['seconds'] * 1e3:.1f}",
            f"{way['ratio_to_original']:.2f}",
        )
        for row in part["rows"]
        for name, way in row["ways"].items()
    ]
    head = (
        "columns",
        "way",
        "transient GiB",
        "formula GiB",
        "reserved GiB",
        "ms",
        "time / original",
    )
    judged = [
        (
            f"{row['columns']:,}",
            f"{row['judged']['rows']:,}",
            f"{row['judged']['judge_bytes'] / (1 << 20):.0f}",
            f"{row['judged']['seconds']:.1f}",
            "; ".join(f"{name} {_counts(run)}" for name, run in row["judged"]["runs"].items()),
        )
        for row in part["rows"]
    ]
    return (
        f"## Transient memory of {part['setup']['rows']:,} rows\n\n"
        f"Scoring and top-k, {part['setup']['heads']} heads of {part['setup']['head_dim']}, "
        f"k {part['setup']['topk']:,};\n"
        f"chunks under a budget of {_gib(part['setup']['budget'])} GiB of fp32 logits.\n"
        "The formula is the plan's own count of its logits.\n\n"
        + _table(head, rows)
        + "\nThe judge on a sample of these rows, scored by the reference on the device:\n\n"
        + _table(("columns", "rows", "judge MiB", "s", "picks"), judged)
    )


def _counts(run: dict[str, Any]) -> str:
    kinds = ("identical", "reordered", "tied", "different", "undecided")
    told = ", ".join(f"{run[kind]:,} {kind}" for kind in kinds if run.get(kind))
    rules = ", ".join(run["rules"])
    return f"{run['status']}: {told}" + (f" ({rules})" if rules else "")


_LOOKS = (
    ("slots", "all", "raw slot order"),
    ("sets", "all", "sets"),
    ("slots", "logits", "logits"),
)


def _compared(part: dict[str, Any]) -> str:
    setup = part["setup"]
    tables = ""
    looks = (
        ("slots", "all", "raw slot order"),
        ("sets", "all", "sets"),
        ("slots", "logits", "logits"),
    )
    for view, stage, title in looks:
        rows = [
            (f"`{row['scenario']}`", *_forwards(_agreed(row, view, stage)), _masks_equal([row]))
            for row in part["rows"]
        ]
        rows.append(
            ("all", *_forwards(_summed(part["rows"], view, stage)), _masks_equal(part["rows"]))
        )
        titles = (title, "layer-forwards", "new == original", "original == original", "masks equal")
        tables += _table(titles, rows) + "\n"
    counted = [
        (f"`{row['scenario']}`", *_rows(_agreed(row, "sets", "raw_indices")))
        for row in part["rows"]
    ]
    counted.append(("all", *_rows(_summed(part["rows"], "sets", "raw_indices"))))
    head = ("rows of raw_indices", "rows", "new holds another set", "original again does")
    tables += _table(head, counted) + "\n"
    facts = [
        (
            f"`{row['scenario']}`",
            row["comparison"]["status"],
            "; ".join(row["comparison"]["why"]) or row["comparison"]["control"],
            _p(row["comparison"], "slots"),
            _p(row["comparison"], "sets"),
            f"{row['comparison']['total']['sampled']:,}",
            f"{row['comparison']['total']['further']:,}",
        )
        for row in part["rows"]
    ]
    about = ("scenario", "status", "what it rests on", "p, slots", "p, sets", "sampled", "further")
    return (
        "## New against original, and original against itself\n\n"
        f"One [T, L] call against chunks under {_gib(setup['budget'])} GiB, over {setup['layers']} "
        f"layers of each ratio ({', '.join(map(str, setup['ratios']))}),\n"
        f"at least {setup['sample']} rows a layer-forward judged by the reference (sampled), and\n"
        "each further row in which any two of the three arms hold another set, by the original's\n"
        "own logits, which are the same bits in all arms.\n"
        "`fast_topk` takes its slots in the order of atomic operations, so no layer-forward of\n"
        "16,384 rows repeats slot by slot, and in most some row is cut inside a tie: then sets\n"
        "differ too. The rows say how often.\n"
        f"{_masks_told(part['rows'])}\n\n"
        + tables
        + "p is the exact one-sided McNemar test on layer-forwards in which only one of the two "
        "differs;\nit says how far the rates are apart and decides nothing.\n\n"
        + _table(about, facts)
    )


Agreement = dict[str, int]


def _agreed(row: dict[str, Any], view: str, stage: str) -> Agreement:
    found: Agreement = row["comparison"]["total"]["agreement"][view][stage]
    return found


def _summed(rows: Sequence[dict[str, Any]], view: str, stage: str) -> Agreement:
    each = [_agreed(row, view, stage) for row in rows]
    return {name: sum(one[name] for one in each) for name in each[0]}


def _forwards(each: Agreement) -> tuple[str, ...]:
    names = ("forwards", "new_equal", "control_equal")
    return tuple(f"{each[name]:,}" for name in names)


def _masks_equal(rows: Sequence[dict[str, Any]]) -> str:
    """In how many of the layer-forwards that publish a mask both publish the same."""
    published = [row["comparison"]["total"]["masks"] for row in rows]
    each = [masks["all"] for masks in published if masks]
    equal, forwards = (sum(one[name] for one in each) for name in ("new_equal", "forwards"))
    return f"{equal:,} of {forwards:,}" if each else "n/a"


def _masks_told(rows: Sequence[dict[str, Any]]) -> str:
    """What the column of masks counts."""
    if _masks_equal(rows) == "n/a":
        return "No layer of these runs published a mask, so that column is empty."
    return "The last column counts the layer-forwards that publish a mask."


def _rows(each: Agreement) -> tuple[str, ...]:
    return tuple(f"{each[name]:,}" for name in ("rows", "new_rows", "control_rows"))


def _p(comparison: dict[str, Any], view: str) -> str:
    for test in comparison["evidence"]:
        if (test["view"], test["stage"]) == (view, "all"):
            return "-" if test["p"] is None else f"{test['p']:.3g}"
    return "-"


def _qsa(part: dict[str, Any]) -> str:
    setup = part["setup"]
    rows = [
        (
            row["dtype"],
            "all" if row["chunk"] is None else f"{row['chunk']:,}",
            row["status"],
            f"{row['rows']:,}",
            *_cells(row, "logits", "compared", "different"),
            *_cells(row, "block_ids", "tied", "different"),
            *_cells(row, "packed", "different"),
            "-" if row["kernel_seconds"] is None else f"{row['kernel_seconds'] * 1e3:.1f}",
            f"{row['seconds']:.1f}",
        )
        for row in part["rows"]
    ]
    head = (
        "dtype",
        "rows a call",
        "verdict",
        "rows",
        "logits compared",
        "different",
        "rows tied",
        "rows different",
        "packed rows different",
        "kernel ms",
        "judge s",
    )
    found = [row for row in part["rows"] if row["poison_written"] is not None]
    written, unseen = (
        sum(row[name] for row in found) for name in ("poison_written", "unseen_cells")
    )
    told = [f"- {row['dtype']}, {line}\n" for row in part["rows"] for line in row["findings"]]
    return (
        "## QSA's kernels, bit for bit in any chunk\n\n"
        f"vLLM's prefill logits of {setup['rows']:,} rows by {setup['blocks']:,} blocks, "
        f"4 heads of {setup['head_dim']}, through one poisoned workspace;\n"
        f"{setup['topk']} blocks a row by `{setup['selector']}`; "
        "packed rows by vLLM's expansion kernel.\n"
        "Every logit a row sees is compared with the reference, and every row of the others.\n"
        f"Of {unseen:,} workspace cells that no row sees, the kernel wrote {written:,}.\n"
        "The judge's seconds hold the candidate's calls, and in the first line of a dtype what "
        "compiles.\n\n" + _table(head, rows) + ("\n" + "".join(told) if told else "")
    )


def _cells(row: dict[str, Any], stage: str, *names: str) -> tuple[str, ...]:
    counts = row["stages"].get(stage)
    return tuple("-" if counts is None else f"{counts[name]:,}" for name in names)


def _probe(part: dict[str, Any]) -> str:
    setup = part["setup"]
    rows: dict[int, list[str]] = {}
    for row in part["rows"]:
        reserved = "-" if row["reserved"] is None else f"{row['reserved'] / _MIB:,.0f}"
        figures = (f"{row['live'] / _MIB:,.1f}", f"{row['peak'] / _MIB:,.1f}", reserved)
        rows.setdefault(row["context"], []).extend(figures)
    head = [f"{way}: {what} MiB" for way in _WAYS for what in ("live", "peak", "reserved")]
    budget = 512 << 20 if setup["budget"] is None else setup["budget"]
    return (
        "## What growing contexts leave allocated\n\n"
        f"A QSA layer of {setup['probe_rows']:,} rows, call after call with a longer context, that "
        "allocates and scores nothing:\n"
        f"a fresh tensor for every chunk of at most {budget / _MIB:,.0f} MiB, or one workspace "
        "reserved before the first call.\n"
        "Live is what tensors hold after the call, reserved what the caching allocator took up to "
        "then.\n\n"
        + _table(
            ("context", *head),
            ((f"{context:,}" if context else "before", *each) for context, each in rows.items()),
        )
    )


def _masks(part: dict[str, Any]) -> str:
    setup = part["setup"]
    compared = [
        (
            row["form"],
            row["windows"],
            f"{row['positions'] / 1e9:.2f}",
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['bytes_per_second'] / 1e12:.2f}",
            f"{row['equal_bytes_per_second'] / 1e12:.2f}",
            f"{row['ratio_to_equal']:.2f}",
            f"{row['to_bool']:.1f}",
            f"{row['judge_bytes'] / _MIB:.0f}",
        )
        for row in part["rows"]
        if row["what"] == "compared"
    ]
    judged = [
        (
            row["form"],
            "one block flipped" if row["flipped"] else "as published",
            row["status"],
            ", ".join(row["rules"]) or "-",
            f"{len(row['failing']):,}",
            f"{row['seconds']:.1f}",
            f"{row['judge_bytes'] / _MIB:.0f}",
        )
        for row in part["rows"]
        if row["what"] == "judged"
    ]
    head = (
        "form",
        "windows",
        "G positions",
        "ms",
        "TB/s",
        "`torch.equal` TB/s",
        "ratio",
        "positions/s to bool",
        "judge MiB",
    )
    return (
        f"## Masks\n\n{setup['rows']:,} x {setup['columns']:,} positions compared inside the "
        "windows, beside `torch.equal` of the whole mask and a copy;\n"
        "bytes are those of both masks, MiB what the comparison holds beyond its inputs.\n\n"
        + _table(head, compared)
        + f"\nMasks of {setup['topk_blocks']:,} blocks a row, judged by their scores:\n\n"
        + _table(("form", "mask", "verdict", "rules", "rows failing", "s", "judge MiB"), judged)
    )


SECTIONS = {
    "invariance": _invariance,
    "table": _compared,
    "transient": _transient,
    "sweep": _sweep,
    "qsa": _qsa,
    "probe": _probe,
    "masks": _masks,
    "compose": page_ranks.compose,
    "exchange": page_ranks.exchange,
}

if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
