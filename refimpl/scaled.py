"""Tensor-core steps whose operands come with MX scales, as published."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from refimpl.bits import E4M3
from refimpl.mx import E2M1
from refimpl.tensorcore import (
    DEVICE_TILE_CELLS,
    FP32_MIN_EXPONENT,
    TILE_CELLS,
    TILE_ROWS,
    Instruction,
    alignment,
    canonical_nan,
    power,
    product_powers,
    round_output,
    truncate,
)

_UE8M0_MIN_EXPONENT = -127

BLOCK_SCALED: Mapping[str, Instruction] = MappingProxyType(
    {
        row.name: row
        for row in (
            Instruction(
                name="sm100.mxf8f6f4.e4m3",
                k=32,
                fraction_bits=25,
                output="fp32",
                operand=E4M3,
                min_exponent=-6,
                status="published",
                source="MMA-Sim, arXiv 2511.10909: f8f6f4 with scale exponents",
            ),
            Instruction(
                name="sm100.mxf4nvf4.e2m1",
                k=64,
                group=16,
                fraction_bits=35,
                output="fp32",
                operand=E2M1,
                min_exponent=0,
                status="published",
                source="MMA-Sim, arXiv 2511.10909: groups with scale significands",
            ),
        )
    }
)
"""Steps whose operands come with scales; of none the bits are claimed."""


def dot_add_scaled(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    a_scale: Tensor,
    b_scale: Tensor,
    instruction: Instruction,
) -> Tensor:
    """Add k products of scaled operands to an accumulator in one step, as published.

    An addend is a product, or the exact sum of a group, times the significands of both scales; its
    exponent is that of the product, 0 for a group, plus those of both scales. The rest is `dot_add`
    (model of arXiv 2511.10909; no hardware was at hand, so its bits are not claimed).

    Args:
        a: fp64 [..., k], the values without their scales.
        b: the same, broadcast against `a`.
        c: fp32 [...], zero or an earlier output.
        a_scale: fp64 [..., n], n blocks of a step, each a number of whole groups.
        b_scale: the same of `b`.
        instruction: a row of `BLOCK_SCALED`.

    Returns:
        fp32 [...], with the zeros, NaNs and overflows of `dot_add`.
    """
    products = a * b
    products = products.view(*products.shape[:-1], -1, instruction.group).sum(-1)
    each = products.shape[-1] // a_scale.shape[-1]
    scales = (a_scale * b_scale).repeat_interleave(each, -1)
    powers = product_powers(a_scale, b_scale, min_exponent=_UE8M0_MIN_EXPONENT)
    powers = powers.repeat_interleave(each, -1)
    if instruction.group == 1:
        powers = powers * product_powers(a, b, min_exponent=instruction.min_exponent)
    z = c.to(torch.float64)
    top = alignment(
        torch.where(products == 0, 0.0, powers), power(z, min_exponent=FP32_MIN_EXPONENT)
    )
    unit = top / 2.0**instruction.fraction_bits
    total = truncate(products * scales / unit.unsqueeze(-1)).sum(-1) + truncate(z / unit)
    return canonical_nan(round_output((total + 0.0) * unit, instruction=instruction))


def accumulate_scaled(
    a: Tensor, b: Tensor, *, a_scale: Tensor, b_scale: Tensor, instruction: Instruction
) -> Tensor:
    """Chain D / k steps of scaled operands from c = 0.

    Args:
        a: [M, D], values without their scales, any float dtype.
        b: [N, D].
        a_scale: [M, D / block], any float dtype.
        b_scale: [N, D / block].
        instruction: a row of `BLOCK_SCALED`; D is a multiple of its k.

    Returns:
        fp32 [M, N].
    """
    x, y, p, q = (t.to(torch.float64) for t in (a, b, a_scale, b_scale))
    steps = a.shape[1] // instruction.k
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)
    columns = TILE_CELLS.get(a.device.type, DEVICE_TILE_CELLS) // TILE_ROWS
    for i in range(0, a.shape[0], TILE_ROWS):
        for j in range(0, b.shape[0], columns):
            m, n = slice(i, i + TILE_ROWS), slice(j, j + columns)
            c = torch.zeros_like(out[m, n])
            for step in range(steps):
                left, right, left_scale, right_scale = (
                    t.reshape(len(t), steps, -1)[:, step] for t in (x[m], y[n], p[m], q[n])
                )
                c = dot_add_scaled(
                    left[:, None],
                    right[None],
                    c,
                    a_scale=left_scale[:, None],
                    b_scale=right_scale[None],
                    instruction=instruction,
                )
            out[m, n] = c
    return out
