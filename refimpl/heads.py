"""Sums over the heads of a query, in the order and with the roundings of the kernels."""

from typing import Literal

import torch
from torch import Tensor

from refimpl.tensorcore import fma, fma_bf16


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


def packed_heads(heads: int) -> list[list[int]]:
    """List the heads of each packed lane, [4][heads / 4]: 4 g + c."""
    return [[4 * g + c for g in range(heads // 4)] for c in range(4)]


def reduce_packed(
    acc: Tensor, weights: Tensor, k_scale: Tensor | None, *, sums: torch.dtype
) -> Tensor:
    """Sum heads as one thread a key does in DeepGEMM sm100_mqa_logits, as published.

    Lane c takes heads 4 n + c; lanes 0 and 2, 1 and 3, then both are added. In fp32 ReLU is
    x + |x|, halved at the end, which keeps a NaN; in bf16 each head is rounded first.

    Args:
        acc: fp32 [..., H, n], H a multiple of 4.
        weights: [..., H]; of bf16 sums bf16.
        k_scale: fp32 [n]; None where the step has folded it in.
        sums: fp32 or bf16.

    Returns:
        fp32 [..., n], of bf16 sums without a scale bf16 values.
    """
    lanes = torch.tensor(packed_heads(acc.shape[-2]), device=acc.device)
    wide = sums is torch.float32
    r = (acc + acc.abs() if wide else acc.clamp(min=0).to(sums))[..., lanes, :]
    w = weights.to(sums)[..., lanes, None]
    fused = fma if wide else fma_bf16
    s = torch.zeros_like(r[..., 0, :])
    for g in range(lanes.shape[1]):
        s = fused(r[..., g, :], w[..., g, :], s)
    pair = s[..., :2, :] + s[..., 2:, :]
    total = (pair[..., 0, :] + pair[..., 1, :]).to(torch.float32)
    total = total / 2 if wide else total
    return total if k_scale is None else total * k_scale


def reduce_exact(acc: Tensor, weights: Tensor | None, k_scale: Tensor | None) -> Tensor:
    """Sum heads 0 .. H-1 one by one in fp64, fp64 [..., H, n] to fp32 [..., n], rounded once."""
    r = relu(acc)
    w = r.new_ones(r.shape[:-1]) if weights is None else weights.to(torch.float64)
    total = w[..., 0, None] * r[..., 0, :]
    for h in range(1, r.shape[-2]):
        total = total + w[..., h, None] * r[..., h, :]
    scaled = total if k_scale is None else total * k_scale.to(torch.float64)
    return scaled.to(torch.float32)
