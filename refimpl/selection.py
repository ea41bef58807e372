"""What one layer of a two-level selection chooses by its scores: picks, and the mask it publishes.

A layer of DSA or V4 picks from all that a row sees. Of V4.1, a source layer publishes a mask too,
and a consumer picks inside one.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl import blocks, forms, masks, topk


def pin_tokens(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    init_tokens: int = 0,
    local_tokens: int = 0,
) -> Tensor:
    """Scores with +inf in the first and the last columns of every window, and nowhere else.

    The engine clamps these columns to the matrix and not to the window: its short rows also write
    +inf outside, where nobody reads.

    Args:
        scores: [T, L] fp32, bf16 or fp16; unchanged.
        row_start: [T] int32.
        row_end: [T] int32.
        init_tokens: columns pinned from the window's start on.
        local_tokens: columns pinned up to its end.

    Source: SGLang 0.5.23 dsa_indexer.py:1185-1217 `_mask_init_and_local_tokens`.
    """
    if init_tokens < 0 or local_tokens < 0:
        raise ValueError(
            f"init_tokens is {init_tokens} and local_tokens {local_tokens}: both are 0 or more"
        )
    if not init_tokens and not local_tokens:
        return scores
    column = torch.arange(scores.shape[1], device=scores.device)
    start, end = row_start[:, None], row_end[:, None]
    pinned = (column < start + init_tokens) | (column >= end - local_tokens)
    return torch.where(pinned & (column >= start) & (column < end), torch.inf, scores)


def select(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    k: int,
    mask: Tensor | None = None,
    block_ids: Tensor | None = None,
    topk_blocks: int | None = None,
    rows: Tensor | None = None,
    form: forms.Form = "bool",
    block_size: int = blocks.BLOCK,
    block_nan: blocks.Nan = "propagate",
    init_tokens: int = 0,
    local_tokens: int = 0,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """What a layer chooses by its scores: picks, and of a source layer the mask that it publishes.

    Pinned columns score +inf for all that follows. A mask still leaves them out.

    Args:
        scores: [T, L] fp32, bf16 or fp16.
        row_start: [T] int32.
        row_end: [T] int32.
        k: picks a row.
        mask: [T, lc] bool or [T, lc / 8] packed, of a consumer.
        block_ids: [T, n] int32 instead, in either form.
        topk_blocks: blocks a row publishes, of a source layer.
        rows: [P] int, the numbers of the rows that are published; all when None.
        form: of what is published.
        block_size: columns a block.
        block_nan: where a NaN block stands, as in `masks.publish`.
        init_tokens: as in `pin_tokens`.
        local_tokens: as in `pin_tokens`.
        order: how `topk.ragged_topk` orders and breaks ties; `ties` and `zero_sign` hold for
            blocks too. A consumer never picks at -inf, whatever minus_inf says.

    Returns:
        raw_indices [T, k] int32 relative to row_start, and mask or block_ids by the form.

    Raises:
        ValueError: a layer has two masks, or one and topk_blocks, or what `masks` raises.
    """
    given = [name for name, x in (("mask", mask), ("block_ids", block_ids)) if x is not None]
    given += ["topk_blocks"] * (topk_blocks is not None)
    if len(given) > 1:
        raise ValueError(
            f"the layer has {' and '.join(given)}: it picks inside one mask or publishes one"
        )
    windows: dict[str, Any] = {"row_start": row_start, "row_end": row_end}
    scores = pin_tokens(
        scores=scores, **windows, init_tokens=init_tokens, local_tokens=local_tokens
    )
    inside = block_ids if mask is None else mask
    if inside is not None:
        order.pop("minus_inf", None)
        picks = masks.masked_topk(
            scores=scores, mask=inside, **windows, k=k, block_size=block_size, **order
        )
        return {"raw_indices": picks}
    chosen = {"raw_indices": topk.ragged_topk(scores=scores, **windows, k=k, **order)}
    if topk_blocks is not None:
        name = "mask" if form in {"bool", "packed"} else "block_ids"
        chosen[name] = masks.publish(
            scores=scores,
            **windows,
            topk_blocks=topk_blocks,
            form=form,
            rows=rows,
            nan=block_nan,
            block_size=block_size,
            **{key: order[key] for key in ("ties", "zero_sign") if key in order},
        )
    return chosen
