"""The claims about kernels, paths and masks, measured on a Hopper GPU.

    python -m benchmarks.hopper PART... --to FOLDER

Each part writes one JSON file with its provenance; `page.py` makes docs/results.md of them.
Times are the best of a few launches by device events; ratios are to the original in the same run.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch

from benchmarks import hopper_compose, hopper_exchange, hopper_masks, hopper_qsa
from benchmarks.measuring import best, finish, timed, told
from benchmarks.provenance import commit, provenance
from equivalence import judge, memory, ops, sample, scenarios, sides
from equivalence.ab import compare
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.engines import found, vllm
from equivalence.invariance import check_row_count
from equivalence.paths import chunked, parts, pipelined
from equivalence.report import ab_json, as_table
from equivalence.versus.forwards import Comparison
from refimpl.bits import E4M3

GIB = 1 << 30
Layer = Callable[..., dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the parts run with; the defaults are the claims', a test takes small ones.

    Attributes:
        device: where.
        scorer: a name in `paths.parts.SCORERS`.
        selector: a name in `paths.parts.SELECTORS`.
        contract: what the selector may do.
        rows: of a chunk of the prompt.
        heads: query heads.
        head_dim: bytes a key.
        topk: picks a row.
        columns: contexts of the transient part.
        swept: context of the sweep.
        budgets: bytes, of the sweep.
        budget: bytes, of the other parts.
        chunks: row counts of the invariance part.
        compared: contexts of the invariance part.
        scenarios: of the table.
        layers: of each ratio in the table.
        ratios: of the table's layers.
        scale: divides the scenarios.
        sample: rows of a layer-forward that the reference scores.
        rounds: launches of which the best time counts.
    """

    device: str = "cuda"
    scorer: str = "deep_gemm"
    selector: str = "sgl_kernel"
    contract: str = "sgl_kernel.fast_topk_v2"
    rows: int = 16_384
    heads: int = 64
    head_dim: int = 128
    topk: int = 2_048
    columns: tuple[int, ...] = (65_536, 300_000, 487_936)
    swept: int = 300_000
    budgets: tuple[int, ...] = tuple(GIB * eighths // 8 for eighths in (1, 2, 4, 8, 16, 32, 64))
    budget: int = 2 * GIB
    chunks: tuple[int, ...] = (128, 256, 512, 1_024, 2_048, 4_096)
    compared: tuple[int, ...] = (16_384, 65_536)
    scenarios: tuple[str, ...] = (
        "cold-8k",
        "batch-4x7k",
        "prefix-hit",
        "repeated-text",
        "cold-60k",
        "cold-200k",
    )
    layers: int = 4
    ratios: tuple[int, ...] = (1, 2)
    scale: int = 1
    sample: int = sample.LEAST
    rounds: int = 3


def prefill(setup: Setup, *, columns: int, seed: int = 0) -> Case:
    """The last chunk of a cold prompt of `columns` tokens; keys and queries are rounded normals."""
    random = torch.Generator(device=setup.device).manual_seed(seed)
    draw = partial(torch.randn, device=setup.device, generator=random)
    end = columns - setup.rows + 1 + torch.arange(setup.rows, device=setup.device)
    return Case(
        op="prefill_indexer",
        inputs={
            "q": draw(setup.rows, setup.heads, setup.head_dim).to(E4M3),
            "k": draw(columns, setup.head_dim).to(E4M3),
            "k_scale": draw(columns).abs() + 0.5,
            "weights": draw(setup.rows, setup.heads),
            "row_start": torch.zeros_like(end, dtype=torch.int32),
            "row_end": end.int(),
        },
        params={"topk": setup.topk},
        arithmetic="deep_gemm.sm90",
        name=f"cold {columns:,} columns",
    )


def ways(setup: Setup, budget: int) -> dict[str, Layer]:
    """The three paths over the same kernels."""
    kernels: dict[str, Any] = {"scorer": setup.scorer, "selector": setup.selector}
    return {
        "original": partial(chunked.original, **kernels),
        "chunked": partial(chunked.chunked, budget_bytes=budget, **kernels),
        "pipelined": partial(pipelined.pipelined, budget_bytes=budget, **kernels),
    }


def measure(setup: Setup, way: Layer, case: Case) -> dict[str, Any]:
    """Seconds and bytes of one path on one case."""
    call = partial(way, **case.inputs, **case.params)
    device = torch.device(setup.device)
    call()  # compiles
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is reserved is for this call alone
    with memory.measured(device) as meter:
        outputs = call()
        finish(device)
    tensors = list(outputs.values())
    given = case.inputs.values()
    held = meter.of(memory.bytes_of(tensors, given=given), meter.fresh(tensors))
    del outputs, tensors
    return {"seconds": best(device, call, rounds=setup.rounds), **asdict(held)}


def transient(setup: Setup) -> Iterator[dict[str, Any]]:
    """Original, chunked, pipelined: bytes, time and picks, and what the judge itself takes."""
    for columns in setup.columns:
        case = prefill(setup, columns=columns)
        paths = ways(setup, setup.budget)
        figures = {name: measure(setup, way, case) for name, way in paths.items()}
        base = figures["original"]["seconds"]
        for name, each in figures.items():
            each["ratio_to_original"] = each["seconds"] / base
            each["formula"] = chunked.peak_bytes(
                rows=setup.rows,
                columns=columns,
                heads=setup.heads,
                way=name,  # type: ignore[arg-type]  # one of its names
                budget_bytes=setup.budget,
                scorer=setup.scorer,
            )
        yield {"columns": columns, "ways": figures, "judged": _judged(setup, case, paths)}


def _judged(setup: Setup, case: Case, paths: dict[str, Layer]) -> dict[str, Any]:
    """Every path's picks on a sample of rows by the reference, and the judge's own memory."""
    calls = {name: way(**case.inputs, **case.params) for name, way in paths.items()}
    given = [sides.given(case, outputs, name) for name, outputs in calls.items()]
    windows = ops.find(case.op).windows(case)
    rows = sample.rows_of(case, windows, count=setup.sample)
    contract = Contract.parse(setup.contract)
    judge.weigh(case, given, contract=contract, rows=rows[:1])  # compiles
    device = torch.device(setup.device)
    with memory.measured(device) as meter:
        verdict, taken = timed(
            device, lambda: judge.weigh(case, given, contract=contract, rows=rows)
        )
    runs = {
        run.name: {
            "status": run.stages["raw_indices"].status.value,
            **run.stages["raw_indices"].counts,
            "rules": dict(run.stages["raw_indices"].rules),
        }
        for run in verdict.runs
        if "raw_indices" in run.stages
    }
    return {
        "rows": len(rows),
        "seconds": taken,
        "judge_bytes": meter.peak,
        "status": verdict.status.value,
        "runs": runs,
    }


def sweep(setup: Setup) -> Iterator[dict[str, Any]]:
    """Time and bytes by budget, one chunk after another and pipelined."""
    case = prefill(setup, columns=setup.swept)
    original = measure(setup, ways(setup, 1)["original"], case)
    yield {"columns": setup.swept, "way": "original", "budget": None, **original, "ratio": 1.0}
    for budget in setup.budgets:
        paths = ways(setup, budget)
        for name in ("chunked", "pipelined"):
            each = measure(setup, paths[name], case)
            ratio = each["seconds"] / original["seconds"]
            yield {"columns": setup.swept, "way": name, "budget": budget, **each, "ratio": ratio}


def scoring(case: Case) -> Case:
    """The scoring alone."""
    names = ("q", "k", "k_scale", "weights", "row_start", "row_end")
    inputs = {name: case.inputs[name] for name in names}
    return replace(case, op="mqa_logits", inputs=inputs, params={})


def invariance(setup: Setup) -> Iterator[dict[str, Any]]:
    """All rows in one call against chunks: scoring bit for bit, then the whole layer."""

    def logits(**call: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - an op's inputs
        scored = parts.scorer(setup.scorer)(**call)
        return {"logits": scored.values}

    for columns in setup.compared:
        case = prefill(setup, columns=columns)
        verdict = check_row_count(scoring(case), logits, rows=setup.chunks, sample=setup.sample)
        yield {"columns": columns, "chunks": list(setup.chunks), **told(verdict)}


def table(setup: Setup) -> Iterator[dict[str, Any]]:
    """The original against chunks and against itself, scenario by scenario."""
    paths = ways(setup, setup.budget)
    for name in setup.scenarios:
        forwards = scenarios.forwards(
            name,
            seed=0,
            scale=setup.scale,
            layers=setup.layers,
            ratios=setup.ratios,
            heads=setup.heads,
            head_dim=setup.head_dim,
            topk=setup.topk * setup.scale,
            device=setup.device,
        )
        begin = perf_counter()
        comparison = compare(
            partial(paths["original"], keep_logits=True),
            partial(paths["chunked"], keep_logits=True),
            forwards,
            contract=setup.contract,
            device=setup.device,
            sample=setup.sample,
        )
        yield {
            "scenario": name,
            "seconds": perf_counter() - begin,
            "comparison": _kept(comparison),
        }


def _kept(comparison: Comparison) -> dict[str, Any]:
    """What a page of results needs of a comparison, and its text."""
    data = ab_json.as_data(comparison)
    names = ("status", "why", "arms", "control", "total", "evidence", "paths", "sample")
    about = ("place", "rows_to", "columns_to", "forwards", "agreement")
    groups = [{name: group[name] for name in about} for group in data["groups"]]
    text = as_table.text(comparison).splitlines()
    return {name: data[name] for name in names} | {"groups": groups, "text": text}


PARTS: dict[str, tuple[Callable[[Any], Iterator[dict[str, Any]]], Any]] = {
    "transient": (transient, Setup()),
    "sweep": (sweep, Setup()),
    "invariance": (invariance, Setup()),
    "table": (table, Setup()),
    "qsa": (hopper_qsa.qsa, hopper_qsa.Setup()),
    "probe": (hopper_qsa.probe, hopper_qsa.Setup()),
    "masks": (hopper_masks.masks, hopper_masks.Setup()),
    "compose": (hopper_compose.compose, hopper_compose.Setup()),
    "exchange": (hopper_exchange.exchange, hopper_exchange.Setup()),
}
"""What measures each part, and what it runs with."""


@click.command()
@click.argument("parts", nargs=-1, required=True, type=click.Choice(list(PARTS)))
@click.option("--to", "folder", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--scenario", "names", multiple=True, help="Of the table, only these.")
def main(parts: tuple[str, ...], folder: Path, names: tuple[str, ...]) -> None:
    """Measure parts on this machine's GPU; a part that fails leaves the others alone."""
    if not on_device():
        raise click.UsageError("no CUDA device")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in parts:
        try:
            for setup, path in files(part, names):
                write(setup, part, folder / path)
        except Exception as error:  # noqa: BLE001 - device time is short: the next part still runs
            click.echo(f"{part}: {type(error).__name__}: {error}", err=True)
            failed.append(part)
    if failed:
        raise click.ClickException(f"not measured to the end: {', '.join(failed)}")


def on_device() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def files(part: str, names: tuple[str, ...] = ()) -> Iterator[tuple[Any, str]]:
    """What a part runs with and the file it writes; the table has one a scenario."""
    _, setup = PARTS[part]
    if part == "compose":  # one a machine: one GPU for all ranks, or several
        yield setup, f"hopper-compose-{torch.cuda.device_count()}gpu.json"
        return
    if part != "table":
        yield setup, f"hopper-{part}.json"
        return
    for name in names or setup.scenarios:
        yield replace(setup, scenarios=(name,)), f"hopper-table-{name}.json"


def write(setup: Any, part: str, path: Path) -> None:  # noqa: ANN401 - a Setup of the part
    """Measure one part; written row by row, so that a run cut short keeps what it has."""
    rows: list[dict[str, Any]] = []
    measured, _ = PARTS[part]
    for row in measured(setup):
        rows.append(row)
        path.write_text(render(setup, part, rows), encoding="utf-8")
        click.echo(json.dumps(row, sort_keys=True)[:400], err=True)


def render(setup: Any, part: str, rows: list[dict[str, Any]]) -> str:  # noqa: ANN401 - likewise
    """The file of one part."""
    about = {**provenance(), "commit": commit(), "kernels": kernels(part)}
    data = {"part": part, "provenance": about, "setup": asdict(setup), "rows": rows}
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def kernels(part: str) -> str:
    """The kernels a part calls, by their distributions; none where it calls none."""
    if part == "qsa":
        file = os.environ.get(vllm.FILE)
        named = found.version_of_file(file) if file else found.version("vllm")
        return "; ".join(filter(None, (named, found.version("triton")))) or "none"
    if part in ("probe", "masks", "compose"):
        return "none"
    if part == "exchange":
        return hopper_exchange.kernels()
    library = "sgl_kernel sm90 common_ops of sglang-kernel 0.4.6"
    try:
        return f"sgl-deep-gemm {version('sgl-deep-gemm')}; {library}"
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
