"""Seeded cases of what ranks hand together: rows, and the picks of sharded keys."""

import torch

from equivalence.case import Case
from refimpl import topk
from refimpl.ranks import Split, local_ids, owner_of, row_ids, shard_rows, split_rows


def gather_rows(
    seed: int, *, rows: int = 23, width: int = 16, ranks: int = 4, kind: Split = "zigzag"
) -> Case:
    """Rows of int32 picks that a context-parallel split dealt to ranks."""
    random = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 4096, (rows, width), generator=random, dtype=torch.int32)
    owned = split_rows(rows=rows, ranks=ranks, kind=kind)
    return Case(
        op="gather_rows",
        inputs={"shards": shard_rows(whole, owned), "row_ids": row_ids(owned)},
        params={"rows": rows},
        name=f"gather_rows {kind} seed {seed}",
    )


def merge_topk(
    seed: int,
    *,
    k: int = 12,
    columns: int = 96,
    ranks: int = 4,
    interleave: int = 1,
    tie_rich: bool = True,
) -> Case:
    """Each rank's top-k of its own tokens, with ties across ranks; long, short and empty rows."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([columns, columns - 1, k + 1, k, k // 2, 1, 0], dtype=torch.int32)
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    scores = torch.rand(len(lengths), columns, generator=random)
    if tie_rich:
        scores = levels[(scores * len(levels)).long()]
    column = torch.arange(columns)
    owner = owner_of(column, ranks=ranks, interleave=interleave)
    local = local_ids(column, ranks=ranks, interleave=interleave)
    picked = torch.full((ranks, len(lengths), k), -1, dtype=torch.int32)
    held = torch.full((ranks, len(lengths), k), -torch.inf)
    for rank in range(ranks):
        mine = scores.masked_fill(owner != rank, -torch.inf)
        best = topk.ragged_topk(
            scores=mine,
            row_start=torch.zeros_like(lengths),
            row_end=lengths,
            k=k,
            short_rows="any",
            minus_inf="pad",
        )
        there = best >= 0
        at = best.clamp(min=0).long()
        picked[rank] = torch.where(there, local[at].int(), -1)
        held[rank] = torch.where(there, scores.gather(1, at), -torch.inf)
    return Case(
        op="merge_topk",
        inputs={"scores": held, "picks": picked, "context_lens": lengths},
        params={"k": k, "interleave": interleave},
        name=f"merge_topk seed {seed}",
    )
