"""The measurements for a Hopper GPU, rehearsed small on this device."""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_engines
import pytest
import torch
from click.testing import CliRunner
from fake_qsa import expand_qsa_block_indices, prefill_logits
from torch import Tensor

from benchmarks import hopper, hopper_masks, hopper_qsa, page
from benchmarks.provenance import refimpl_digest
from equivalence.engines import vllm

SMALL = hopper.Setup(
    device="cpu",
    scorer="reference",
    selector="torch",
    contract="torch.topk",
    rows=64,
    heads=16,
    head_dim=32,
    topk=16,
    columns=(256, 512),
    swept=256,
    budgets=(1 << 14, 1 << 15),
    budget=1 << 15,
    chunks=(8, 32),
    compared=(256,),
    scenarios=("cold-8k", "repeated-text"),
    layers=1,
    ratios=(1, 2),
    scale=64,
    sample=16,
    rounds=1,
)

QSA = hopper_qsa.Setup(
    device="cpu",
    rows=70,
    blocks=64,
    early=10,
    head_dim=32,
    topk=8,
    page_size=16,
    rounds=1,
    contexts=(256, 512, 1_024),
    probe_rows=32,
    budget=1 << 14,
)
MASKS = hopper_masks.Setup(device="cpu", rows=64, columns=1_024, topk_blocks=8, rounds=1)


def _one_cell_past(*call: Any) -> Tensor:  # noqa: ANN401 - tensors and numbers
    """As `prefill_logits`, but the cell after the last seen one of the first row is written."""
    view = prefill_logits(*call)
    offset, seen = call[8], call[4]
    if offset == 0:
        view[0, seen[0]] = 1.0
    return view


def _one_ulp_off(*call: Any) -> Tensor:  # noqa: ANN401 - tensors and numbers
    """As `prefill_logits`, but for one bit of the last row of a call."""
    view = prefill_logits(*call)
    view[-1, 0] = torch.nextafter(view[-1, 0], torch.tensor(torch.inf))
    return view


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM whose kernels are the reference's formulas."""
    fake_engines.without_gpu(monkeypatch)
    monkeypatch.delenv(vllm.FILE, raising=False)
    made = ModuleType("vllm")
    vars(made)["__version__"] = fake_engines.VERSION
    vars(made).update(
        _prefill_logits=prefill_logits, expand_qsa_block_indices=expand_qsa_block_indices
    )
    for name in ("vllm", "vllm.models.qwen4_exp.nvidia.ops.qsa_indexer"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


def use(kernels: ModuleType, logits: Callable[..., Tensor]) -> None:
    """Another prefill kernel, with the parameters the adapter looks at."""
    vars(logits)["__signature__"] = inspect.signature(prefill_logits)
    vars(kernels)["_prefill_logits"] = logits


def test_transient_counts_what_the_formula_says_and_all_picks_are_right() -> None:
    """The original holds all logits, chunks a budget of them, and each way is judged equal."""
    rows = list(hopper.transient(SMALL))
    assert [row["columns"] for row in rows] == [256, 512]
    for row in rows:
        formulas = {name: way["formula"] for name, way in row["ways"].items()}
        assert formulas == {
            "original": 64 * row["columns"] * 4,
            "chunked": 1 << 15,
            "pipelined": 1 << 15,
        }
        assert all(way["transient"] >= way["formula"] for way in row["ways"].values())
        assert {run["status"] for run in row["judged"]["runs"].values()} == {"EQUAL"}
        assert row["judged"]["judge_bytes"] < 256 << 20


def test_sweep_has_two_ways_a_budget_after_the_original() -> None:
    """Every row has its budget, bytes and ratio."""
    rows = list(hopper.sweep(SMALL))
    told = [(row["way"], row["budget"]) for row in rows]
    assert told == [
        ("original", None),
        *((way, budget) for budget in SMALL.budgets for way in ("chunked", "pipelined")),
    ]
    assert all(row["ratio"] > 0 and row["transient"] >= 0 for row in rows)


def test_invariance_compares_every_chunk_size() -> None:
    """The reference does not depend on the row count."""
    (row,) = hopper.invariance(SMALL)
    assert (row["status"], row["chunks"], row["findings"]) == ("EQUAL", [8, 32], [])


def test_the_table_has_a_row_a_scenario() -> None:
    """Deterministic parts: new equals original everywhere, and so does the original itself."""
    rows = list(hopper.table(SMALL))
    assert [row["scenario"] for row in rows] == ["cold-8k", "repeated-text"]
    assert [row["comparison"]["status"] for row in rows] == ["EQUAL", "EQUAL"]


def test_qsa_judges_every_dtype_and_chunk_bit_for_bit(kernels: ModuleType) -> None:
    """Logits, blocks and packed rows are equal, in so many launches; no unseen cell is written."""
    del kernels
    rows = list(hopper_qsa.qsa(QSA))
    chunks = [1, 64, 65, None]
    assert [(row["dtype"], row["chunk"]) for row in rows] == [
        (dtype, chunk) for dtype in ("bf16", "e4m3") for chunk in chunks
    ]
    seen = int(hopper_qsa.step(QSA, "bf16").inputs["visible_blocks"].sum())
    for row in rows:
        assert (row["status"], row["rows"], row["findings"]) == ("EQUAL", 70, [])
        assert {name: stage["status"] for name, stage in row["stages"].items()} == {
            "logits": "EQUAL",
            "block_ids": "EQUAL",
            "packed": "EQUAL",
        }
        logits = row["stages"]["logits"]
        assert (logits["compared"], logits["different"]) == (seen, 0)
        launches = {path["kernel"]: path["calls"] for path in row["paths"]}
        assert launches["vllm.qsa_indexer._prefill_logits"] == -(-70 // (row["chunk"] or 70))
        assert launches["vllm.qsa_indexer.expand_qsa_block_indices"] == 1
        assert row["poison_written"] == 0
        assert row["kernel_seconds"] > 0
    assert [row["unseen_cells"] > 0 for row in rows[:4]] == [False, True, True, True]


def test_qsa_finds_one_bit_in_a_kernel(kernels: ModuleType) -> None:
    """The last row of each call has a wrong cell, and each chunk counts its own."""
    use(kernels, _one_ulp_off)
    rows = list(hopper_qsa.qsa(replace(QSA, chunks=(64, None))))
    assert [(row["status"], row["stages"]["logits"]["different"]) for row in rows] == [
        ("DIFFERENT", 2),
        ("DIFFERENT", 1),
    ] * 2


def test_qsa_finds_a_cell_past_what_a_row_sees(kernels: ModuleType) -> None:
    """The judge does not read it; the workspace's poison is gone there."""
    use(kernels, _one_cell_past)
    rows = list(hopper_qsa.qsa(replace(QSA, chunks=(None,))))
    assert [(row["status"], row["poison_written"]) for row in rows] == [("EQUAL", 1)] * 2


def test_qsa_without_the_kernels_says_so_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is concluded, and the part goes on."""
    fake_engines.without_gpu(monkeypatch)
    monkeypatch.delenv(vllm.FILE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    rows = list(hopper_qsa.qsa(replace(QSA, chunks=(None,))))
    assert [row["status"] for row in rows] == ["UNDECIDED"] * 2
    assert all("vllm is not installed" in row["findings"][0] for row in rows)


def test_probe_has_a_row_a_call_of_each_way() -> None:
    """Fresh tensors grow and are gone; the workspace holds the same before and after."""
    rows = list(hopper_qsa.probe(QSA))
    ways = ("per-call", "workspace")
    calls = [(row["way"], row["context"]) for row in rows]
    assert calls == [(way, context) for way in ways for context in (0, *QSA.contexts)]
    assert [row["live"] for row in rows[:4]] == [0] * 4
    assert rows[1]["peak"] < rows[3]["peak"]
    assert len({row["live"] for row in rows[4:]}) == 1
    assert rows[4]["live"] > 1 << 14


def test_masks_are_compared_by_form_and_windows_and_judged() -> None:
    """Positions are those of the windows; a flipped block is found, and in its row."""
    rows = list(hopper_masks.masks(MASKS))
    compared, judged = rows[:6], rows[6:]
    assert [(row["form"], row["windows"]) for row in compared] == [
        (form, windows) for windows in ("full", "causal", "ragged") for form in ("bool", "packed")
    ]
    assert [row["positions"] for row in compared[:4]] == [65_536] * 2 + [63_520] * 2
    assert all(row["ratio_to_equal"] > 0 and row["to_bool"] > 0 for row in compared)
    assert [(row["form"], row["flipped"], row["status"], row["failing"]) for row in judged] == [
        (form, flipped, status, failing)
        for form in ("bool", "packed")
        for flipped, status, failing in ((0, "EQUAL", []), (1, "DIFFERENT", [32]))
    ]
    assert all(row["judge_bytes"] < 256 << 20 for row in rows)


def test_masks_that_differ_in_a_window_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part asserts that it measured a comparison that finds nothing."""
    honest = hopper_masks.pair

    def off(*call: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a mask's blocks, form, windows
        want, got = honest(*call)
        got.view(torch.uint8)[5, 0] ^= 1
        return want, got

    monkeypatch.setattr(hopper_masks, "pair", off)
    with pytest.raises(AssertionError):
        next(hopper_masks.masks(MASKS))


SMALLS = {"qsa": replace(QSA, chunks=(64,)), "probe": QSA, "masks": MASKS}


@pytest.fixture
def small(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on this machine, its parts with small numbers."""
    del kernels
    monkeypatch.setenv("EQUIVALENCE_COMMIT", "0123456789abcdef")
    monkeypatch.setattr(hopper, "on_device", lambda: True)
    for name, setup in SMALLS.items():
        monkeypatch.setitem(hopper.PARTS, name, (hopper.PARTS[name][0], setup))


def measure(*words: str) -> tuple[int, str]:
    """The command's exit status and what it said last."""
    done = CliRunner().invoke(hopper.main, words)
    return done.exit_code, (done.output.strip().splitlines() or [""])[-1]


def test_the_command_writes_a_file_a_part_and_the_page_tells_them(
    small: None, tmp_path: Path
) -> None:
    """Each with where it comes from; the page has a section each, after those it had."""
    del small
    code, _ = measure("qsa", "probe", "masks", "--to", str(tmp_path))
    assert code == 0
    kernels = {"qsa": fake_engines.VERSION, "probe": "none", "masks": "none"}
    for part, kernel in kernels.items():
        told = json.loads((tmp_path / f"hopper-{part}.json").read_text(encoding="utf-8"))
        about = told["provenance"]
        assert (told["part"], about["kernels"]) == (part, kernel)
        assert (about["commit"], about["refimpl"]) == ("0123456789abcdef", refimpl_digest())
    for path in page.FOLDER.glob("hopper-*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for part in kernels:  # the page of a run on a device
        path = tmp_path / f"hopper-{part}.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        if part == "probe":
            told["rows"] = [row | {"reserved": 2 << 20} for row in told["rows"]]
        path.write_text(json.dumps(told), encoding="utf-8")
    titles = [line for line in page.render(tmp_path).splitlines() if line.startswith("## ")]
    assert titles[4:] == [
        "## QSA's kernels, bit for bit in any chunk",
        "## What growing contexts leave allocated",
        "## Masks",
        "## Pages across ranks",
        "## Exchange of pages, one rank a GPU",
        "## What these figures do not say",
    ]


def test_a_part_that_fails_leaves_the_others_alone(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is told at the end, and the parts after it are there."""
    del small

    def broken(_: object) -> Iterator[dict[str, Any]]:
        raise RuntimeError("no memory")
        yield {}

    monkeypatch.setitem(hopper.PARTS, "qsa", (broken, QSA))
    told = measure("qsa", "probe", "--to", str(tmp_path))
    assert told == (1, "Error: not measured to the end: qsa")
    assert [path.name for path in tmp_path.iterdir()] == ["hopper-probe.json"]


def test_the_page_of_results_is_what_the_committed_files_say() -> None:
    """docs/results.md is made of benchmarks/results and of nothing else."""
    assert page.TARGET.read_text(encoding="utf-8") == page.render()


def test_the_committed_run_measured_what_the_plans_count() -> None:
    """Transient bytes on the H200 are the formula's, to 16 MiB; the judge takes under 256 MiB."""
    for row in page.load("transient")["rows"]:
        for way in row["ways"].values():
            assert abs(way["transient"] - way["formula"]) < 16 << 20
        assert row["judged"]["judge_bytes"] < 256 << 20


def test_the_committed_run_keeps_its_claims() -> None:
    """2 GiB of chunks take at most 1.2 of the time; all judged forwards and schedules are equal."""
    ratios = [
        way["ratio_to_original"]
        for row in page.load("transient")["rows"]
        for way in row["ways"].values()
    ]
    assert max(ratios) <= 1.2
    table = page.load("table")["rows"]
    assert sum(row["comparison"]["total"]["forwards"] for row in table) >= 176
    assert {row["comparison"]["status"] for row in table} == {"EQUAL"}
    assert {row["status"] for row in page.load("invariance")["rows"]} == {"EQUAL"}
