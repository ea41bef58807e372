"""Logits as published models make them: evidence for bounds, the bits of no kernel."""

import torch
from torch import Tensor

from refimpl import heads, mx, tensorcore
from refimpl.bits import E4M3
from refimpl.profiles import find
from refimpl.scaled import BLOCK_SCALED, accumulate_scaled
from refimpl.tensorcore import INSTRUCTIONS


def published_logits(
    *,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    arithmetic: str,
) -> Tensor:
    """Score every key for every query as a profile of `PUBLISHED` does.

    Args:
        q: e4m3 [T, H, D], or e2m1 as uint8 [T, H, D / 2].
        k: the same format, [L, D] or [L, D / 2].
        weights: [T, H].
        k_scale: fp32 [L], or ue8m0 as uint8 [L, D / 32].
        q_scale: uint8 [T, H, D / 32] where the keys have MX scales.
        arithmetic: a name in `PUBLISHED` with instructions.

    Returns:
        [T, L] of the profile's dtype.
    """
    profile = find(arithmetic)
    kind = E4M3 if q.dtype is E4M3 else mx.E2M1
    a = q.flatten(0, 1)
    if q_scale is None or k_scale is None:
        assert profile.instructions is not None  # noqa: S101 - a model has instructions
        acc = tensorcore.accumulate(a, k, instruction=INSTRUCTIONS[profile.instructions[kind]])
    else:
        assert profile.scaled is not None  # noqa: S101 - a model has instructions
        acc = accumulate_scaled(
            values(a),
            values(k),
            a_scale=mx.decode_ue8m0(q_scale.flatten(0, 1)),
            b_scale=mx.decode_ue8m0(k_scale),
            instruction=BLOCK_SCALED[profile.scaled[kind]],
        )
    acc = acc.view(*q.shape[:2], -1)
    last = None if q_scale is not None else k_scale
    return heads.reduce_packed(acc, weights, last, sums=profile.sums).to(profile.logits)


def values(x: Tensor) -> Tensor:
    """Read e4m3, bf16 or packed e2m1 as fp64, without scales."""
    return (mx.decode_e2m1(x) if x.dtype is torch.uint8 else x).to(torch.float64)
