"""Masks of a row chunk: a source layer publishes one, a consumer picks inside one."""

import torch
from torch import Tensor

from equivalence.paths.parts import Logits
from refimpl import blocks, forms, masks
from refimpl.topk import PAD


def publish(
    logits: Logits,
    rows: Tensor,
    *,
    visible: Tensor,
    topk_blocks: int,
    block_size: int,
    out: Tensor,
) -> None:
    """Write the mask of some rows of a chunk where it stays: no other mask is alive.

    Args:
        logits: of the chunk.
        rows: int64 [P], its rows that are published.
        visible: int32 [n], columns that each row of the chunk sees.
        topk_blocks: blocks a row publishes at most.
        block_size: columns a block.
        out: bool [P, lc], all of it is written.
    """
    visible, column = visible[rows], logits.column[rows]
    counts = blocks.block_counts(visible=visible, block_size=block_size)
    for part in blocks.row_blocks(len(rows), logits.values.shape[1]):
        best = blocks.block_scores(
            scores=logits.values[rows[part]],
            row_start=column[part],
            row_end=column[part] + visible[part],
            block_size=block_size,
        )
        forms.write_blocks(
            out[part],
            blocks.kept_blocks(block_scores=best, blocks=counts[part], topk_blocks=topk_blocks),
            visible=visible[part],
            columns=out.shape[1],
            form="bool",
            block_size=block_size,
        )


def apply(logits: Logits, mask: Tensor, *, visible: Tensor, block_size: int) -> None:
    """Make the scores that a mask of any form, [n, ...], does not admit -inf, in place."""
    masks.apply(
        scores=logits.values,
        mask=mask,
        row_start=logits.column,
        row_end=logits.column + visible,
        out=logits.values,
        block_size=block_size,
    )


def pad(logits: Logits, picks: Tensor, *, visible: Tensor) -> None:
    """Make picks int32 [n, k] at -inf pads, in place; scores are those that `apply` left.

    A row of at most k columns that the selector made 0, 1, ... stays: nobody read its scores.
    """
    if not logits.values.shape[1]:
        return
    order = torch.arange(picks.shape[1], device=picks.device)
    unread = picks == torch.where(order < visible[:, None], order, PAD)
    short = visible[:, None] <= picks.shape[1]
    padded = masks.pad_minus_inf(raw_indices=picks, scores=logits.values, row_start=logits.column)
    picks.copy_(torch.where(short & unread.all(1, keepdim=True), picks, padded))
