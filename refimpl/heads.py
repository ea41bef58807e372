"""Sums over the heads of a query, in the order and with the roundings of the kernels."""

from typing import Literal

import torch
from torch import Tensor

from refimpl.tensorcore import fma


def relu(acc: Tensor) -> Tensor:
    """Keep what is greater than 0; -0 and NaN become +0, as the kernels' comparison makes them."""
    return torch.where(acc > 0, acc, 0.0)


def quad_heads(heads: int) -> list[list[list[int]]]:
    """List the heads that each lane c of a quad sums, [4][2][heads / 8]: 8 g + 2 c + b."""
    return [[[8 * g + 2 * c + b for g in range(heads // 8)] for b in (0, 1)] for c in range(4)]


def fused_order(length: int, *, rounded: int) -> list[int]:
    """List the places of a lane's sum in the order in which their products are fused onto it."""
    return [g for g in range(length) if g != rounded]


def lane_sums(r: Tensor, w: Tensor, *, rounded: int) -> Tensor:
    """Sum w * r over the places of each lane: one product rounded, the others fused onto it.

    Args:
        r: fp32 [..., 4, 2, G, n].
        w: fp32 [..., 4, 2, G, 1].
        rounded: the place whose product starts the sum.

    Returns:
        fp32 [..., 4, 2, n].
    """
    s = w[..., rounded, :] * r[..., rounded, :]
    for g in fused_order(r.shape[-2], rounded=rounded):
        s = fma(w[..., g, :], r[..., g, :], s)
    return s


def add_lanes(v: Tensor) -> Tensor:
    """Add the four lanes of a quad, fp32 [..., 4, n]: (0 + 1) + (2 + 3)."""
    return (v[..., 0, :] + v[..., 1, :]) + (v[..., 2, :] + v[..., 3, :])


def reduce_quad(
    acc: Tensor, weights: Tensor, k_scale: Tensor, *, rounded: int, scale: Literal["lane", "sum"]
) -> Tensor:
    """Sum heads as a quad of threads does in DeepGEMM sm90_fp8_mqa_logits.

    Args:
        acc: fp32 [..., H, n], H a multiple of 8 and at least 16.
        weights: fp32 [..., H].
        k_scale: fp32 [n].
        rounded: the place of a lane's sum whose product is rounded by itself.
        scale: multiply each `lane` with k_scale before the lanes are added, or their `sum`.

    Returns:
        fp32 [..., n].
    """
    heads = torch.tensor(quad_heads(acc.shape[-2]), device=acc.device)
    r = relu(acc)[..., heads, :]
    s = lane_sums(r, weights[..., heads, None], rounded=rounded)
    v = s[..., 0, :] + s[..., 1, :]
    if scale == "lane":
        return add_lanes(v * k_scale)
    return add_lanes(v) * k_scale


def reduce_exact(acc: Tensor, weights: Tensor | None, k_scale: Tensor | None) -> Tensor:
    """Sum heads 0 .. H-1 one by one in fp64, fp64 [..., H, n] to fp32 [..., n], rounded once."""
    r = relu(acc)
    w = r.new_ones(r.shape[:-1]) if weights is None else weights.to(torch.float64)
    total = w[..., 0, None] * r[..., 0, :]
    for h in range(1, r.shape[-2]):
        total = total + w[..., h, None] * r[..., h, :]
    scaled = total if k_scale is None else total * k_scale.to(torch.float64)
    return scaled.to(torch.float32)
