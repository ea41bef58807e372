"""The dot-add, its chain and the exact fma agree with the twin and with values made by hand."""

import math

import pytest
import torch
import twin
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl.bits import E4M3, as_int
from refimpl.tensorcore import (
    CANONICAL_NAN,
    INSTRUCTIONS,
    Instruction,
    accumulate,
    carrier,
    dot_add,
    fma,
)

TWINS = {
    "sm90.wgmma.e4m3": twin.SM90_E4M3,
    "sm90.wgmma.bf16": twin.SM90_BF16,
    "sm89.mma.e4m3": twin.SM89_E4M3,
    "sm100.f8f6f4.e4m3": twin.SM100_E4M3,
}
E4M3_ROWS = [name for name in TWINS if "e4m3" in name]
WORD = st.integers(0, 2**32 - 1)
EDGE = st.sampled_from(
    [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x33000000]
)
FP32 = st.one_of(WORD, st.builds(lambda x, sign: x | sign << 31, EDGE, st.integers(0, 1)))


def code_lists(size: int) -> st.SearchStrategy[list[int]]:
    """Lists of e4m3 bytes: any, without NaN, few values, subnormals and zeros."""

    def lists(code: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
        return st.lists(code, min_size=size, max_size=size)

    tame = st.integers(0, 255).filter(lambda x: x & 0x7F != 0x7F)
    tiny = st.builds(lambda x, sign: x | sign << 7, st.integers(0, 9), st.integers(0, 1))
    few = st.sampled_from([0x00, 0x01, 0x38, 0xB8, 0x3F, 0x7E])
    return st.one_of(lists(st.integers(0, 255)), lists(tame), lists(tiny), lists(few))


def accumulators() -> st.SearchStrategy[int]:
    """Fp32 bits that an accumulator of e4m3 products may have, and a good many more."""
    normal = st.builds(
        lambda sign, exponent, fraction: sign << 31 | exponent + 127 << 23 | fraction,
        st.integers(0, 1),
        st.integers(-30, 24),
        st.integers(0, 2**23 - 1),
    )
    return st.one_of(normal, st.sampled_from([0, 0x80000000, CANONICAL_NAN]))


def words(x: Tensor) -> list[int]:
    """Fp32 as unsigned bits."""
    return [bits & 0xFFFFFFFF for bits in as_int(x).flatten().tolist()]


def fp32(*bits: int) -> Tensor:
    """Fp32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def e4m3(codes: list[int]) -> Tensor:
    """e4m3 of these bytes."""
    return torch.tensor(codes, dtype=torch.uint8).view(E4M3)


def bf16(codes: list[int]) -> Tensor:
    """bf16 of these bits."""
    return torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def ones(name: str, *values: float) -> tuple[Tensor, Tensor, Instruction]:
    """Operands whose products are these values and zeros."""
    row = INSTRUCTIONS[name]
    a = torch.zeros(row.k)
    a[: len(values)] = torch.tensor(values)
    b = torch.zeros(row.k)
    b[: len(values)] = 1.0
    return a.to(row.operand), b.to(row.operand), row


@pytest.mark.parametrize("name", TWINS)
def test_the_table_holds_the_twin_s_numbers(name: str) -> None:
    """Each row has the k, F, output and smallest exponent that the twin's author read."""
    row, want = INSTRUCTIONS[name], TWINS[name]
    output = {"e8m13": "e8m13", "fp32": "f32_rz"}[row.output]
    assert (row.k, row.fraction_bits, output, row.min_exponent) == want
    assert row.name == name


def test_only_thirteen_bits_fit_into_fp32() -> None:
    """fp32 carries the rows with F 13; F 25 takes fp64."""
    wide = {name: carrier(row) for name, row in INSTRUCTIONS.items()}
    assert wide == {
        "sm90.wgmma.e4m3": torch.float32,
        "sm89.mma.e4m3": torch.float32,
        "sm90.wgmma.bf16": torch.float64,
        "sm100.f8f6f4.e4m3": torch.float64,
    }


@pytest.mark.parametrize("name", E4M3_ROWS)
@given(data=st.data())
def test_dot_add_of_e4m3_is_the_twin_s(name: str, data: st.DataObject) -> None:
    """One step of any bytes onto any accumulator has the twin's bits."""
    row = INSTRUCTIONS[name]
    a, b = data.draw(code_lists(row.k)), data.draw(code_lists(row.k))
    c = data.draw(accumulators())
    got = dot_add(e4m3(a), e4m3(b), fp32(c)[0], instruction=row)
    decode = twin.decode_e4m3
    assert words(got) == [
        twin.dot_add([decode(x) for x in a], [decode(x) for x in b], c, TWINS[name])
    ]


@given(
    st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32),
    st.one_of(st.just(0), FP32),
    st.sampled_from([0xFFFF, 0xBFFF, 0x80FF]),
)
def test_dot_add_of_bf16_is_the_twin_s(codes: list[int], c: int, keep: int) -> None:
    """One step of any bf16 bits onto any fp32, inf and NaN included, has the twin's bits."""
    a, b = [x & keep for x in codes[:16]], codes[16:]
    got = dot_add(bf16(a), bf16(b), fp32(c)[0], instruction=INSTRUCTIONS["sm90.wgmma.bf16"])
    decode = twin.decode_bf16
    assert words(got) == [
        twin.dot_add([decode(x) for x in a], [decode(x) for x in b], c, twin.SM90_BF16)
    ]


@pytest.mark.parametrize("name", E4M3_ROWS)
@given(codes=code_lists(4 * 64))
def test_chains_are_the_twin_s(name: str, codes: list[int]) -> None:
    """A [2, 64] by [2, 64] chain has the twin's accumulators, cell by cell."""
    x = e4m3(codes).view(2, 2, 64)
    rows = [[twin.decode_e4m3(c) for c in codes[64 * i : 64 * i + 64]] for i in range(4)]
    want = [twin.accumulate(rows[i], rows[j], TWINS[name]) for i in (0, 1) for j in (2, 3)]
    assert words(accumulate(x[0], x[1], instruction=INSTRUCTIONS[name])) == want


@given(st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64))
def test_bf16_chains_are_the_twin_s(codes: list[int]) -> None:
    """Two bf16 steps hand the accumulator on as the twin's do."""
    a, b = codes[:32], codes[32:]
    row = INSTRUCTIONS["sm90.wgmma.bf16"]
    got = accumulate(bf16(a)[None], bf16(b)[None], instruction=row)
    decode = twin.decode_bf16
    want = twin.accumulate([decode(x) for x in a], [decode(x) for x in b], twin.SM90_BF16)
    assert words(got) == [want]


@given(FP32, FP32, FP32)
def test_fma_is_the_twin_s(a: int, b: int, c: int) -> None:
    """Any three fp32 bit patterns fuse to the twin's bits, NaN to some NaN."""
    got, want = fma(fp32(a), fp32(b), fp32(c)), twin.fma_f32(a, b, c)
    assert got.isnan().item() if twin.is_nan(want) else words(got) == [want]


@given(WORD, WORD, st.integers(-30, 30), st.sampled_from([0, 1, 2, 0x7FFFFE, 0x7FFFFF]))
def test_fma_rounds_once(a: int, b: int, shift: int, fraction: int) -> None:
    """Near ties that fp64 rounds first come out as the twin rounds them, once."""
    a, b = a & 0x007FFFFF | 0x3F800000, b & 0x807FFFFF | 0x3F800000
    c = 127 + shift << 23 | fraction
    assert words(fma(fp32(a), fp32(b), fp32(c))) == [twin.fma_f32(a, b, c)]


def test_fma_does_not_round_twice() -> None:
    """A sum a little below a tie rounds down, though fp64 rounds it to the tie and then to even."""
    a, b, c = (torch.tensor(x) for x in (1 + 2.0**-23, (1 - 2.0**-23) * 2.0**-24, 1 + 2.0**-23))
    assert fma(a, b, c).item() == c.item()
    assert (a.double() * b.double() + c.double()).float().item() == 1 + 2.0**-22


def test_an_addend_loses_what_lies_below_thirteen_bits() -> None:
    """448 + 2^-6 keeps 448: the small product is truncated away."""
    a, b, row = ones("sm90.wgmma.e4m3", 448.0, 2.0**-6)
    assert dot_add(a, b, torch.tensor(0.0), instruction=row).item() == 448.0
    a, b, row = ones("sm90.wgmma.e4m3", 448.0, -(2.0**-6))
    assert dot_add(a, b, torch.tensor(0.0), instruction=row).item() == 448.0


def test_zero_operands_do_not_align() -> None:
    """448 * 0 beside 2^-9 * 2^-9 leaves the tiny product whole."""
    row = INSTRUCTIONS["sm90.wgmma.e4m3"]
    a, b = torch.zeros(2, row.k)
    a[:2], b[:2] = torch.tensor([448.0, 2.0**-9]), torch.tensor([0.0, 2.0**-9])
    got = dot_add(a.to(E4M3), b.to(E4M3), torch.tensor(0.0), instruction=row)
    assert got.item() == 2.0**-18


@pytest.mark.parametrize("name", TWINS)
def test_no_sum_is_plus_zero_and_nan_is_canonical(name: str) -> None:
    """-0 products on a -0 accumulator give +0; one NaN operand gives 0x7FFFFFFF."""
    a, b, row = ones(name, -0.0, 0.0)
    assert words(dot_add(a, b, torch.tensor(-0.0), instruction=row)) == [0]
    a, b, row = ones(name, math.nan, 1.0)
    assert words(dot_add(a, b, torch.tensor(0.0), instruction=row)) == [CANONICAL_NAN]


def test_tiles_leave_no_trace() -> None:
    """A product larger than one tile equals the same product cut by hand."""
    row = INSTRUCTIONS["sm90.wgmma.e4m3"]
    a, b = torch.randn(70, 64).to(E4M3), torch.randn(300, 64).to(E4M3)
    whole = accumulate(a, b, instruction=row)
    cells = [accumulate(a[i : i + 1], b, instruction=row) for i in (0, 63, 64, 69)]
    assert torch.equal(whole[[0, 63, 64, 69]], torch.cat(cells))
    swapped = accumulate(b, a, instruction=row).t()
    assert torch.equal(as_int(whole), as_int(swapped.contiguous()))
    assert accumulate(a[:0], b, instruction=row).shape == (0, 300)


def test_operands_that_do_not_fit_are_named() -> None:
    """A wrong dtype, width or D is refused with the tensor and both values."""
    row = INSTRUCTIONS["sm90.wgmma.e4m3"]
    x = torch.zeros(2, 32).to(E4M3)
    with pytest.raises(ValueError, match=r"b is torch\.float32: sm90\.wgmma\.e4m3 multiplies"):
        accumulate(x, torch.zeros(2, 32), instruction=row)
    with pytest.raises(ValueError, match="a has D 32 and b has D 16"):
        accumulate(x, x[:, :16], instruction=row)
    with pytest.raises(ValueError, match=r"a has D 16.*32 products a step"):
        accumulate(x[:, :16], x[:, :16], instruction=row)
