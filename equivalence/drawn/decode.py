"""Seeded cases of the paged layer."""

import torch

from equivalence import draws
from equivalence.case import Case
from refimpl.bits import E4M3
from refimpl.pages import pack_keys


def decode_indexer(
    seed: int,
    *,
    tie_rich: bool = True,
    scale: float = 1.0,
    topk: int = 12,
    heads: int = 32,
    head_dim: int = 128,
    page_size: int = 16,
) -> Case:
    """A paged layer: three requests of two query tokens; long, short and empty, just above topk."""
    random = torch.Generator().manual_seed(seed)
    table = -(-6 * topk // page_size)
    pages = 1 + torch.randperm(3 * table, generator=random).reshape(3, table)
    keys, key_scales = draws.keys(random, (3 * table + 1) * page_size, head_dim, tie_rich=tie_rich)
    planar = pack_keys(values=keys, scale=key_scales, page_size=page_size)
    lengths = [[6 * topk - 1, 6 * topk], [0, topk // 2], [topk + 1, topk + 2]]
    return Case(
        op="decode_indexer",
        inputs={
            "q": torch.randn(3, 2, heads, head_dim, generator=random).to(E4M3),
            "kv_cache": planar,
            "weights": torch.randn(6, heads, generator=random) * scale,
            "context_lens": torch.tensor(lengths, dtype=torch.int32),
            "block_table": pages.int(),
        },
        params={"topk": topk, "page_size": page_size},
        arithmetic="deep_gemm.sm90",
        name=f"decode_indexer seed {seed}",
    )
