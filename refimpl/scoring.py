"""Indexer logits to the bit: DeepGEMM dense and paged, vLLM QSA prefill, and exact in fp64."""

import torch
from torch import Tensor

from refimpl import tensorcore
from refimpl.bits import E4M3, split_planar_pages
from refimpl.plans import Columns, Plan, dense_plan, expect, paged_plan, qsa_plan
from refimpl.profiles import PROFILES, Profile
from refimpl.tensorcore import INSTRUCTIONS
from refimpl.tiles import Accumulate, fill

__all__ = [
    "PROFILES",
    "Accumulate",
    "Columns",
    "Profile",
    "mqa_logits",
    "paged_mqa_logits",
    "qsa_logits",
]

_QSA_HEADS = 4


def mqa_logits(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    columns: Columns = "absolute",
    width: int | None = None,
    arithmetic: str = "deep_gemm.sm90",
    accumulate: Accumulate = tensorcore.accumulate,
) -> Tensor:
    """Score keys for queries: sum over heads of weight * relu(q . k), times the key's scale.

    DeepGEMM `fp8_mqa_logits`; `deep_gemm.sm90` gives its bits (measured on an H200).
    Beside the result it needs at most 64 MiB.

    Args:
        q: e4m3 [T, H, D].
        k: e4m3 [L, D].
        k_scale: fp32 [L].
        weights: fp32 [T, H], every other factor folded in.
        row_start: int32 [T], first column of a row's window.
        row_end: int32 [T], one past its last; a backward or negative window counts as empty, and
            columns past L do not exist.
        columns: `absolute`: cell j is column j; `row-relative`: cell j is column row_start + j.
        width: cells of a result row; L where it is None.
        arithmetic: a name in `PROFILES` with fp32 weights.
        accumulate: the chain, a function with the bits of `tensorcore.accumulate`.

    Returns:
        fp32 [T, width]; -inf outside the windows, every NaN 0x7FFFFFFF.

    Raises:
        ValueError: dtypes, shapes, H, D, `width` or `arithmetic` do not fit, with both values.
    """
    profile = _profile(arithmetic, q, k, weighted=True)
    expect("weights", weights, torch.float32, q.shape[:2], "q")
    expect("k_scale", k_scale, torch.float32, k.shape[:1], "k")
    expect("row_start", row_start, torch.int32, q.shape[:1], "q")
    expect("row_end", row_end, torch.int32, q.shape[:1], "q")
    plan = dense_plan(k, k_scale, row_start, row_end, columns=columns, width=width)
    return _logits(plan, q, weights, profile=profile, accumulate=accumulate)


def paged_mqa_logits(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    page_size: int = 64,
    arithmetic: str = "deep_gemm.sm90",
    accumulate: Accumulate = tensorcore.accumulate,
) -> Tensor:
    """Score the keys of paged requests: `mqa_logits` of each request against its own pages.

    DeepGEMM `fp8_paged_mqa_logits`; the bits are those of the dense kernel (measured on an H200).

    Args:
        q: e4m3 [B, next_n, H, D].
        kv_cache: uint8 [pages, page_size * (D + 4)] or [pages, page_size, 1, D + 4]: of each page
            all values, then all fp32 scales.
        weights: fp32 [B * next_n, H].
        context_lens: int32 [B, next_n], visible keys; a negative length counts as 0.
        block_table: int32 [B, max_pages].
        page_size: keys a page.
        arithmetic: a name in `PROFILES` with fp32 weights.
        accumulate: as in `mqa_logits`.

    Returns:
        fp32 [B * next_n, max_pages * page_size]; -inf past each length.

    Raises:
        ValueError: shapes or dtypes do not fit, or a needed page is not in the cache.
    """
    batch, next_n, head_count, head_dim = q.shape
    values, scales = split_planar_pages(kv_cache, head_dim=head_dim, page_size=page_size)
    rows = q.flatten(0, 1)
    profile = _profile(arithmetic, rows, values, weighted=True)
    expect("weights", weights, torch.float32, (batch * next_n, head_count), "q")
    plan = paged_plan(values, scales, context_lens, block_table, shape=(batch, next_n))
    return _logits(plan, rows, weights, profile=profile, accumulate=accumulate)


def qsa_logits(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None = None,
    page_size: int = 64,
    arithmetic: str = "vllm_qsa_prefill.sm90",
    accumulate: Accumulate = tensorcore.accumulate,
) -> Tensor:
    """Score compressed keys for queries of 4 heads: the sum of relu(q . k), no weight, no scale.

    vLLM QSA prefill logits; `vllm_qsa_prefill.sm90` gives its bits (measured on an H200).

    Args:
        q: bf16 or e4m3 [T, 4, D].
        k_cache: the dtype of q, [pages, page_size, 1, D].
        page_table: int32 [R, table_width], the pages of each request.
        visible_blocks: int32 [T], keys a row may see; a negative number counts as 0.
        query_start_loc: int32 [R + 1], first row of each request; None where R is 1.
        page_size: keys a page.
        arithmetic: a name in `PROFILES` without weights.
        accumulate: as in `mqa_logits`.

    Returns:
        fp32 [T, table_width * page_size]; -inf from `visible_blocks` on.

    Raises:
        ValueError: shapes or dtypes do not fit, or a needed page is not in the cache.
    """
    values = k_cache.squeeze(2)
    profile = _profile(arithmetic, q, values, weighted=False)
    plan = qsa_plan(
        values,
        page_table,
        visible_blocks,
        query_start_loc,
        rows=q.shape[0],
        page_size=page_size,
    )
    return _logits(plan, q, None, profile=profile, accumulate=accumulate)


def _logits(
    plan: Plan,
    q: Tensor,
    weights: Tensor | None,
    *,
    profile: Profile,
    accumulate: Accumulate,
) -> Tensor:
    out = _unscored(q.shape[0], plan.width, q)
    for part in plan.parts:
        fill(
            out[part.rows],
            q[part.rows],
            None if weights is None else weights[part.rows],
            part.windows,
            part.keys,
            shift=part.shift,
            profile=profile,
            accumulate=accumulate,
        )
    return out


def _unscored(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.full((rows, columns), float("-inf"), dtype=torch.float32, device=like.device)


def _profile(arithmetic: str, q: Tensor, k: Tensor, *, weighted: bool) -> Profile:
    if arithmetic not in PROFILES:
        raise ValueError(f"arithmetic is {arithmetic!r}: known are {', '.join(PROFILES)}")
    profile = PROFILES[arithmetic]
    if profile.reduction == ("pairs" if weighted else "quad"):
        kind = "mqa logits" if weighted else "qsa logits"
        raise ValueError(f"arithmetic is {arithmetic!r}, which computes no {kind}")
    head_count, head_dim = q.shape[-2:]
    if q.dtype is not k.dtype or head_dim != k.shape[-1]:
        raise ValueError(
            f"q is {q.dtype} with D {head_dim} and the keys are {k.dtype} with D {k.shape[-1]}"
        )
    if q.dtype is not E4M3 and (weighted or q.dtype is not torch.bfloat16):
        raise ValueError(f"q is {q.dtype}: it is e4m3{'' if weighted else ' or bf16'}")
    if not weighted and head_count != _QSA_HEADS:
        raise ValueError(f"q has {head_count} heads: qsa logits have {_QSA_HEADS}")
    if profile.reduction == "quad" and (head_count % 8 or head_count < 16):  # noqa: PLR2004 - two places a lane
        raise ValueError(
            f"q has {head_count} heads: {arithmetic} takes a multiple of 8, at least 16"
        )
    if profile.instructions is not None:
        step = INSTRUCTIONS[profile.instructions[q.dtype]].k
        if head_dim % step:
            raise ValueError(f"q has D {head_dim}: {arithmetic} takes a multiple of {step}")
    return profile
