"""Scores in fp64 with a bound on how far a kernel may lie from them, for every scoring op.

`refimpl.rounding` derives the bound.
"""

import torch
from torch import Tensor

from refimpl import mx, plans, tiles
from refimpl.bits import split_planar_pages
from refimpl.plans import Columns, Plan, expect
from refimpl.profiles import Profile, find
from refimpl.rounding import LEAST_EXPONENT, block, dot_of

_TILE = {"cpu": tiles.Tile(cells=1 << 17, columns=1 << 12)}
_DEVICE_TILE = tiles.Tile(cells=1 << 21, columns=1 << 15)


def scores_and_bound(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    weights: Tensor | None = None,
    arithmetic: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Score every key for every query, and bound how far a kernel may be off.

    Args:
        q: e4m3 or bf16 [T, H, D], or e2m1 as uint8 [T, H, D / 2].
        k: the same format, [L, D] or [L, D / 2].
        k_scale: fp32 [L], or ue8m0 as uint8 [L, D / 32]; None is 1.
        q_scale: uint8 [T, H, D / 32] where k_scale is ue8m0.
        weights: fp32 or bf16 [T, H]; None is 1.
        arithmetic: a name in `profiles.PROFILES` or `profiles.PUBLISHED`: what is known of the
            kernel. `exact` and `any_order.bf16` know nothing but what they round to.

    Returns:
        Scores and bound, fp64 [T, L]. A bound of inf says that nothing is known of a cell, one of 0
        that every kernel has exactly this score, up to the sign of 0.

    Raises:
        ValueError: dtypes, shapes or `arithmetic` do not fit, with both values.
    """
    profile = _checked(arithmetic, q, k, q_scale=q_scale, k_scale=k_scale, weights=weights)
    windows = [(0, k.shape[0])] * q.shape[0]
    part = plans.Part(
        rows=slice(0, q.shape[0]),
        windows=windows,
        keys=lambda c0, c1: (k[c0:c1], None if k_scale is None else k_scale[c0:c1]),
    )
    return _sweep(Plan(parts=[part], width=k.shape[0]), q, q_scale, weights, profile)


def mqa_bound(
    *,
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    q_scale: Tensor | None = None,
    columns: Columns = "absolute",
    width: int | None = None,
    arithmetic: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Score and bound what `scoring.mqa_logits` scores.

    Args:
        q: e4m3 [T, H, D], or e2m1 as uint8 [T, H, D / 2].
        k: the same format.
        k_scale: fp32 [L], or ue8m0 as uint8 [L, D / 32].
        weights: fp32 or bf16 [T, H].
        row_start: int32 [T].
        row_end: int32 [T].
        q_scale: uint8 [T, H, D / 32] where k_scale is ue8m0.
        columns: as in `mqa_logits`.
        width: as in `mqa_logits`.
        arithmetic: as in `scores_and_bound`.

    Returns:
        Scores and bound, fp64 [T, width]; outside the windows -inf and 0. Working memory stays
        below 64 MiB on a CPU.

    Raises:
        ValueError: something does not fit, with both values.
    """
    profile = _checked(arithmetic, q, k, q_scale=q_scale, k_scale=k_scale, weights=weights)
    plan = plans.dense_plan(k, k_scale, row_start, row_end, columns=columns, width=width)
    return _sweep(plan, q, q_scale, weights, profile)


def paged_mqa_bound(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    page_size: int = 64,
    q_scale: Tensor | None = None,
    arithmetic: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Score and bound what `scoring.paged_mqa_logits` scores.

    Args:
        q: e4m3 [B, next_n, H, D], or e2m1 as uint8 [B, next_n, H, D / 2].
        kv_cache: uint8 [pages, ...]: of each page all values in the format of q, then all scales,
            D / 32 bytes of ue8m0 a key with `q_scale` and one fp32 without.
        weights: fp32 or bf16 [B * next_n, H].
        context_lens: int32 [B, next_n].
        block_table: int32 [B, max_pages].
        page_size: keys a page.
        q_scale: uint8 [B, next_n, H, D / 32].
        arithmetic: as in `scores_and_bound`.

    Returns:
        Scores and bound, fp64 [B * next_n, max_pages * page_size]; past each length -inf and 0.

    Raises:
        ValueError: something does not fit, or a needed page is not in the cache.
    """
    head_dim = q.shape[-1] * (2 if q.dtype is torch.uint8 else 1)
    if q_scale is None:
        pages, scales = split_planar_pages(kv_cache, head_dim=head_dim, page_size=page_size)
    else:
        pages, scales = mx.split_pages(
            kv_cache, payload=q.shape[-1], scales=head_dim // mx.BLOCK, page_size=page_size
        )
        pages = pages.view(q.dtype)
        q_scale = q_scale.flatten(0, 1)
    rows = q.flatten(0, 1)
    profile = _checked(arithmetic, rows, pages, q_scale=q_scale, k_scale=scales, weights=weights)
    shape = q.shape[0], q.shape[1]
    plan = plans.paged_plan(pages, scales, context_lens, block_table, shape=shape)
    return _sweep(plan, rows, q_scale, weights, profile)


def qsa_bound(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None = None,
    page_size: int = 64,
    arithmetic: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Score and bound what `scoring.qsa_logits` scores, with its arguments.

    Returns:
        Scores and bound, fp64 [T, table_width * page_size]; from `visible_blocks` on -inf and 0.

    Raises:
        ValueError: something does not fit, or a needed page is not in the cache.
    """
    pages = k_cache.squeeze(2)
    profile = _checked(arithmetic, q, pages, q_scale=None, k_scale=None, weights=None)
    plan = plans.qsa_plan(
        pages, page_table, visible_blocks, query_start_loc, rows=len(q), page_size=page_size
    )
    return _sweep(plan, q, None, None, profile)


def _sweep(
    plan: Plan, q: Tensor, q_scale: Tensor | None, weights: Tensor | None, profile: Profile
) -> tuple[Tensor, Tensor]:
    tile = _TILE.get(q.device.type, _DEVICE_TILE)
    shape = q.shape[0], plan.width
    scores = torch.full(shape, float("-inf"), dtype=torch.float64, device=q.device)
    bounds = torch.zeros_like(scores)
    for part in plan.parts:
        mine = [None if x is None else x[part.rows] for x in (q, q_scale, weights)]
        for i, end, c0, c1 in tiles.cut(part.windows, head_count=q.shape[1], tile=tile):
            rows, scale, w = (None if x is None else x[i:end] for x in mine)
            assert rows is not None  # noqa: S101 - q is a tensor
            both = block(rows, scale, *part.keys(c0, c1), w, profile=profile)
            for out, cells in zip((scores, bounds), both, strict=True):
                tiles.place(out[part.rows], cells, part.windows, at=(i, c0), shift=part.shift)
    return scores, bounds


def _checked(
    arithmetic: str,
    q: Tensor,
    k: Tensor,
    *,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    weights: Tensor | None,
) -> Profile:
    """The profile, or a ValueError where it does not score such operands."""
    profile = find(arithmetic)
    if q.dtype is not k.dtype or q.shape[-1] != k.shape[-1] or q.dtype not in LEAST_EXPONENT:
        raise ValueError(
            f"q is {q.dtype} with {q.shape[-1]} a head and the keys are {k.dtype} with "
            f"{k.shape[-1]}: both are e4m3, bf16 or e2m1 (uint8), and equally wide"
        )
    width = q.shape[-1] * (2 if q.dtype is torch.uint8 else 1)
    if (q_scale is not None) != (k_scale is not None and k_scale.dtype is torch.uint8):
        raise ValueError("ue8m0 scales come with both q and k, or with neither")
    if q.dtype is torch.uint8 and q_scale is None:
        raise ValueError("q is e2m1 (uint8): it takes q_scale")
    if q_scale is not None:
        expect("q_scale", q_scale, torch.uint8, (*q.shape[:2], width // mx.BLOCK), "q")
    if k_scale is not None:
        more = () if q_scale is None else (width // mx.BLOCK,)
        dtype = torch.float32 if q_scale is None else torch.uint8
        expect("k_scale", k_scale, dtype, (*k.shape[:-1], *more), "k")
    if weights is not None:
        dtype = weights.dtype if weights.dtype is torch.bfloat16 else torch.float32
        expect("weights", weights, dtype, q.shape[:2], "q")
    kind = mx.E2M1 if q.dtype is torch.uint8 else q.dtype
    names = profile.instructions if q_scale is None else profile.scaled
    if profile.instructions is not None and (names is None or kind not in names):
        scales = "without scales" if q_scale is None else "with ue8m0 scales"
        raise ValueError(f"arithmetic is {arithmetic!r}, which takes no {kind} {scales}")
    step = dot_of(profile, q.dtype, scaled=q_scale is not None).k
    if width % step:
        raise ValueError(f"q has D {width}: {arithmetic} takes a multiple of {step}")
    lanes = {"quad": 8, "packed": 4, "pairs": 4, "fp64": 1}[profile.reduction]
    if q.shape[1] % lanes or (profile.reduction == "pairs" and q.shape[1] != lanes):
        raise ValueError(f"q has {q.shape[1]} heads: {arithmetic} takes a multiple of {lanes}")
    return profile
