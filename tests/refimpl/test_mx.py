"""MX formats, their pages and their quantisers agree with the twin, byte for byte."""

from fractions import Fraction
from typing import Any

import pytest
import torch
import twin
import twin_mx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refimpl import mx
from refimpl.bits import E4M3, as_int
from refimpl.scaled import BLOCK_SCALED, accumulate_scaled

BYTE = st.integers(0, 255)
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
FLOORS = {
    mx.SMALLEST_NORMAL: 6 * Fraction(2) ** -126,
    mx.PACKER: twin.decode_f32(0x3A1D4952).value,
}


def words(x: Tensor) -> list[int]:
    """Fp32 as unsigned bits, every NaN 0x7FFFFFFF."""
    bits = [b & 0xFFFFFFFF for b in as_int(x).flatten().tolist()]
    return [twin.NAN if twin.is_nan(b) else b for b in bits]


def fp32(bits: list[int]) -> Tensor:
    """Fp32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def uint8(values: list[int]) -> Tensor:
    """Bytes."""
    return torch.tensor(values, dtype=torch.uint8)


def finite(most: int = 254) -> st.SearchStrategy[int]:
    """Finite fp32 bits up to an exponent field."""
    return st.builds(
        lambda sign, exponent, fraction: sign << 31 | exponent << 23 | fraction,
        st.integers(0, 1),
        st.one_of(st.integers(0, most), st.integers(118, 132)),
        st.one_of(st.integers(0, 2**23 - 1), st.sampled_from([0, 1, 0x3FFFFF, 0x400000, 0x400001])),
    )


def test_all_codes_are_the_twin_s() -> None:
    """Each of the 256 bytes holds two values, the low nibble first; code 8 is -0."""
    got = mx.decode_e2m1(torch.arange(256, dtype=torch.uint8)[:, None])
    want = [twin_mx.fp32_of(code, 127) for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert words(got) == want
    assert got[:16, 0].tolist() == [s * v for s in (1, -1) for v in mx.E2M1_VALUES]
    assert words(got[8, :1]) == [0x80000000]


def test_all_scales_are_powers_of_two() -> None:
    """Byte b is 2^(b - 127): 0 is a subnormal, 255 a NaN."""
    got = mx.decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    assert words(got) == [twin.to_f32_bits(twin_mx.scale(b)) for b in range(255)] + [twin.NAN]


@given(st.lists(BYTE, min_size=32, max_size=32), st.lists(BYTE, min_size=2, max_size=2))
def test_dequantized_rows_are_the_twin_s(payload: list[int], scales: list[int]) -> None:
    """Any payload under any scales, overflow, subnormals and NaN too, has the twin's bits."""
    got = mx.dequantize(uint8(payload), uint8(scales))
    assert words(got) == twin_mx.dequantize(payload, scales)


def test_midpoints_go_to_the_even_code() -> None:
    """A tie has its mantissa bit 0; one ulp to either side goes to the nearer value."""
    middle = torch.tensor(MIDPOINTS)
    below, above = (torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 9.0))
    rows = torch.stack((below, middle, above))
    both = mx.decode_e2m1(mx.encode_e2m1(torch.cat((rows, -rows, rows * 0), 1)[:, :20]))
    assert both[:, :7].tolist() == [
        [0, 0.5, 1, 1.5, 2, 3, 4],
        [0, 1, 1, 2, 2, 4, 4],
        [0.5, 1, 1.5, 2, 3, 4, 6],
    ]
    assert torch.equal(both[:, 7:14], -both[:, :7])


@given(st.lists(finite(), min_size=2, max_size=16).filter(lambda x: len(x) % 2 == 0))
def test_codes_of_any_number_are_the_twin_s(bits: list[int]) -> None:
    """Every fp32 has the nearest code; past 6 it is 6, and a negative zero keeps its sign."""
    got = mx.encode_e2m1(fp32(bits))
    assert twin_mx.codes(got.tolist()) == [twin_mx.encode(b) for b in bits]


@pytest.mark.parametrize("floor", FLOORS)
@settings(max_examples=25)
@given(data=st.data())
def test_quantized_rows_are_the_twin_s(floor: float, data: st.DataObject) -> None:
    """Two blocks of any finite fp32 have the twin's payload and scales under both floors."""
    row = data.draw(
        st.lists(finite(data.draw(st.sampled_from([0, 60, 254]))), min_size=64, max_size=64)
    )
    payload, scales = mx.quantize(fp32(row), floor=floor)
    assert (payload.tolist(), scales.tolist()) == twin_mx.quantize(row, FLOORS[floor])


@pytest.mark.parametrize("floor", FLOORS)
def test_scales_turn_right_above_six(floor: float) -> None:
    """6 * 2^n takes the scale 2^n, and the next number above it the next scale."""
    six = 6 * 2.0 ** torch.arange(-13, 100)
    assert mx.scale_of(six, floor=floor).tolist() == list(range(114, 227))
    above = torch.nextafter(six, torch.tensor(torch.inf))
    assert mx.scale_of(above, floor=floor).tolist() == list(range(115, 228))


def test_floors_decide_the_scale_of_silence() -> None:
    """A block of zeros has the scale 2^-126 under the one floor and 2^-15 under the other."""
    zeros = torch.zeros(1, 64)
    for floor, byte in ((mx.SMALLEST_NORMAL, 1), (mx.PACKER, 114)):
        payload, scales = mx.quantize(zeros, floor=floor)
        assert (payload.any().item(), scales.tolist()) == (False, [[byte, byte]])


def test_bf16_is_quantized_as_its_value() -> None:
    """bf16 gives the bytes of the same numbers in fp32, and comes back as bf16."""
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for a, b in zip(mx.quantize(x), mx.quantize(x.float()), strict=True):
        assert torch.equal(a, b)
    fake = mx.fake_quantize(x)
    assert fake.dtype is torch.bfloat16
    assert torch.equal(fake.float(), mx.dequantize(*mx.quantize(x)))


@given(
    st.lists(BYTE, min_size=32, max_size=32), st.lists(st.integers(2, 250), min_size=2, max_size=2)
)
def test_fake_quantized_values_stay(payload: list[int], scales: list[int]) -> None:
    """What one round made is not moved by the next."""
    x = mx.dequantize(uint8(payload), uint8(scales))
    assert torch.equal(as_int(mx.fake_quantize(x)), as_int(x))


def test_pages_are_planar() -> None:
    """A page holds all payloads and then all scales, whatever its shape and its stride."""
    raw = torch.randint(0, 256, (3, 4 * 68 + 10), generator=torch.Generator().manual_seed(1))
    cache = raw.to(torch.uint8)[:, : 4 * 68]
    payload, scales = mx.split_fp4_pages(cache, head_dim=128, page_size=4)
    for page in range(3):
        held = cache[page].tolist()
        assert payload[page].flatten().tolist() == held[: 4 * 64]
        assert scales[page].flatten().tolist() == held[4 * 64 :]
    again = mx.split_fp4_pages(cache.reshape(3, 4, 1, 68), head_dim=128, page_size=4)
    assert all(torch.equal(a, b) for a, b in zip(again, (payload, scales), strict=True))


def test_words_hold_four_scales() -> None:
    """The lowest byte of a packed int32 is the scale of the first block."""
    packed = torch.tensor([[0x7F7E7D7C, -1]], dtype=torch.int32)
    assert mx.scale_bytes(packed).tolist() == [[0x7C, 0x7D, 0x7E, 0x7F, 255, 255, 255, 255]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mx.quantize(torch.zeros(2, 48)), "x has 48 values a row: a scale is shared by 32"),
        (
            lambda: mx.quantize(torch.full((32,), torch.inf)),
            "x holds 32 values that are not finite",
        ),
        (
            lambda: mx.split_fp4_pages(uint8([0] * 136)[None], head_dim=128, page_size=4),
            "with 136 bytes a page: page_size 4 and 64 [+] 4 bytes a key make .* 272 bytes",
        ),
        (
            lambda: mx.split_fp4_pages(uint8([0])[None], head_dim=48, page_size=1),
            "head_dim is 48: a scale is shared by 32 values",
        ),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:  # noqa: ANN401 - any call
    """A wrong size says what it is and what it should be."""
    with pytest.raises(ValueError, match=message):
        call()


def fp4_chain(payload: list[int], scales: list[int]) -> tuple[list[int], list[int]]:
    """The accumulator of two keys, and the twin's."""
    x, p = uint8(payload).view(2, -1), uint8(scales).view(2, -1)
    got = accumulate_scaled(
        mx.decode_e2m1(x)[:1],
        mx.decode_e2m1(x)[1:],
        a_scale=mx.decode_ue8m0(p)[:1],
        b_scale=mx.decode_ue8m0(p)[1:],
        instruction=BLOCK_SCALED["sm100.mxf4nvf4.e2m1"],
    )
    sides = [
        [(twin_mx.value(c), 0, twin_mx.scale(s[i // 32])) for i, c in enumerate(twin_mx.codes(row))]
        for row, s in zip(x.tolist(), p.tolist(), strict=True)
    ]
    return words(got), [twin_mx.chain(*sides, k=64, group=16, fraction_bits=35)]


@given(
    st.lists(BYTE, min_size=128, max_size=128),
    st.lists(st.integers(60, 190), min_size=8, max_size=8),
)
def test_fp4_chains_are_the_twin_s(payload: list[int], scales: list[int]) -> None:
    """A chain of two steps of four exact groups each has the bits of the published model."""
    got, want = fp4_chain(payload, scales)
    assert got == want


@given(
    st.lists(BYTE, min_size=48, max_size=48),
    st.lists(st.integers(105, 110), min_size=2, max_size=2),
    st.booleans(),
)
def test_small_groups_lose_their_own_bits(
    payload: list[int],
    scales: list[int],
    silent: bool,  # noqa: FBT001 - drawn by place
) -> None:
    """Where the large groups cancel, each small one shows what was cut; silent ones cut nothing."""
    large, a, b = payload[:16], payload[16:32], payload[32:]
    left = [byte * (not silent) for byte in large[:8]]
    minus = [byte ^ 0x88 for byte in left] if not silent else left
    row = [*left, *minus, *a, *large[8:], *large[8:], *b]
    got, want = fp4_chain(row, [127, scales[0], 127, scales[1]])
    assert got == want


@given(
    st.lists(BYTE, min_size=128, max_size=128),
    st.lists(st.integers(90, 160), min_size=4, max_size=4),
)
def test_scaled_fp8_chains_are_the_twin_s(codes: list[int], scales: list[int]) -> None:
    """A product of e4m3 has the exponents of both scales added to its own."""
    codes = [c & 0xF7 if c & 0x7F == 0x7F else c for c in codes]
    x = uint8(codes).view(E4M3).view(2, 64)
    got = accumulate_scaled(
        x[:1].float(),
        x[1:].float(),
        a_scale=mx.decode_ue8m0(uint8(scales[:2]))[None],
        b_scale=mx.decode_ue8m0(uint8(scales[2:]))[None],
        instruction=BLOCK_SCALED["sm100.mxf8f6f4.e4m3"],
    )

    def operand(code: int, scale: int) -> tuple[Fraction, int, Fraction]:
        exponent = max((code >> 3 & 15) - 7, -6)
        return twin.decode_e4m3(code).value, exponent, twin_mx.scale(scale)

    sides = [
        [operand(c, s[i // 32]) for i, c in enumerate(half)]
        for half, s in ((codes[:64], scales[:2]), (codes[64:], scales[2:]))
    ]
    assert words(got) == [twin_mx.chain(*sides, k=32, group=1, fraction_bits=25)]
