"""The fused dot-add of tensor cores as a formula with parameters, and an exact fp32 `fma`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from refimpl.bits import E4M3, as_int

CANONICAL_NAN = 0x7FFFFFFF
_FP32_SIGNIFICAND = 24
FP32_MIN_EXPONENT = -126
_E8M13_MASK = -1 << 10
TILE_ROWS = 64
TILE_CELLS = {"cpu": 1 << 13}
DEVICE_TILE_CELLS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One kind of tensor-core step.

    Attributes:
        name: key in `INSTRUCTIONS`.
        k: products a step adds to its accumulator.
        fraction_bits: bits kept below the largest exponent of a step when addends are aligned.
        output: format of the accumulator between steps; both round toward zero.
        operand: dtype of the factors.
        group: products that are added exactly before they are aligned as one addend.
        min_exponent: exponent of the operand's smallest normal, which its subnormals share.
        status: `measured` on hardware or `published`.
        source: where the numbers come from.
    """

    name: str
    k: int
    fraction_bits: int
    output: Literal["e8m13", "fp32"]
    operand: torch.dtype
    min_exponent: int
    status: Literal["measured", "published"]
    source: str
    group: int = 1


INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        row.name: row
        for row in (
            Instruction(
                name="sm90.wgmma.e4m3",
                k=32,
                fraction_bits=13,
                output="e8m13",
                operand=E4M3,
                min_exponent=-6,
                status="measured",
                source="measured on an H200 (QGMMA 64xNx32)",
            ),
            Instruction(
                name="sm90.wgmma.bf16",
                k=16,
                fraction_bits=25,
                output="fp32",
                operand=torch.bfloat16,
                min_exponent=-126,
                status="measured",
                source="measured on an H200 (HGMMA 64xNx16)",
            ),
            Instruction(
                name="sm89.mma.e4m3",
                k=16,
                fraction_bits=13,
                output="e8m13",
                operand=E4M3,
                min_exponent=-6,
                status="published",
                source="MMA-Sim, arXiv 2511.10909",
            ),
            Instruction(
                name="sm100.f8f6f4.e4m3",
                k=32,
                fraction_bits=25,
                output="fp32",
                operand=E4M3,
                min_exponent=-6,
                status="published",
                source="MMA-Sim, arXiv 2511.10909",
            ),
        )
    }
)


def carrier(instruction: Instruction) -> torch.dtype:
    """Choose fp32 where every aligned addend and their sum fit into its significand, else fp64."""
    # A product's significand may reach 4, and k products and c are added.
    bits = instruction.fraction_bits + 2 + math.ceil(math.log2(instruction.k + 1))
    return torch.float32 if bits <= _FP32_SIGNIFICAND else torch.float64


def power(x: Tensor, *, min_exponent: int) -> Tensor:
    """Give 2^e(x) with e(x) = floor(log2|x|), at least `min_exponent`; 0 for 0, inf for NaN."""
    exponent_field = 0x7F800000 if x.dtype is torch.float32 else 0x7FF0000000000000
    bound = (as_int(x) & exponent_field).view(x.dtype).clamp(min=2.0**min_exponent)
    return torch.where(x == 0, 0.0, bound)


def product_powers(x: Tensor, y: Tensor, *, min_exponent: int) -> Tensor:
    """Give 2^(e(x) + e(y)), not renormalised: the significand's product may reach 4."""
    return power(x, min_exponent=min_exponent) * power(y, min_exponent=min_exponent)


def alignment(products: Tensor, c: Tensor) -> Tensor:
    """Give 2^E, E the largest exponent of the addends that are not zero; 1 where all are.

    Args:
        products: powers of the products, [..., k]; 0 where an operand is 0.
        c: power of the accumulator, [...].
    """
    top = torch.maximum(products.amax(-1), c)
    return torch.where(top == 0, 1.0, top)


def truncate(aligned: Tensor) -> Tensor:
    """Drop the bits of an aligned addend below the last kept one."""
    # The bits of aligned.trunc(), which torch does not vectorise on a CPU.
    return torch.div(aligned, 1, rounding_mode="trunc")


def round_output(x: Tensor, *, instruction: Instruction) -> Tensor:
    """Round a sum toward zero to the accumulator's format; fp32 bits."""
    y = x.to(torch.float32)
    if instruction.output == "e8m13":
        return (as_int(y) & _E8M13_MASK).view(torch.float32)
    beyond = y.to(torch.float64).abs() > x.abs()
    return torch.where(beyond, torch.nextafter(y, torch.zeros_like(y)), y)


def ieee_specials(total: Tensor, products: Tensor, c: Tensor) -> Tensor:
    """Where an addend is inf or NaN, put what IEEE 754 addition makes of them into `total`."""
    ieee = products.sum(-1) + c
    return torch.where(ieee.isfinite(), total, ieee)


def canonical_nan(x: Tensor) -> Tensor:
    """Give every fp32 NaN the bits 0x7FFFFFFF."""
    return torch.where(x.isnan(), CANONICAL_NAN, as_int(x)).view(torch.float32)


def dot_add(a: Tensor, b: Tensor, c: Tensor, *, instruction: Instruction) -> Tensor:
    """Add k products to an accumulator in one tensor-core step, to the bit.

    Every addend is aligned to the largest exponent E among the non-zero ones, truncated toward
    zero to `fraction_bits` below 2^E, summed exactly, and the sum is truncated to the output
    format (model of arXiv 2511.10909; measured on an H200 for the rows that say so).

    Args:
        a: [..., k], `instruction.operand`.
        b: the same, broadcast against `a`.
        c: fp32 [...], zero, NaN or an earlier output. With fp32 carriers |c| is at least 2^-100;
            the smallest accumulator of e4m3 operands is 2^-25.
        instruction: a row of `INSTRUCTIONS`.

    Returns:
        fp32 [...]. A sum of exactly 0 is +0; a NaN is 0x7FFFFFFF; a finite overflow stays at the
        largest finite value.
    """
    wide = carrier(instruction)
    x, y, z = a.to(wide), b.to(wide), c.to(wide)
    top = alignment(
        product_powers(x, y, min_exponent=instruction.min_exponent),
        power(z, min_exponent=FP32_MIN_EXPONENT),
    )
    scale = 2.0**instruction.fraction_bits / top
    total = truncate(x * y * scale.unsqueeze(-1)).sum(-1) + truncate(z * scale)
    result = (total + 0.0) / scale
    if instruction.operand is torch.bfloat16 and not all(t.isfinite().all() for t in (x, y, z)):
        result = ieee_specials(result, x * y, z)
    return canonical_nan(round_output(result, instruction=instruction))


def accumulate(a: Tensor, b: Tensor, *, instruction: Instruction) -> Tensor:
    """Chain D / k steps from c = 0: the accumulators of `a @ b.T`.

    Args:
        a: [M, D], `instruction.operand`.
        b: [N, D], the same dtype and device.
        instruction: a row of `INSTRUCTIONS`.

    Returns:
        fp32 [M, N]. Working memory stays below 32 MiB whatever M and N.

    Raises:
        ValueError: a dtype is not the instruction's, the widths differ, or D is no multiple of k.
    """
    check_operands(a, b, instruction=instruction)
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)
    cells = TILE_CELLS.get(a.device.type, DEVICE_TILE_CELLS)
    columns = cells // TILE_ROWS
    for i in range(0, a.shape[0], TILE_ROWS):
        for j in range(0, b.shape[0], columns):
            out[i : i + TILE_ROWS, j : j + columns] = _chain(
                a[i : i + TILE_ROWS], b[j : j + columns], instruction
            )
    return out


def _chain(a: Tensor, b: Tensor, instruction: Instruction) -> Tensor:
    c = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    for start in range(0, a.shape[1], instruction.k):
        step = slice(start, start + instruction.k)
        c = dot_add(a[:, None, step], b[None, :, step], c, instruction=instruction)
    return c


def check_operands(a: Tensor, b: Tensor, *, instruction: Instruction) -> None:
    """Raise a ValueError unless `a` [M, D] and `b` [N, D] fit the instruction."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype is not instruction.operand:
            raise ValueError(
                f"{name} is {x.dtype}: {instruction.name} multiplies {instruction.operand}"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has D {a.shape[1]} and b has D {b.shape[1]}: they must be equal")
    if a.shape[1] % instruction.k:
        raise ValueError(
            f"a has D {a.shape[1]}: {instruction.name} takes {instruction.k} products a step, "
            "and D must be a multiple of that"
        )


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Round a * b + c once, to nearest even, as a fused fp32 instruction does.

    a * b is exact in fp64. TwoSum gives the error of adding c there; where it is not zero the sum
    is rounded to odd, so that the rounding to fp32 is the only one that counts.

    Args:
        a: fp32.
        b: fp32, broadcast against `a`.
        c: fp32, broadcast against both.

    Returns:
        fp32. Where the sum is not finite, what IEEE 754 says; NaN bits are the device's own.
    """
    return _fused(a, b, c).to(torch.float32)


def fma_bf16(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Round a * b + c once to bf16, as a fused bf16 instruction does: bf16 in, bf16 out."""
    total = _fused(a, b, c)
    # fp64 goes to bf16 by way of fp32: rounded to odd there, only the last rounding counts.
    near = total.to(torch.float32)
    beyond = near.to(torch.float64).abs() > total.abs()
    near = torch.where(
        beyond & total.isfinite(), torch.nextafter(near, torch.zeros_like(near)), near
    )
    inexact = (near.to(torch.float64) != total) & total.isfinite()
    odd = torch.where(inexact, as_int(near) | 1, as_int(near)).view(torch.float32)
    return odd.to(torch.bfloat16)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Give a * b + c in fp64, rounded to odd; factors of at most 24 bits."""
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = as_int(total)
    inexact = (error != 0) & total.isfinite() & (bits & 1 == 0)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + toward, bits).view(torch.float64)
