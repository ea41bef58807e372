"""The twin of MX formats: scalar and slow, from the published definitions, in exact fractions.

Like `twin`, it shares nothing with refimpl. An e2m1 value is a code of 4 bits, a scale a byte.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import twin

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sign, two bits of exponent with bias 1, one of mantissa; exponent 0 is subnormal.
MAGNITUDES = [
    Fraction(m, 2) if e == 0 else Fraction(2 + m, 2) * 2 ** (e - 1)
    for e in range(4)
    for m in (0, 1)
]
BLOCK = 32
NAN = 255


def value(code: int) -> Fraction:
    """What a code stands for."""
    return MAGNITUDES[code & 7] * (-1 if code & 8 else 1)


def codes(payload: Sequence[int]) -> list[int]:
    """Two codes a byte, the low nibble first."""
    return [code for byte in payload for code in (byte & 15, byte >> 4)]


def scale(byte: int) -> Fraction:
    """A power of two."""
    return Fraction(2) ** (byte - 127)


def fp32_of(code: int, byte: int) -> int:
    """The fp32 bits of a code under a scale."""
    if byte == NAN:
        return twin.NAN
    sign = twin.MINUS_ZERO if code & 8 else 0
    return sign | twin.to_f32_bits(abs(value(code)) * scale(byte))


def dequantize(payload: Sequence[int], scales: Sequence[int]) -> list[int]:
    """The fp32 bits of a row."""
    return [fp32_of(code, scales[i // BLOCK]) for i, code in enumerate(codes(payload))]


def nearest(size: Fraction) -> int:
    """The code of the nearest magnitude; a tie goes to the code whose mantissa bit is 0."""
    gaps = [abs(size - m) for m in MAGNITUDES]
    return min((c for c in range(8) if gaps[c] == min(gaps)), key=lambda c: c & 1)


def encode(bits: int, by: Fraction = Fraction(1)) -> int:
    """The code of an fp32 divided by a scale."""
    return nearest(abs(twin.decode_f32(bits).value) / by) | (bits >> 31) << 3


def scale_byte(amax: Fraction, floor: Fraction) -> int:
    """The smallest power of two that brings the block's largest, or the floor, to at most 6."""
    wanted = max(amax, floor) / 6
    below = _log2(wanted)
    return 127 + below + (Fraction(2) ** below < wanted)


def quantize(row: Sequence[int], floor: Fraction) -> tuple[list[int], list[int]]:
    """Payload and scales of fp32 bits."""
    payload: list[int] = []
    scales: list[int] = []
    for at in range(0, len(row), BLOCK):
        block = row[at : at + BLOCK]
        scales.append(scale_byte(max(abs(twin.decode_f32(b).value) for b in block), floor))
        found = [encode(bits, scale(scales[-1])) for bits in block]
        payload += [low | high << 4 for low, high in list(pairwise(found))[::2]]
    return payload, scales


def chain(
    a: Sequence[tuple[Fraction, int, Fraction]],
    b: Sequence[tuple[Fraction, int, Fraction]],
    *,
    k: int,
    group: int,
    fraction_bits: int,
) -> int:
    """A chain of scaled steps, fp32 bits; an operand is (value, its exponent, its scale)."""
    c = twin.PLUS_ZERO
    for start in range(0, len(a), k):
        addends = []
        for at in range(start, start + k, group):
            pairs = list(zip(a[at : at + group], b[at : at + group], strict=True))
            (_, x_exponent, x_scale), (_, y_exponent, y_scale) = pairs[0]
            total = sum(x * y for (x, _, _), (y, _, _) in pairs)
            exponent = _log2(x_scale) + _log2(y_scale)
            if group == 1:
                exponent += x_exponent + y_exponent
            addends.append((exponent, total * x_scale * y_scale))
        number = twin.decode_f32(c)
        if number.significand:
            addends.append((max(_log2(abs(number.value)), -126), number.value))
        addends = [(e, v) for e, v in addends if v]
        if not addends:
            c = twin.PLUS_ZERO
            continue
        unit = Fraction(2) ** (max(e for e, _ in addends) - fraction_bits)
        c = twin.truncate_to_f32_bits(sum(int(v / unit) for _, v in addends) * unit)
    return c


def to_bf16_bits(number: Fraction) -> int:
    """The nearest bf16, ties to even; exact zero gives +0, and past the largest it is inf."""
    if not number:
        return 0
    exponent = max(_log2(abs(number)), twin.F32_MIN_EXPONENT)
    significand = round(abs(number) / Fraction(2) ** (exponent - 7))
    bits = (exponent - twin.F32_MIN_EXPONENT << 7) + significand
    return (0x8000 if number < 0 else 0) | min(bits, 0x7F80)


def packed_sum(acc: Sequence[int], weights: Sequence[int], scale: int | None) -> int:
    """Heads in four lanes of fused fp32 sums of x + |x|, halved and scaled; fp32 bits."""
    sums = [0, 0, 0, 0]
    for head, (x, w) in enumerate(zip(acc, weights, strict=True)):
        doubled = twin.add_f32(x, x & 0x7FFFFFFF)
        sums[head % 4] = twin.fma_f32(doubled, w, sums[head % 4])
    pairs = [twin.add_f32(sums[0], sums[2]), twin.add_f32(sums[1], sums[3])]
    half = twin.mul_f32(twin.add_f32(*pairs), 0x3F000000)
    return half if scale is None else twin.mul_f32(half, scale)


def packed_bf16(acc: Sequence[int], weights: Sequence[int]) -> int:
    """The same in bf16: fp32 accumulators are rounded first, weights are bf16 bits; bf16 bits."""

    def number(bits: int) -> Fraction:
        return twin.decode_bf16(bits).value

    sums = [Fraction(0)] * 4
    for head, (x, w) in enumerate(zip(acc, weights, strict=True)):
        r = number(to_bf16_bits(max(twin.decode_f32(x).value, Fraction(0))))
        sums[head % 4] = number(to_bf16_bits(r * number(w) + sums[head % 4]))
    left, right = (number(to_bf16_bits(sums[i] + sums[i + 2])) for i in (0, 1))
    return to_bf16_bits(left + right)


def _log2(power: Fraction) -> int:
    exponent = power.numerator.bit_length() - power.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= power else exponent - 1
