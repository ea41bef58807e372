"""The twin of the quantisers: scalar and slow, in integers and fractions, from the contract.

Like `twin`, it shares nothing with refimpl. fp32 values travel as their bits, e4m3fn ones as
bytes; a division is exact until the one rounding to fp32, and a byte is found by looking at all.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import twin

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST = 448
CODES = [twin.decode_e4m3(byte).value for byte in range(0x7F)]
"""The magnitudes of bytes 0x00 to 0x7E, ascending."""


class Style(NamedTuple):
    """The settings of a quantiser."""

    floor: float
    scale: str = "pow2"
    amax_by: str = "divide"
    values_by: str = "divide"


def f32(value: float) -> int:
    """Bits of a python float rounded to fp32."""
    return twin.to_f32_bits(Fraction(value))


def divide(a_bits: int, b_bits: int) -> int:
    """IEEE a / b of a finite or infinite a and a positive b, rounded once."""
    a, b = twin.decode_f32(a_bits), twin.decode_f32(b_bits)
    sign = a_bits & twin.MINUS_ZERO
    if math.isnan(a.special) or (a.special and b.special):
        return twin.NAN
    if a.special:
        return sign | twin.PLUS_INF
    if b.special:
        return sign
    quotient = a.value / b.value
    return twin.to_f32_bits(quotient) or sign


def divided(a_bits: int, b_bits: int, by: str) -> int:
    """The rounded a / b, or a times the rounded 1 / b."""
    if by == "divide":
        return divide(a_bits, b_bits)
    one_over = divide(twin.ONE, b_bits)
    return twin.mul_f32(a_bits, one_over)


def ceil_pow2(bits: int) -> int:
    """The least power of two not below, found by doubling."""
    if twin.decode_f32(bits).special:
        return bits
    power, value = Fraction(1, 2**126), twin.decode_f32(bits).value
    while power < value:
        power *= 2
    return twin.to_f32_bits(power)


def to_byte(bits: int) -> int:
    """The nearest e4m3fn, ties to the even byte; infinity and what is past 448 saturate."""
    number = twin.decode_f32(bits)
    if math.isnan(number.special):
        return 0x7F
    sign = 0x80 if bits & twin.MINUS_ZERO else 0
    if number.special:
        return sign | 0x7E
    magnitude = abs(number.value)
    return sign | min(
        range(len(CODES)), key=lambda byte: (abs(CODES[byte] - magnitude), byte % 2, byte)
    )


def quantize(row: Sequence[int], style: Style) -> tuple[list[int], int]:
    """Bytes and scale bits of one vector of fp32 bits."""
    magnitudes = [bits & 0x7FFFFFFF for bits in row if not twin.is_nan(bits)]
    # Magnitudes of one sign sort as their bits.
    amax = max([*magnitudes, f32(style.floor)])
    scale = divided(amax, f32(LARGEST), style.amax_by)
    if style.scale == "pow2":
        scale = ceil_pow2(scale)
    values = [
        0x7F if twin.is_nan(bits) else to_byte(divided(bits, scale, style.values_by))
        for bits in row
    ]
    return values, scale


def fold(gate: int, factors: Sequence[int]) -> int:
    """A gate times its factors, left to right, every product rounded to fp32."""
    for factor in factors:
        gate = twin.mul_f32(gate, factor)
    return gate


def root(count: int) -> int:
    """Bits of count^-0.5 in double precision, rounded to fp32."""
    return f32(1 / math.sqrt(count))


def gathered(
    pages: Sequence[Sequence[int]],
    table: Sequence[Sequence[int]],
    lengths: Sequence[int],
    page_size: int,
) -> list[tuple[list[int], int]]:
    """Key bytes and scale bits of every request's tokens, in order."""
    return [
        twin.page_key(pages[table[request][at // page_size]], at % page_size, page_size)
        for request, length in enumerate(lengths)
        for at in range(length)
    ]


def moved(
    pages: Sequence[Sequence[int]],
    moves: Sequence[tuple[int, int]],
    page_size: int,
    pad: int,
) -> list[list[int]]:
    """The pages after tokens were copied from locations to others, byte by byte, out of the old."""
    after = [list(page) for page in pages]
    for source, destination in moves:
        if source == pad:
            continue
        (page, token), (at, place) = (divmod(each, page_size) for each in (source, destination))
        dim = len(pages[page]) // page_size - 4
        for i in range(dim):
            after[at][place * dim + i] = pages[page][token * dim + i]
        for i in range(page_size * dim, page_size * dim + 4):
            after[at][i + place * 4] = pages[page][i + token * 4]
    return after
