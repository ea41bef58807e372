"""Blocks that rows may publish where scores are known within a bound alone."""

import torch
from torch import Tensor

from equivalence.checks import bounds
from equivalence.checks.bounds import Ranges
from refimpl import blocks


def legal_rows(
    ranges: Ranges,
    *,
    row_start: Tensor,
    visible: Tensor,
    count: Tensor,
    topk_blocks: int,
    block_size: int,
    whole: bool,
) -> blocks.LegalRows:
    """What rows may publish by all scores within their ranges: open blocks stand for tied ones.

    Args:
        ranges: [r, W], where the scores of each row may lie.
        row_start: int64 [r], where the window begins in the scores.
        visible: int64 [r].
        count: int64 [r], blocks of each row.
        topk_blocks: blocks a row publishes at most.
        block_size: columns a block.
        whole: whether a row of no more than topk_blocks publishes them all.
    """
    low, high = (
        blocks.block_scores(
            scores=side,
            row_start=row_start,
            row_end=row_start + visible,
            nan="ignore",
            block_size=block_size,
        )
        for side in (ranges.low, ranges.high)
    )
    block = torch.arange(low.shape[1], device=count.device)
    there, newest = block < count[:, None], block == count[:, None] - 1
    others = there & ~newest & (high > -torch.inf)
    owed = others.sum(1).clamp(max=topk_blocks - 1)
    forced, _, left = bounds.classify(Ranges(low=low, high=high, eligible=others), owed)
    must, need = forced | newest, owed + newest.any(1)
    if whole:
        short = count <= topk_blocks
        must, left = must | there & short[:, None], left & ~short[:, None]
        need = torch.where(short, count, need)
    return blocks.LegalRows(need=need, must=must, ties=left)
