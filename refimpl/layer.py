"""A whole indexer layer: scoring, masks, top-k, pages; for prefill (dense K) and decode (paged K).

Ratio and family of a layer are in its inputs: the windows are those of `geometry`, masks and
pinned tokens those of `selection`.
"""

from typing import Any

import torch
from torch import Tensor

from refimpl import blocks, pages, scoring, selection
from refimpl.tensorcore import accumulate as exact_accumulate


def prefill_picks(
    *,
    logits: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    k: int,
    columns: scoring.Columns = "absolute",
    page_table: Tensor | None = None,
    row_to_request: Tensor | None = None,
    slot_map: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    page_size: int = 1,
    **rule: Any,  # noqa: ANN401 - masks and freedoms of selection.select, passed on by name
) -> dict[str, Tensor]:
    """Picks of a batch from its logits [T, L], in every form the inputs allow.

    Args:
        logits: [T, L] fp32, bf16 or fp16; `columns` says whether column 0 is column 0 of the
            concatenated K ("absolute") or the row's start ("row-relative").
        row_start: [T] int32.
        row_end: [T] int32.
        k: picks a row.
        columns: see logits.
        page_table: [R, pages] int32 gives `page_indices` of request-local columns.
        row_to_request: [T] int32.
        slot_map: [L] gives `page_indices` of absolute columns.
        topk_indices_offset: [T] int32 gives `ragged_indices`.
        page_size: keys a page of page_table.
        rule: what else `selection.select` takes: masks, pinned tokens, order and ties.

    Returns:
        raw_indices [T, k] int32 relative to row_start; ragged_indices and page_indices likewise;
        mask or block_ids of a source layer.
    """
    relative = columns == "row-relative"
    picks = selection.select(
        scores=logits,
        row_start=torch.zeros_like(row_start) if relative else row_start,
        row_end=row_end - row_start if relative else row_end,
        k=k,
        **rule,
    )
    raw = picks["raw_indices"]
    if topk_indices_offset is not None:
        picks["ragged_indices"] = pages.offset_indices(
            raw_indices=raw, topk_indices_offset=topk_indices_offset
        )
    if page_table is not None:
        picks["page_indices"] = pages.translate_pages(
            raw_indices=raw,
            page_table=page_table,
            page_size=page_size,
            row_to_request=row_to_request,
        )
    elif slot_map is not None:
        picks["page_indices"] = pages.map_slots(
            raw_indices=raw, row_start=row_start, slot_map=slot_map
        )
    return picks


def prefill_indexer(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    topk: int,
    columns: scoring.Columns = "absolute",
    width: int | None = None,
    block_table: Tensor | None = None,
    row_to_request: Tensor | None = None,
    k_slots: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    page_size: int = 64,
    score_end: Tensor | None = None,
    arithmetic: str = "deep_gemm.sm90",
    accumulate: scoring.Accumulate = exact_accumulate,
    **rule: Any,  # noqa: ANN401 - masks and freedoms of selection.select, passed on by name
) -> dict[str, Tensor]:
    """The dense layer: `scoring.mqa_logits`, then `prefill_picks`; shapes and errors are theirs.

    Logits are computed up to `score_end`, int32 [T], and selected up to row_end: see
    `geometry.score_ends`. A row for which the two differ is one that is chosen unread.

    Returns:
        logits [T, L] fp32 and the picks.

    Raises:
        ValueError: a row selects by scores that are not computed.
    """
    if score_end is not None:
        _expect_unread(row_start, row_end, score_end, topk, rule)
    logits = scoring.mqa_logits(
        q=q,
        k=k,
        k_scale=k_scale,
        weights=weights,
        row_start=row_start,
        row_end=row_end if score_end is None else score_end,
        columns=columns,
        width=width,
        arithmetic=arithmetic,
        accumulate=accumulate,
    )
    picks = prefill_picks(
        logits=logits,
        row_start=row_start,
        row_end=row_end,
        k=topk,
        columns=columns,
        page_table=block_table,
        row_to_request=row_to_request,
        slot_map=k_slots,
        topk_indices_offset=topk_indices_offset,
        page_size=page_size,
        **rule,
    )
    return {"logits": logits} | picks


def decode_picks(
    *,
    logits: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    k: int,
    page_size: int = 64,
    **rule: Any,  # noqa: ANN401 - masks and freedoms of selection.select, passed on by name
) -> dict[str, Tensor]:
    """Picks of decode rows from logits [B * next_n, columns]; row b * next_n + i is request b.

    Engines that clamp decode lengths to 1 pick column 0 of an empty row: `empty_rows="first"`.

    Returns:
        raw_indices [B * next_n, k] int32, request-local, and page_indices, physical slots;
        mask or block_ids of a source layer.
    """
    requests, next_n = context_lens.shape
    row_end = context_lens.reshape(-1)
    picks = selection.select(
        scores=logits, row_start=torch.zeros_like(row_end), row_end=row_end, k=k, **rule
    )
    raw = picks["raw_indices"]
    request = torch.arange(requests, device=raw.device).repeat_interleave(next_n)
    slots = pages.translate_pages(
        raw_indices=raw, page_table=block_table, page_size=page_size, row_to_request=request
    )
    return picks | {"page_indices": slots}


def decode_indexer(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    page_size: int = 64,
    arithmetic: str = "deep_gemm.sm90",
    accumulate: scoring.Accumulate = exact_accumulate,
    **rule: Any,  # noqa: ANN401 - masks and freedoms of selection.select, passed on by name
) -> dict[str, Tensor]:
    """The paged layer: `scoring.paged_mqa_logits`, then `decode_picks`; shapes are theirs.

    Returns:
        logits [B * next_n, max_pages * page_size] fp32 and the picks.
    """
    logits = scoring.paged_mqa_logits(
        q=q,
        kv_cache=kv_cache,
        weights=weights,
        context_lens=context_lens,
        block_table=block_table,
        page_size=page_size,
        arithmetic=arithmetic,
        accumulate=accumulate,
    )
    picks = decode_picks(
        logits=logits,
        context_lens=context_lens,
        block_table=block_table,
        k=topk,
        page_size=page_size,
        **rule,
    )
    return {"logits": logits} | picks


def _expect_unread(
    row_start: Tensor, row_end: Tensor, score_end: Tensor, k: int, rule: dict[str, Any]
) -> None:
    """Every row whose scores are cut short is an identity, of columns and of blocks."""
    visible = (row_end - row_start).clamp(min=0)
    fixed = visible <= (k if rule.get("short_rows", "identity") == "identity" else 0)
    if rule.get("topk_blocks") is not None:
        size = rule.get("block_size", blocks.BLOCK)
        fixed &= blocks.block_counts(visible=visible, block_size=size) <= rule["topk_blocks"]
    wrong = (score_end < row_end) & ~fixed
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row} is scored up to column {int(score_end[row])} and selects up to "
            f"{int(row_end[row])}: only a row that is chosen unread may lack scores"
        )
