"""QSA on a Hopper GPU: vLLM's prefill kernel to the bit, and what growing contexts allocate."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import best, timed, told
from equivalence import judge
from equivalence.case import Case
from equivalence.engines import vllm
from equivalence.paths import probe as paths_probe
from refimpl.bits import E4M3, as_int
from refimpl.qsa import BLOCK_TOKENS

POISON = 12345.0
DTYPES = {"bf16": torch.bfloat16, "e4m3": E4M3}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the parts run with; the defaults are the claims', a test takes small ones.

    Attributes:
        device: where.
        rows: of the kernel's step.
        blocks: that the last row sees, a multiple of `page_size`.
        early: rows of a first request, from its first token on.
        head_dim: of queries and keys.
        topk: blocks a row picks.
        page_size: keys a page.
        chunks: rows a call of the kernel scores; None for all.
        selector: between the two kernels, a name in `paths.parts.SELECTORS`.
        contract: what that selector may do.
        rounds: launches of which the best time counts.
        contexts: tokens of the longest request, call by call, of the probe.
        probe_rows: rows of each of its calls.
        budget: bytes of its scores; None for the path's own 512 MiB.
    """

    device: str = "cuda"
    rows: int = 3_200
    blocks: int = 12_800
    early: int = 100
    head_dim: int = 128
    topk: int = 512
    page_size: int = 64
    chunks: tuple[int | None, ...] = (1, 64, 65, None)
    selector: str = "torch"
    contract: str = "torch.topk"
    rounds: int = 3
    contexts: tuple[int, ...] = paths_probe.CONTEXTS
    probe_rows: int = 2_048
    budget: int | None = None


def step(setup: Setup, dtype: str, *, seed: int = 11) -> Case:
    """Two requests: the first tokens of one, and the last rows of a long context.

    Every third key is a copy of an earlier one, so that scores tie.
    """
    random = torch.Generator(device=setup.device).manual_seed(seed)
    draw = partial(torch.randn, device=setup.device, generator=random)
    width = setup.blocks // setup.page_size
    pages = 2 * width + 5
    table = torch.randperm(pages, device=setup.device, generator=random)[: 2 * width]
    keys = draw(pages * setup.page_size, setup.head_dim)
    keys[::3] = keys[: len(keys[::3])].clone()
    late = setup.rows - setup.early
    position = torch.arange(setup.early, device=setup.device)
    last = BLOCK_TOKENS * setup.blocks - late + torch.arange(late, device=setup.device)
    position = torch.cat([position, last]).int()
    edges = torch.tensor([0, setup.early, setup.rows], dtype=torch.int32, device=setup.device)
    return Case(
        op="qsa_indexer",
        inputs={
            "q": draw(setup.rows, 4, setup.head_dim).to(DTYPES[dtype]),
            "k_cache": keys.to(DTYPES[dtype]).view(-1, setup.page_size, 1, setup.head_dim),
            "page_table": table.int().view(2, width),
            "visible_blocks": ((position + 1) // BLOCK_TOKENS).int(),
            "positions": position,
            "query_start_loc": edges,
        },
        params={"topk": setup.topk, "page_size": setup.page_size},
        arithmetic="vllm_qsa_prefill.sm90",
        name=f"qsa {dtype} {setup.rows:,} x {setup.blocks:,}",
    )


def qsa(setup: Setup) -> Iterator[dict[str, Any]]:
    """Logits, blocks and packed rows of the two kernels, by dtype and chunk."""
    for dtype in DTYPES:
        case = step(setup, dtype)
        for chunk in setup.chunks:
            yield {"dtype": dtype, "chunk": chunk, "blocks": setup.blocks} | _judged(
                setup, case, chunk
            )


def _judged(setup: Setup, case: Case, chunk: int | None) -> dict[str, Any]:
    """One chunk size through a poisoned workspace, which only seen cells may leave."""
    rows = min(setup.rows, chunk or setup.rows)
    flat = torch.full((rows * setup.blocks,), POISON, device=setup.device)
    how: dict[str, Any] = {"rows_per_call": chunk, "workspace": flat}
    device = torch.device(setup.device)
    verdict, taken = timed(
        device,
        lambda: judge.check(
            case,
            partial(vllm.qsa_indexer, **how, selector=setup.selector),
            contract=setup.contract,
            device=device,
            require_path="vllm",
        ),
    )
    row = {
        **told(verdict),
        "seconds": taken,
        "paths": [asdict(path) for run in verdict.runs for path in run.paths],
        "kernel_seconds": None,
        "poison_written": None,
    }
    if "logits" in verdict.stages:
        row |= _kernel(setup, case, flat, how)
    return row


def _kernel(setup: Setup, case: Case, flat: Tensor, how: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the scoring alone, and workspace cells past every row's blocks that it wrote."""
    given: dict[str, Any] = {n: t for n, t in case.inputs.items() if n != "positions"}
    call = partial(vllm.qsa_logits, **given, page_size=setup.page_size, **how)
    fastest = best(torch.device(setup.device), call, rounds=setup.rounds)
    flat.fill_(POISON)
    call()
    # Each view lies at the workspace's head: a cell is free where no row of its place sees it.
    seen = given["visible_blocks"].clamp(min=0)
    rows = len(flat) // setup.blocks
    padded = torch.nn.functional.pad(seen, (0, -len(seen) % rows)).view(-1, rows).amax(0)
    free = torch.arange(setup.blocks, device=seen.device) >= padded[:, None]
    kept = as_int(flat).view(rows, -1) == as_int(torch.tensor(POISON, device=flat.device))
    return {
        "kernel_seconds": fastest,
        "unseen_cells": int(free.sum()),
        "poison_written": int((free & ~kept).sum()),
    }


def probe(setup: Setup) -> Iterator[dict[str, Any]]:
    """Live and reserved bytes after each call, of a tensor for every chunk and of one workspace."""
    found = paths_probe.probe(
        contexts=setup.contexts,
        rows=setup.probe_rows,
        topk=setup.topk,
        head_dim=setup.head_dim,
        budget_bytes=setup.budget,
        device=setup.device,
    )
    for way, steps in found.items():
        for each in steps:
            yield {"way": way, **asdict(each)}
