"""Indexer logits to the bit: DeepGEMM dense and paged, vLLM QSA prefill, and exact in fp64."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from refimpl import tensorcore
from refimpl.bits import E4M3, split_planar_pages
from refimpl.profiles import PROFILES, Profile
from refimpl.tensorcore import INSTRUCTIONS
from refimpl.tiles import Accumulate, Keys, clip_windows, fill

__all__ = ["PROFILES", "Accumulate", "Profile", "mqa_logits", "paged_mqa_logits", "qsa_logits"]

_QSA_HEADS = 4

Columns = Literal["absolute", "row-relative"]


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
    _expect("weights", weights, torch.float32, q.shape[:2], "q")
    _expect("k_scale", k_scale, torch.float32, k.shape[:1], "k")
    _expect("row_start", row_start, torch.int32, q.shape[:1], "q")
    _expect("row_end", row_end, torch.int32, q.shape[:1], "q")
    if columns not in {"absolute", "row-relative"}:
        raise ValueError(f"columns is {columns!r}: it is 'absolute' or 'row-relative'")
    windows = clip_windows(row_start, row_end, k.shape[0])
    shift = [start if columns == "row-relative" else 0 for start, _ in windows]
    cells = k.shape[0] if width is None else width
    needed = max((end - base for (_, end), base in zip(windows, shift, strict=True)), default=0)
    if needed > cells:
        raise ValueError(f"width is {cells}: the {columns} windows need {needed} cells")
    out = _unscored(q.shape[0], cells, q)
    fill(
        out,
        q,
        weights,
        windows,
        lambda c0, c1: (k[c0:c1], k_scale[c0:c1]),
        shift=shift,
        profile=profile,
        accumulate=accumulate,
    )
    return out


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
    _expect("weights", weights, torch.float32, (batch * next_n, head_count), "q")
    _expect("context_lens", context_lens, torch.int32, (batch, next_n), "q")
    _expect("block_table", block_table, torch.int32, (batch, block_table.shape[-1]), "q")
    columns = block_table.shape[1] * page_size
    out = _unscored(batch * next_n, columns, q)
    for request in range(batch):
        mine = slice(request * next_n, (request + 1) * next_n)
        lens = context_lens[request]
        fill(
            out[mine],
            rows[mine],
            weights[mine],
            clip_windows(torch.zeros_like(lens), lens, columns),
            _paged_keys(values, scales, block_table[request], "block_table"),
            profile=profile,
            accumulate=accumulate,
        )
    return out


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
    if values.shape[1] != page_size:
        raise ValueError(f"k_cache has {values.shape[1]} keys a page and page_size is {page_size}")
    _expect("visible_blocks", visible_blocks, torch.int32, q.shape[:1], "q")
    bounds = [0, q.shape[0]] if query_start_loc is None else query_start_loc.tolist()
    if len(bounds) != page_table.shape[0] + 1 or bounds[0] != 0 or bounds[-1] != q.shape[0]:
        raise ValueError(
            f"query_start_loc is {bounds}: page_table has {page_table.shape[0]} requests and q "
            f"{q.shape[0]} rows, so it takes one more entry than requests, from 0 to the rows"
        )
    columns = page_table.shape[1] * page_size
    out = _unscored(q.shape[0], columns, q)
    for request in range(page_table.shape[0]):
        mine = slice(bounds[request], bounds[request + 1])
        visible = visible_blocks[mine]
        fill(
            out[mine],
            q[mine],
            None,
            clip_windows(torch.zeros_like(visible), visible, columns),
            _paged_keys(values, None, page_table[request], "page_table"),
            profile=profile,
            accumulate=accumulate,
        )
    return out


def _paged_keys(values: Tensor, scales: Tensor | None, table: Tensor, name: str) -> Keys:
    pages, page_size = values.shape[:2]

    def keys(c0: int, c1: int) -> tuple[Tensor, Tensor | None]:
        first = c0 // page_size
        wanted = table[first : -(-c1 // page_size)].long()
        strange = wanted[(wanted < 0) | (wanted >= pages)]
        if strange.numel():
            raise ValueError(
                f"{name} has page {int(strange[0])} inside a window: the cache has {pages} pages"
            )
        inside = slice(c0 - first * page_size, c1 - first * page_size)
        # fp8 has no index_select on every device: gather its bytes.
        rows = values.view(torch.uint8)[wanted].view(values.dtype).flatten(0, 1)[inside]
        return rows, None if scales is None else scales[wanted].flatten()[inside]

    return keys


def _unscored(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.full((rows, columns), float("-inf"), dtype=torch.float32, device=like.device)


def _expect(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], of: str) -> None:
    if x.dtype is not dtype or tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)}: {of} makes it {dtype} {list(shape)}"
        )


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
