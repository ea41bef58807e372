"""Seeded cases of quantisers, and of keys gathered from planar pages or moved in them."""

import torch

from equivalence import draws
from equivalence.case import Case
from refimpl import pages


def quantize_q(
    seed: int, *, style: str = "v3.2-q", rows: int = 9, heads: int = 8, head_dim: int = 32
) -> Case:
    """Queries of very different sizes and their head weights."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, head_dim, generator=random)
    x *= torch.logspace(-6, 3, rows)[:, None, None]
    x[1, 0] = 0
    return Case(
        op="quantize_q",
        inputs={
            "x": x.to(torch.bfloat16),
            "weights": torch.randn(rows, heads, generator=random),
        },
        params={"style": style},
        name=f"quantize_q {style} seed {seed}",
    )


def quantize_k(seed: int, *, style: str = "k", rows: int = 16, head_dim: int = 128) -> Case:
    """Keys of very different sizes, one of them all zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, head_dim, generator=random) * torch.logspace(-6, 3, rows)[:, None]
    x[1] = 0
    return Case(
        op="quantize_k",
        inputs={"x": x.to(torch.bfloat16)},
        params={"style": style},
        name=f"quantize_k {style} seed {seed}",
    )


def gather_keys(seed: int, *, page_size: int = 4, head_dim: int = 16) -> Case:
    """Keys of three requests on scattered pages: whole pages, none, and a page begun."""
    random = torch.Generator().manual_seed(seed)
    lens = torch.tensor([2 * page_size, 0, page_size + 1], dtype=torch.int32)
    table = 1 + torch.randperm(6, generator=random).reshape(3, 2)
    keys, scales = draws.keys(random, 8 * page_size, head_dim, tie_rich=False)
    return Case(
        op="gather_keys",
        inputs={
            "kv_cache": pages.pack_keys(values=keys, scale=scales, page_size=page_size),
            "block_table": table.int(),
            "seq_lens": lens,
        },
        params={"rows": int(lens.sum()), "page_size": page_size},
        name=f"gather_keys seed {seed}",
    )


def move_tokens(
    seed: int, *, page_size: int = 4, head_dim: int = 16, cache_pages: int = 8, pad: int = 0
) -> Case:
    """Six moves, each of which but the first reads what the one before it writes, and padding.

    Location 0 is nobody's; the cache holds 8 tokens or more.
    """
    random = torch.Generator().manual_seed(seed)
    keys, scales = draws.keys(random, cache_pages * page_size, head_dim, tie_rich=False)
    chain = 1 + torch.randperm(cache_pages * page_size - 1, generator=random)[:7]
    padding = torch.full((2,), pad)
    return Case(
        op="move_tokens",
        inputs={
            "kv_cache": pages.pack_keys(values=keys, scale=scales, page_size=page_size),
            "source": torch.cat([chain[:-1], padding]),
            "destination": torch.cat([chain[1:], padding]),
        },
        params={"page_size": page_size, "pad": pad},
        name=f"move_tokens seed {seed}",
    )
