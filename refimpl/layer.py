"""A whole DSA indexer layer: scoring, top-k, pages; for prefill (dense K) and decode (paged K)."""

from typing import Any

import torch
from torch import Tensor

from refimpl import pages, scoring, topk
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
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
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
        order: how `topk.ragged_topk` orders and breaks ties.

    Returns:
        raw_indices [T, k] int32 relative to row_start; ragged_indices and page_indices likewise.
    """
    relative = columns == "row-relative"
    raw = topk.ragged_topk(
        scores=logits,
        row_start=torch.zeros_like(row_start) if relative else row_start,
        row_end=row_end - row_start if relative else row_end,
        k=k,
        **order,
    )
    picks = {"raw_indices": raw}
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
    arithmetic: str = "deep_gemm.sm90",
    accumulate: scoring.Accumulate = exact_accumulate,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """The dense layer: `scoring.mqa_logits`, then `prefill_picks`; shapes and errors are theirs.

    Returns:
        logits [T, L] fp32 and the picks.
    """
    logits = scoring.mqa_logits(
        q=q,
        k=k,
        k_scale=k_scale,
        weights=weights,
        row_start=row_start,
        row_end=row_end,
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
        **order,
    )
    return {"logits": logits} | picks


def decode_picks(
    *,
    logits: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    k: int,
    page_size: int = 64,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """Picks of decode rows from logits [B * next_n, columns]; row b * next_n + i is request b.

    Returns:
        raw_indices [B * next_n, k] int32, request-local, and page_indices, physical slots.
    """
    requests, next_n = context_lens.shape
    row_end = context_lens.reshape(-1)
    raw = topk.ragged_topk(
        scores=logits, row_start=torch.zeros_like(row_end), row_end=row_end, k=k, **order
    )
    request = torch.arange(requests, device=raw.device).repeat_interleave(next_n)
    slots = pages.translate_pages(
        raw_indices=raw, page_table=block_table, page_size=page_size, row_to_request=request
    )
    return {"raw_indices": raw, "page_indices": slots}


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
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
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
        **order,
    )
    return {"logits": logits} | picks
