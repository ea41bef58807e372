"""Seeded cases of QSA: a layer of blocks of four tokens, and the rows that attention reads."""

import torch
from torch import Tensor

from equivalence.case import Case
from refimpl.bits import E4M3
from refimpl.geometry import qsa_visible_blocks

_HEADS, _GROUP = 4, 4
_DISTINCT_KEYS = 7


def positions_of(topk: int) -> list[int]:
    """Positions of query tokens around every edge of a selection of this many blocks.

    A padding row, no whole block yet, the last token of a block, exactly topk blocks with and
    without an open group, one block more, and rows far past it.
    """
    edge = topk * _GROUP
    return [-1, 0, 2, 3, 5, edge - 1, edge, edge + 2, edge + 3, 3 * edge, 3 * edge + 1, 6 * edge]


def qsa_indexer(
    seed: int,
    *,
    topk: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    tie_rich: bool = True,
) -> Case:
    """One request whose rows stand at `positions_of(topk)`.

    Args:
        seed: of everything.
        topk: blocks a row picks.
        head_dim: values of a key, a multiple of 32.
        page_size: compressed keys a page.
        dtype: of queries and keys, bfloat16 or e4m3.
        tie_rich: seven different keys repeat, one of them all zero.
    """
    random = torch.Generator().manual_seed(seed)
    at = torch.tensor(positions_of(topk), dtype=torch.int32)
    length = int(at.max()) + 1
    visible = qsa_visible_blocks(positions=at, seq_lens=torch.full_like(at, length))
    pages = -(-int(visible.max()) // page_size)
    table = torch.randperm(pages + 2, generator=random)[:pages].int()[None]
    keys = torch.randn((pages + 2) * page_size, head_dim, generator=random)
    if tie_rich:
        keys[0] = 0
        keys = keys[torch.arange(len(keys)) % _DISTINCT_KEYS]
    q = torch.randn(len(at), _HEADS, head_dim, generator=random)
    return Case(
        op="qsa_indexer",
        inputs={
            "q": q.to(dtype),
            "k_cache": keys.to(dtype).reshape(-1, page_size, 1, head_dim),
            "page_table": table,
            "visible_blocks": visible,
            "positions": at,
        },
        params={"topk": topk, "page_size": page_size},
        arithmetic="vllm_qsa_prefill.sm90",
        name=f"qsa_indexer {'e4m3' if dtype is E4M3 else 'bf16'} seed {seed}",
    )


def expand_blocks(seed: int, *, topk: int = 8) -> Case:
    """Block ids of rows at `positions_of(topk)`; a row of them lacks a block inside its prefix."""
    random = torch.Generator().manual_seed(seed)
    at = torch.tensor(positions_of(topk), dtype=torch.int32)
    visible = qsa_visible_blocks(positions=at, seq_lens=at + 1)
    ids = torch.stack([_ids(random, int(seen), topk) for seen in visible])
    ids[-2, topk // 2] = -1
    return Case(
        op="expand_blocks",
        inputs={"block_ids": ids, "positions": at, "visible_blocks": visible},
        name=f"expand_blocks seed {seed}",
    )


def _ids(random: torch.Generator, seen: int, topk: int) -> Tensor:
    picked = torch.full((topk,), -1, dtype=torch.int32)
    some = torch.randperm(seen, generator=random)[:topk].int()
    picked[: len(some)] = some
    return picked
