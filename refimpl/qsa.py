"""QSA selection: the best blocks of a row, and the packed row of tokens that attention reads.

A block is `block_size` tokens whose keys were compressed to one. A packed row of n blocks holds
the tokens of the picked blocks, then those of the open group, which no block covers yet; its last
column is no token but a count.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl import scoring, topk
from refimpl.blocks import row_blocks, visible_of
from refimpl.tensorcore import accumulate as exact_accumulate
from refimpl.topk import PAD

BLOCK_TOKENS = 4


def expand_blocks(
    *, block_ids: Tensor, positions: Tensor, visible_blocks: Tensor, block_size: int = BLOCK_TOKENS
) -> Tensor:
    """The packed row of every row of picked blocks.

    With c = min(visible, n), it is tokens 4 b .. 4 b + 3 of the first c blocks as they stand, then
    (pos + 1) // 4 * 4 .. pos, then -1; the last column is 4 c + the length of that tail.
    A block that is -1 leaves four -1 inside the counted prefix, and blocks from c on are not read.

    Args:
        block_ids: [T, n] int32, pads -1.
        positions: [T] int32; a padding row is at -1, and sees no block.
        visible_blocks: [T] int32; a negative number counts as 0.
        block_size: tokens a block.

    Returns:
        [T, n * block_size + block_size] int32: n * block_size + block_size - 1 tokens, one count.

    Source: vLLM 0.33.0 models/qwen4_exp/nvidia/ops/qsa_indexer.py `_expand_qsa_indices_kernel`.
    """
    rows, n = block_ids.shape
    offset = torch.arange(block_size, dtype=torch.int32, device=block_ids.device)
    column = torch.arange(n * block_size + block_size - 1, device=block_ids.device)
    packed = block_ids.new_empty((rows, len(column) + 1), dtype=torch.int32)
    for some in row_blocks(rows, len(column)):
        seen = positions[some, None].clamp(min=PAD) + 1
        filled = visible_blocks[some, None].clamp(0, n) * block_size
        tail = seen % block_size
        tokens = (block_ids[some, :, None].int() * block_size + offset).flatten(1)
        tokens = torch.nn.functional.pad(tokens, (0, block_size - 1), value=PAD)
        place = column - filled
        last = torch.where(place < tail, seen - tail + place, PAD)
        tokens = torch.where(place < 0, tokens, last)
        packed[some, :-1] = torch.where(tokens < 0, PAD, tokens).int()
        packed[some, -1:] = (filled + tail).int()
    return packed


def qsa_picks(
    *,
    logits: Tensor,
    positions: Tensor,
    visible_blocks: Tensor,
    k: int,
    block_size: int = BLOCK_TOKENS,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """The best blocks of every row from its logits, and their packed row.

    Args:
        logits: [T, columns]; cells from `visible_blocks` on are whatever a workspace held.
        positions: [T] int32.
        visible_blocks: [T] int32.
        k: blocks a row; a row that sees no more takes 0 .. visible - 1, its logits unread.
        block_size: tokens a block.
        order: how `topk.ragged_topk` orders and breaks ties.

    Returns:
        block_ids [T, k] int32, pads -1; packed, see `expand_blocks`.

    Raises:
        ValueError: a row sees more blocks than the logits have columns.
    """
    first = torch.zeros_like(visible_blocks)
    visible = visible_of(row_start=first, row_end=visible_blocks, columns=logits.shape[1])
    blocks = topk.ragged_topk(scores=logits, row_start=first, row_end=visible, k=k, **order)
    packed = expand_blocks(
        block_ids=blocks, positions=positions, visible_blocks=visible, block_size=block_size
    )
    return {"block_ids": blocks, "packed": packed}


def qsa_indexer(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    positions: Tensor,
    query_start_loc: Tensor | None = None,
    topk: int,
    page_size: int = 64,
    block_size: int = BLOCK_TOKENS,
    arithmetic: str = "vllm_qsa_prefill.sm90",
    accumulate: scoring.Accumulate = exact_accumulate,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """The QSA layer: `scoring.qsa_logits`, then `qsa_picks`; shapes and errors are theirs.

    Decode rows are the same formula. vLLM scores them with another kernel, whose bits were not
    measured: for them no arithmetic but `exact` has a claim.

    Args:
        q: as in `scoring.qsa_logits`.
        k_cache: likewise.
        page_table: likewise.
        visible_blocks: likewise.
        positions: [T] int32.
        query_start_loc: as in `scoring.qsa_logits`; None where requests have equally many rows,
            one after another, as they have in decode.
        topk: blocks a row.
        page_size: keys a page.
        block_size: tokens a block.
        arithmetic: as in `scoring.qsa_logits`.
        accumulate: as in `scoring.qsa_logits`.
        order: how `topk.ragged_topk` orders and breaks ties.

    Returns:
        logits [T, table_width * page_size] fp32 and the picks.

    Raises:
        ValueError: rows cannot be dealt out equally, or as the functions it calls.
    """
    logits = scoring.qsa_logits(
        q=q,
        k_cache=k_cache,
        page_table=page_table,
        visible_blocks=visible_blocks,
        query_start_loc=_equal(len(q), page_table) if query_start_loc is None else query_start_loc,
        page_size=page_size,
        arithmetic=arithmetic,
        accumulate=accumulate,
    )
    picks = qsa_picks(
        logits=logits,
        positions=positions,
        visible_blocks=visible_blocks,
        k=topk,
        block_size=block_size,
        **order,
    )
    return {"logits": logits} | picks


def _equal(rows: int, page_table: Tensor) -> Tensor:
    """First row of each request where all have equally many."""
    requests = len(page_table)
    each, left = divmod(rows, max(1, requests))
    if left or (rows and not requests):
        raise ValueError(
            f"q has {rows} rows and page_table {requests} requests: without query_start_loc "
            "each has equally many"
        )
    return torch.arange(requests + 1, dtype=torch.int32, device=page_table.device) * each
