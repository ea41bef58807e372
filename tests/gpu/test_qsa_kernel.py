"""The QSA kernels of vLLM on a machine that has them; elsewhere each test skips."""

import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import load_cases
from equivalence.case import Case, held
from equivalence.engines import vllm
from equivalence.fixture import Equivalence
from equivalence.flags import fixtures_dir
from equivalence.paths import probe, qsa, workspace
from equivalence.verdict import Status
from refimpl import fast
from refimpl.bits import as_int
from refimpl.qsa import BLOCK_TOKENS, expand_blocks, qsa_indexer

pytestmark = pytest.mark.gpu
LOGITS = "vllm.qsa_indexer._prefill_logits"
ROWS, BLOCKS, PAGE = 3_200, 12_800, 64
POISON = 12345.0
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def qsa_kernel(hopper: None) -> None:
    """Skip without Triton, or without vLLM or the file of its kernels."""
    del hopper
    pytest.importorskip("triton", reason="triton is not installed")
    if not Path(os.environ.get(vllm.FILE, "")).is_file():
        pytest.importorskip("vllm", reason=f"{vllm.FILE} names no qsa_indexer.py of vLLM 0.33.0")


def case_of(dtype: str, *, rows: int = ROWS, blocks: int = BLOCKS) -> Case:
    """Two requests: 100 rows from the first token on, and the last rows of a long context.

    Every third key is a copy of an earlier one, so that scores tie.
    """
    random = torch.Generator().manual_seed(11)
    width = -(-blocks // PAGE)
    pages = torch.randperm(2 * width + 5, generator=random)[: 2 * width].int().view(2, width)
    keys = torch.randn((2 * width + 5) * PAGE, 128, generator=random)
    keys[::3] = keys[: len(keys[::3])]
    q = torch.randn(rows, 4, 128, generator=random)
    late = torch.arange(4 * blocks - (rows - 100), 4 * blocks)
    position = torch.cat([torch.arange(100), late]).int()
    return Case(
        op="qsa_logits",
        inputs={
            "q": q.to(DTYPES[dtype]),
            "k_cache": keys.to(DTYPES[dtype]).view(-1, PAGE, 1, 128),
            "page_table": pages,
            "visible_blocks": ((position + 1) // 4).int(),
            "query_start_loc": torch.tensor([0, 100, rows], dtype=torch.int32),
        },
        params={"page_size": PAGE},
        arithmetic="vllm_qsa_prefill.sm90",
        name=f"qsa-{dtype}-{rows}x{blocks}",
    )


def positions_of(case: Case) -> Tensor:
    """The positions `case_of` made its rows from."""
    rows, (_, width) = len(case.inputs["q"]), case.inputs["page_table"].shape
    last = 4 * width * PAGE
    late = torch.arange(last - (rows - 100), last)
    return torch.cat([torch.arange(100), late]).int().to(case.inputs["q"].device)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("chunk", [1, 64, 65, None])
def test_the_prefill_kernel_has_the_reference_bits_in_any_chunk(
    qsa_kernel: None, equivalence: Equivalence, dtype: str, chunk: int | None
) -> None:
    """3,200 rows by 12,800 blocks through a poisoned workspace; the receipt tells every launch."""
    del qsa_kernel
    rows = ROWS if chunk is None else chunk
    flat = torch.full((rows * BLOCKS,), POISON, device="cuda")
    candidate = partial(vllm.qsa_logits, rows_per_call=chunk, workspace=flat)
    verdict = equivalence.check(case_of(dtype), candidate, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings
    assert verdict.coverage.rows == ROWS
    (way,) = verdict.runs[-1].paths
    assert (way.kernel, way.arch, bool(way.version)) == (LOGITS, "sm90", True)
    assert (way.calls, way.arguments["width"]) == (-(-ROWS // rows), BLOCKS)
    # The last row sees every block; before it, each launch left what its rows do not see.
    assert bool((flat == POISON).any()) is (rows > 1)


@pytest.mark.parametrize("name", ["qsa-bf16", "qsa-fp8"])
def test_a_fresh_launch_agrees_with_what_was_recorded(
    qsa_kernel: None, equivalence: Equivalence, name: str
) -> None:
    """The shipped recordings are repeated."""
    del qsa_kernel
    (case,) = load_cases(fixtures_dir() / "cases" / f"{name}.safetensors")
    verdict = equivalence.check(case, vllm.qsa_logits, device="cuda", repeats=2)
    assert verdict.status is Status.EQUAL, verdict.findings


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), POISON])
def test_a_path_over_the_kernels_is_the_reference_s_layer(qsa_kernel: None, poison: float) -> None:
    """Logits, blocks and packed rows; nothing of the workspace reaches a pick."""
    del qsa_kernel
    case = held(case_of("bf16", rows=300, blocks=2_560), device="cuda")
    given: dict[str, Any] = {
        **case.inputs,
        "page_size": PAGE,
        "positions": positions_of(case),
        "topk": 512,
    }
    want = qsa_indexer(**given, accumulate=fast.accumulate)
    budget = {"budget_bytes": 2 << 20}
    space = workspace.reserve(rows=300, widest=2_560, topk=512, device="cuda", **budget)
    space.scores.fill_(poison)
    kernels: dict[str, Any] = {"scorer": vllm.score, "expand": vllm.expand_blocks, **budget}
    for got in (
        qsa.fresh(**given, **kernels, keep_logits=True),
        qsa.reused(**given, **kernels, keep_logits=True, workspaces=[space]),
    ):
        for name, tensor in want.items():
            assert torch.equal(as_int(got[name]), as_int(tensor)), name


def test_the_expansion_kernel_writes_the_reference_s_rows(qsa_kernel: None) -> None:
    """512 blocks in any order, holes among them, open groups of every length."""
    del qsa_kernel
    random = torch.Generator().manual_seed(12)
    ids = torch.rand(400, 12_800, generator=random).topk(512).indices.int()
    ids[torch.rand(ids.shape, generator=random) < 0.05] = -1
    position = torch.randint(-1, 51_200, (400,), generator=random).int()
    position[:8] = torch.tensor([-1, 0, 3, 4, 2046, 2047, 2048, 51_199], dtype=torch.int32)
    call: dict[str, Any] = {
        "block_ids": ids.cuda(),
        "positions": position.cuda(),
        "visible_blocks": ((position + 1) // 4).int().cuda(),
    }
    assert torch.equal(vllm.expand_blocks(**call), expand_blocks(**call))


def test_growing_contexts_on_the_device(hopper: None) -> None:
    """Fresh tensors leave every size in the allocator's cache; a workspace stays what it is."""
    del hopper
    got = probe.probe(device="cuda")
    calls = {way: steps[1:] for way, steps in got.items()}
    reserved = {way: [step.reserved or 0 for step in steps] for way, steps in calls.items()}
    assert {step.live for step in calls["per-call"]} == {0}
    assert len({step.live for step in got["workspace"]}) == 1
    assert len(set(reserved["workspace"])) == 1
    assert all(a <= b for a, b in pairwise(reserved["per-call"]))
    widest = 2_048 * (256_000 // BLOCK_TOKENS) * 4
    assert reserved["per-call"][-1] > reserved["workspace"][-1] >= widest
