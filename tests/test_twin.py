"""The twin agrees with values computed by hand and with its own second definitions."""

from __future__ import annotations

import ast
import math
import struct
import sys
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import twin
from hypothesis import given
from hypothesis import strategies as st
from twin import MINUS_INF, MINUS_ZERO, NAN, ONE, PLUS_INF, PLUS_ZERO

BITS = st.integers(0, 2**32 - 1)
FINITE = BITS.filter(lambda bits: not twin.decode_f32(bits).special)
BYTE = st.integers(0, 255)
CONTRACT = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in twin.CONTRACT_VALUES.items()}
)
FREE = {"order": "any", "ties": "any"}
MINUS_NAN = 0xFFC00001


def f32(x: float) -> int:
    """Fp32 bits of a Python float, rounded by the C library, overflow to inf."""
    try:
        return int.from_bytes(struct.pack("<f", x), "little")
    except OverflowError:
        return PLUS_INF if x > 0 else MINUS_INF


def as_float(bits: int) -> float:
    """The fp32 as a Python float."""
    value: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    return value


def e4m3(x: float) -> int:
    """The byte of a value that e4m3fn holds exactly."""
    return next(b for b in range(255) if b != 0x7F and twin.decode_e4m3(b).value == x)


def numbers(*values: float) -> list[twin.Number]:
    """Exact operands, whatever format holds them."""
    return [twin.decode_f32(f32(x)) for x in values]


def scores(*values: float) -> list[int]:
    """Fp32 bits of a window's scores."""
    return [f32(x) for x in values]


def test_the_twin_stands_alone() -> None:
    """The twin imports the standard library alone, and says so."""
    tree = ast.parse(Path(twin.__file__).read_text(encoding="utf-8"))
    modules = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert modules <= sys.stdlib_module_names
    assert "shares no helper with refimpl" in (twin.__doc__ or "")


# --- numbers -------------------------------------------------------------------------------------


def test_e4m3_values() -> None:
    """e4m3fn runs from 2**-9 to 448, its positive bytes ascend, the sign is the top bit."""
    named = {0x00: 0, 0x80: 0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1, 0xBC: -1.5}
    assert {byte: float(twin.decode_e4m3(byte).value) for byte in named} == named
    positive = [twin.decode_e4m3(byte).value for byte in range(0x7F)]
    assert positive == sorted(set(positive))
    assert positive[-1] == 448
    assert [-twin.decode_e4m3(byte | 0x80).value for byte in range(0x7F)] == positive
    assert [b for b in range(256) if math.isnan(twin.decode_e4m3(b).special)] == [0x7F, 0xFF]


@given(st.integers(0, 2**16 - 1))
def test_bf16_is_the_upper_half_of_fp32(bits: int) -> None:
    """A bf16 has the value, infinity or NaN of the fp32 with sixteen zero bits below it."""
    narrow, wide = twin.decode_bf16(bits), twin.decode_f32(bits << 16)
    assert repr(narrow.special) == repr(wide.special)
    assert narrow.value == wide.value


@given(BITS)
def test_fp32_values(bits: int) -> None:
    """Decoding gives what the C library reads, and rounding gives the bits back."""
    x = twin.decode_f32(bits)
    want = as_float(bits)
    if x.special:
        assert repr(x.special) == repr(want)
    else:
        assert x.value == Fraction(want)
        assert twin.to_f32_bits(x.value) == (0 if x.value == 0 else bits)
        assert twin.truncate_to_f32_bits(x.value) == (0 if x.value == 0 else bits)


@given(st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_rounding_agrees_with_the_c_library(x: float) -> None:
    """Nearest even, subnormals and overflow come out as struct packs them."""
    assert twin.to_f32_bits(Fraction(x)) == (f32(x) if x else PLUS_ZERO)


def test_rounding_edges() -> None:
    """Halves go to even, half a unit past the largest is inf, truncation never rounds up."""
    half = Fraction(1, 2**24)
    tiny = Fraction(1, 2**150)
    over = Fraction(2**128) - Fraction(2**103)
    assert [twin.to_f32_bits(v) for v in (1 + half, 1 + 3 * half, 1 + half + tiny)] == [
        ONE,
        ONE + 2,
        ONE + 1,
    ]
    assert [twin.to_f32_bits(v) for v in (tiny, 3 * tiny, -tiny)] == [0, 2, MINUS_ZERO]
    assert [twin.to_f32_bits(v) for v in (over - 1, over)] == [twin.LARGEST, PLUS_INF]
    truncated = [twin.truncate_to_f32_bits(v) for v in (1 + 3 * half, -1 - 3 * half, 2 * over)]
    assert truncated == [ONE + 1, f32(-1) + 1, twin.LARGEST]


@given(FINITE, FINITE, FINITE)
def test_fma_is_the_nearest_fp32(a: int, b: int, c: int) -> None:
    """No neighbour of the result is nearer to a*b + c, and a tie has an even significand."""
    exact = twin.decode_f32(a).value * twin.decode_f32(b).value + twin.decode_f32(c).value
    got = twin.fma_f32(a, b, c)
    if twin.decode_f32(got).special:
        assert abs(exact) >= 2**128 - 2**103
        assert (got == PLUS_INF) == (exact > 0)
        return
    error = abs(exact - twin.decode_f32(got).value)
    for other in {got + 1, max(got - 1, got & MINUS_ZERO)} - {got}:
        if not twin.decode_f32(other).special:
            distance = abs(exact - twin.decode_f32(other).value)
            assert error < distance or (error == distance and got % 2 == 0)


@given(BITS, BITS)
def test_sum_and_product_agree_with_doubles(a: int, b: int) -> None:
    """A double holds enough bits that rounding its sum or product again gives IEEE's fp32."""
    x, y = as_float(a), as_float(b)
    for got, want in ((twin.add_f32(a, b), x + y), (twin.mul_f32(a, b), x * y)):
        assert got == (NAN if math.isnan(want) else f32(want))


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (PLUS_INF, PLUS_ZERO, ONE, NAN),
        (PLUS_INF, ONE, MINUS_INF, NAN),
        (ONE, ONE, MINUS_NAN, NAN),
        (MINUS_INF, ONE, ONE, MINUS_INF),
        (MINUS_ZERO, ONE, MINUS_ZERO, MINUS_ZERO),
        (MINUS_ZERO, ONE, PLUS_ZERO, PLUS_ZERO),
        (ONE, ONE, f32(-1), PLUS_ZERO),
        (f32(-(2.0**-100)), f32(2.0**-100), PLUS_ZERO, MINUS_ZERO),
        (f32(2.0**100), f32(2.0**100), MINUS_INF, MINUS_INF),
        (ONE + 1, ONE + 1, f32(-1), f32(2.0**-22 + 2.0**-46)),
    ],
)
def test_fma_edges(a: int, b: int, c: int, want: int) -> None:
    """Infinities, NaN, zero signs and a kept low product bit are IEEE's."""
    assert twin.fma_f32(a, b, c) == want


# --- the tensor core -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        ([1, 2**-7], [1, 2**-6], 0.0, 1 + 2**-13),  # the last fraction bit is kept
        ([1, 2**-7], [1, 2**-7], 0.0, 1),  # the next one is cut
        ([1, -(2**-7)], [1, 2**-7], 0.0, 1),  # toward zero, not down
        ([1, 2**-7], [-1, -(2**-7)], 0.0, -1),
        ([1.5, -1.5, 2**-7], [1.5, 1.5, 2**-6], 0.0, 2**-13),  # 2.25 counts as exponent 0
        ([448, 2**-9], [0, 2**-9], 0.0, 2**-18),  # a zero product takes no part in E
        ([2**-9], [2**-9], 2**-26, 2**-18),  # a subnormal keeps exponent -6
        ([2**-7], [2**-7], 1.0, 1),  # c takes part in E
        ([1, 1], [1, 1], 2**-13, 2),  # the sum is cut to 13 bits again
        ([1, -1], [1, 1], 0.0, 0),
        ([0, 0], [-1, 1], 0.0, 0),
    ],
)
def test_e4m3_step(a: list[float], b: list[float], c: float, want: float) -> None:
    """A Hopper e4m3 step keeps 13 fraction bits below the largest exponent."""
    assert twin.dot_add(numbers(*a), numbers(*b), f32(c), twin.SM90_E4M3) == f32(want)


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1, -1, 2**-25], [1, 1, 1], 2**-25),  # 25 fraction bits are kept
        ([1, -1, 2**-26], [1, 1, 1], 0),
        ([1] + [2**-25] * 15, [1] * 16, 1 + 3 * 2**-23),  # 3.75 units toward zero
        ([math.inf, 1], [2, 1], math.inf),
        ([-math.inf, 1], [2, 1], -math.inf),
    ],
)
def test_bf16_step(a: list[float], b: list[float], want: float) -> None:
    """A Hopper bf16 step keeps 25 fraction bits and is written as fp32 toward zero."""
    assert twin.dot_add(numbers(*a), numbers(*b), PLUS_ZERO, twin.SM90_BF16) == f32(want)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ([math.nan], [0], PLUS_ZERO),
        ([math.inf], [0], PLUS_ZERO),
        ([math.inf, -math.inf], [1, 1], PLUS_ZERO),
        ([math.inf], [1], MINUS_INF),
        ([1], [1], MINUS_NAN),
    ],
)
def test_step_that_is_nan(a: list[float], b: list[float], c: int) -> None:
    """NaN, inf*0 and inf-inf leave one NaN, 0x7FFFFFFF."""
    assert twin.dot_add(numbers(*a), numbers(*b), c, twin.SM90_BF16) == NAN


@given(st.lists(st.tuples(BYTE, BYTE), min_size=32, max_size=32), st.randoms(use_true_random=False))
def test_step_is_odd_and_unordered(pairs: list[tuple[int, int]], random: object) -> None:
    """Negating one side negates a step, and shuffling or swapping operands leaves its bits."""

    def step(items: list[tuple[int, int]], flip: int = 0) -> int:
        a = [twin.decode_e4m3(x ^ flip) for x, _ in items]
        return twin.dot_add(a, [twin.decode_e4m3(y) for _, y in items], 0, twin.SM90_E4M3)

    got = step(pairs)
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert step(shuffled) == step([(y, x) for x, y in pairs]) == got
    assert step(pairs, flip=0x80) == (got if got in {PLUS_ZERO, NAN} else got ^ MINUS_ZERO)


def test_chain_depends_on_where_a_step_ends() -> None:
    """Small products survive when they are summed before a large one, and not after it."""
    small, large = numbers(*[2**-7] * 32), numbers(1, *[0] * 31)
    assert twin.accumulate(small + large, small + large, twin.SM90_E4M3) == f32(1 + 2**-9)
    assert twin.accumulate(large + small, large + small, twin.SM90_E4M3) == ONE
    halves = small[:16] + large[:16]
    assert twin.accumulate(halves, halves, twin.SM90_E4M3) == ONE
    assert twin.accumulate(halves, halves, twin.SM89_E4M3) == f32(1 + 2**-10)


# --- scoring -------------------------------------------------------------------------------------


def logit(
    q: dict[int, float],
    k: float,
    weights: dict[int, int] | int,
    *,
    heads: int = 16,
    scale: int = ONE,
) -> int:
    """One logit whose heads have their value in the first of 32 dimensions, other heads zero."""
    rows = [[e4m3(q.get(h, 0))] + [0] * 31 for h in range(heads)]
    per_head = [weights if isinstance(weights, int) else weights.get(h, 0) for h in range(heads)]
    return twin.mqa_logit(rows, [e4m3(k)] + [0] * 31, scale, per_head)


def test_relu_is_taken_per_head() -> None:
    """Under q = [2, -1] and w = [1, 1] key 1 scores 2 and key -3 scores 3, not 1 and -3."""
    got = [logit({0: 2, 1: -1}, k, {0: ONE, 1: ONE}) for k in (1, -3)]
    assert got == scores(2, 3)


@pytest.mark.parametrize(("first", "second"), [(0, 8), (3, 11), (7, 15)])
def test_group_one_is_rounded_and_group_zero_fused(first: int, second: int) -> None:
    """With w = -(1+2**-23) in group 0 and its opposite in group 1, only the latter rounds."""
    weights = {first: f32(-1) + 1, second: ONE + 1}
    assert logit({first: 3, second: 3}, 1, weights) == f32(2**-23)


def test_groups_follow_one_another() -> None:
    """A chain runs group 1, 0, 2, 3: of 2**24, 1, -2**24, 1 only the last is left."""
    weights = {8: f32(2.0**24), 0: ONE, 16: f32(-(2.0**24)), 24: ONE}
    assert logit(dict.fromkeys(weights, 1.0), 1, weights, heads=32) == ONE


def test_scale_comes_before_the_lanes() -> None:
    """Two lanes that only overflow once scaled give inf - inf, and scaling the sum would not."""
    weights = {0: f32(2.0**127), 2: f32(-(2.0**127))}
    assert logit({0: 1, 2: 1}, 1, weights, scale=f32(2)) == NAN
    assert logit({0: 1, 1: 1}, 1, {0: weights[0], 1: weights[2]}, scale=f32(2)) == PLUS_ZERO


def test_lanes_are_added_in_pairs() -> None:
    """(v0 + v1) + (v2 + v3): two ones beside 2**24 count, one beside it is lost."""
    big, one = f32(2.0**24), ONE
    q = {0: 1.0, 2: 1.0, 4: 1.0, 6: 1.0}
    assert logit(q, 1, {0: big, 4: one, 6: one}) == f32(2.0**24 + 2)
    assert logit(q, 1, {0: big, 2: one, 4: one}) == big


def test_zero_logits_take_the_sign_of_the_weights() -> None:
    """With no positive dot, positive weights give +0, negative ones -0, mixed ones +0."""
    negative = dict.fromkeys(range(16), -1.0)
    assert logit(negative, 1, ONE) == PLUS_ZERO
    assert logit(negative, 1, f32(-1)) == MINUS_ZERO
    assert logit({}, 1, {h: f32(-1) for h in range(15)}) == PLUS_ZERO


def test_nan_bytes_and_weights() -> None:
    """A NaN in q or k counts as zero; inf * 0 and a NaN weight or scale are 0x7FFFFFFF."""
    assert twin.mqa_logit([[0x7F] * 32] * 16, [0x38] * 32, ONE, [ONE] * 16) == PLUS_ZERO
    assert twin.mqa_logit([[0x38] * 32] * 16, [0xFF] * 32, ONE, [f32(-1)] * 16) == MINUS_ZERO
    assert logit({}, 1, PLUS_INF) == NAN
    assert logit({0: 1}, 1, MINUS_NAN) == NAN
    assert logit({0: 1}, 1, ONE, scale=MINUS_NAN) == NAN
    assert logit(dict.fromkeys(range(16), 1.0), 1, MINUS_INF) == MINUS_INF


def test_heads_come_in_groups_of_eight() -> None:
    """Fewer than two groups of heads raise, for the kernel's chain starts from the second."""
    with pytest.raises(ValueError, match="8 heads and 8 weights"):
        logit({}, 1, ONE, heads=8)


@pytest.mark.parametrize(
    ("r", "want"),
    [
        ([1, 1, 2**24, 0], 2**24 + 2),  # (r0+r2)+(r1+r3) gives 2**24
        ([2**24, 0, 1, 1], 2**24 + 2),  # left to right gives 2**24
        ([2**24, 1, 1, 0], 2**24),
        ([-5, 3, -1, math.nan], 3),
    ],
)
def test_qsa_heads_are_added_in_pairs(r: list[float], want: float) -> None:
    """A QSA logit is (r0 + r1) + (r2 + r3) of the rectified heads."""
    heads = [[f32(x) >> 16] + [0] * 15 for x in r]
    assert twin.qsa_logit(heads, [ONE >> 16] + [0] * 15, "bf16") == f32(want)


def test_qsa_dtypes_have_their_own_chain() -> None:
    """1 + 2**-14 keeps its small part in bf16 and loses it in e4m3."""
    narrow, wide = [0x38, 0x04], [ONE >> 16, f32(2**-7) >> 16]
    zero = [0, 0]
    assert twin.qsa_logit([narrow, zero, zero, zero], narrow, "e4m3") == ONE
    assert twin.qsa_logit([wide, zero, zero, zero], wide, "bf16") == f32(1 + 2**-14)


# --- legal rows ----------------------------------------------------------------------------------


def test_order_key_is_the_total_order() -> None:
    """Keys ascend from -NaN over -inf, -0, +0 and +inf to +NaN, and -0 and NaN merge as asked."""
    ascending = [MINUS_NAN, MINUS_INF, f32(-1), 0x80000001, MINUS_ZERO, 0, 1, ONE, PLUS_INF, NAN]
    keys = [twin.order_key(bits) for bits in ascending]
    assert keys == sorted(set(keys))
    assert twin.order_key(MINUS_ZERO, "equal") == twin.order_key(PLUS_ZERO, "equal")
    for nan, beyond in (("first", PLUS_INF), ("last", MINUS_INF)):
        key = twin.order_key(NAN, nan=nan)
        assert key == twin.order_key(MINUS_NAN, nan=nan)
        assert (key > twin.order_key(beyond)) == (nan == "first")


@pytest.mark.parametrize(
    ("picks", "any_ties", "lowest", "highest"),
    [
        ([0, 1, 2, 3], True, True, False),
        ([0, 1, 4, 5], True, False, True),
        ([0, 1, 5, 2], True, False, False),
        ([0, 1, 2, 6], False, False, False),
        ([0, 2, 3, 4], False, False, False),
        ([0, 1, 2, 2], False, False, False),
        ([0, 1, 2, -1], False, False, False),
        ([0, 1, 2, 16], False, False, False),
    ],
)
def test_ties_at_the_cutoff(
    picks: list[int],
    any_ties: bool,  # noqa: FBT001 - a table of verdicts
    lowest: bool,  # noqa: FBT001 - a table of verdicts
    highest: bool,  # noqa: FBT001 - a table of verdicts
) -> None:
    """Of scores 5, 4, 3, 3, 3, 3, 0... four picks are the first two and any two of the threes."""
    window = scores(5, 4, 3, 3, 3, 3, *[0] * 10)
    got = [
        twin.is_legal(picks, window, 16, 4, contract={"ties": ties})
        for ties in ("any", "lowest", "highest")
    ]
    assert got == [any_ties, lowest, highest]


def test_columns_past_the_row_are_no_picks() -> None:
    """Of 0.5, 1, -1, -2, 1.5 | 9, 0, 0 the row picks 4, 1, 0, 2; column 5 is past its end."""
    window = scores(0.5, 1, -1, -2, 1.5, 9, 0, 0)
    assert twin.is_legal([4, 1, 0, 2], window, 5, 4, contract={}) is True
    assert twin.is_legal([5, 4, 1, 0], window, 5, 4, contract=FREE) is False


@pytest.mark.parametrize(
    ("picks", "score", "ascending"),
    [
        ([3, 0, 2], True, False),
        ([3, 2, 0], True, False),
        ([0, 2, 3], False, True),
        ([0, 3, 2], False, False),
    ],
)
def test_order_of_the_picks(
    picks: list[int],
    score: bool,  # noqa: FBT001 - a table of verdicts
    ascending: bool,  # noqa: FBT001 - a table of verdicts
) -> None:
    """Score order leaves equal keys free; ascending is by column; any is any."""
    got = [
        twin.is_legal(picks, scores(1, 0, 1, 7), 4, 3, contract={"order": order})
        for order in ("score", "ascending", "any")
    ]
    assert got == [score, ascending, True]


def test_short_rows() -> None:
    """A short row is 0, 1, ... whatever its scores and mask; freed, it is judged like any other."""
    window = [f32(1), NAN, f32(3)]
    mask = [True, False, True]
    strict, free = {"nan": "reject"}, {"short_rows": "any", "nan": "first"}
    assert twin.is_legal([0, 1, 2, -1], window, 3, 4, mask=mask, contract=strict) is True
    assert twin.is_legal([0, 1, 2], window, 3, 3, contract=strict) is True
    assert twin.is_legal([0, 1], window, 3, 2, contract=strict) is None
    assert twin.is_legal([1, 2, 0, -1], window, 3, 4, contract={"order": "any"}) is False
    assert twin.is_legal([1, 2, 0, -1], window, 3, 4, contract=free) is True
    assert twin.is_legal([2, 0, -1, -1], window, 3, 4, mask=mask, contract=free) is True
    assert twin.is_legal([0, 1, 2, -1], window, 3, 4, contract=free) is False


def test_pads() -> None:
    """Pads follow the picks, also past k; holes may be let into the first min(k, visible) slots."""
    window = scores(4, 3, 2, 1)
    mask = [True, False, True, False]
    hole = {"holes": "allow"}

    def legal(picks: list[int], contract: dict[str, str], pad: int = -1) -> bool | None:
        return twin.is_legal(picks, window, 4, 3, mask=mask, contract=contract, pad=pad)

    assert legal([0, 2, -1, -1, -1], {}) is True
    assert legal([0, 2, 7, 7], {}, pad=7) is True
    assert [legal([0, -1, 2, -1], contract) for contract in ({}, hole)] == [False, True]
    assert [legal([0, -1, -1, 2], contract) for contract in ({}, hole)] == [False, False]
    assert [legal([0, -1, -1, -1], contract) for contract in ({}, hole)] == [False, False]
    with pytest.raises(ValueError, match="a row of 2 slots cannot hold k = 3"):
        legal([0, 2], {})


def test_empty_rows() -> None:
    """An empty row is all pads, or column 0 and pads where the contract says first."""
    rows = [[-1, -1], [0, -1], [-1, 0], [0, 0]]
    for value, want in (
        ("pad", [True, False, False, False]),
        ("first", [False, True, False, False]),
    ):
        for short in ("identity", "any"):
            rules = {"empty_rows": value, "short_rows": short, "holes": "allow"}
            assert [twin.is_legal(row, [], 0, 2, contract=rules) for row in rows] == want


def test_minus_inf() -> None:
    """Columns at -inf are ordinary ties, or none at all."""
    window = scores(-math.inf, 1, -math.inf, -math.inf)
    for picks, pick, pad in (([1, 0, -1], False, False), ([1, 3, 0], True, False)):
        free = {"ties": "any"}
        assert twin.is_legal(picks, window, 4, 3, contract=free) is pick
        assert twin.is_legal(picks, window, 4, 3, contract=free | {"minus_inf": "pad"}) is pad
    assert twin.is_legal([1, -1, -1], window, 4, 3, contract={"minus_inf": "pad"}) is True


def test_nan() -> None:
    """A NaN leaves the row undecided, or all rank as one class above +inf or below -inf."""
    window = [MINUS_NAN, PLUS_INF, NAN, MINUS_INF]
    assert twin.is_legal([1, 0], window, 4, 2, contract={}) is None
    assert twin.legal_sets(window, 4, 2, {}) is None
    assert twin.legal_sets(window, 4, 2, FREE | {"nan": "first"}) == {frozenset({0, 2})}
    assert twin.legal_sets(window, 4, 3, FREE | {"nan": "last"}) == {
        frozenset({0, 1, 3}),
        frozenset({1, 2, 3}),
    }


def test_zero_sign() -> None:
    """-0 sorts below +0, or with it."""
    window = [MINUS_ZERO, PLUS_ZERO]
    assert twin.legal_sets(window, 2, 1, FREE) == {frozenset({1})}
    assert twin.legal_sets(window, 2, 1, FREE | {"zero_sign": "equal"}) == {
        frozenset({0}),
        frozenset({1}),
    }


def test_unknown_contract_words_raise() -> None:
    """A contract key or value outside the closed set raises."""
    for contract in ({"order": "value"}, {"tie": "any"}):
        with pytest.raises(ValueError, match="not in the contract"):
            twin.row_rules(contract)


POOL = (MINUS_INF, f32(-1), MINUS_ZERO, PLUS_ZERO, ONE, ONE, PLUS_INF)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], int, list[bool] | None]:
    """A window of up to four scores, rich in ties, k, and sometimes a mask."""
    pool = POOL if draw(st.booleans()) else (*POOL, NAN, MINUS_NAN)
    window = draw(st.lists(st.sampled_from(pool), max_size=4))
    size = len(window)
    mask = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    return window, draw(st.integers(1, 3)), mask


@given(rows(), CONTRACT)
def test_cutoff_and_trial_agree(
    row: tuple[list[int], int, list[bool] | None], contract: dict[str, str]
) -> None:
    """The legal rows of k slots hold exactly the sets in which nothing left out wins."""
    window, k, mask = row
    visible = len(window)
    verdicts = {
        picks: twin.is_legal(picks, window, visible, k, mask=mask, contract=contract)
        for picks in product(range(-1, visible + 1), repeat=k)
    }
    want = twin.legal_sets(window, visible, k, contract, mask)
    if want is None:
        assert set(verdicts.values()) == {None}
    else:
        legal = [picks for picks, verdict in verdicts.items() if verdict]
        assert {frozenset(picks) - {-1} for picks in legal} == want
        assert all(
            len(set(kept)) == len(kept) for kept in ([p for p in x if p >= 0] for x in legal)
        )


# --- pages ---------------------------------------------------------------------------------------


def test_pages_map_forward() -> None:
    """Column 5 of pages of 4 is the second key of the second page; a pad stays a pad."""
    assert twin.translate([5, 0, -1, 3], [7, 2], 4) == [9, 28, -1, 31]
    assert twin.page_of(1, [9, 4], 1) == 4


def test_pages_of_a_tied_row() -> None:
    """Any two of three tied columns may show as slots; a slot twice needs two columns there."""
    window = scores(9, 1, 1, 1, 0)

    def legal(slots: list[int], table: list[int]) -> bool | None:
        return twin.is_legal_pages(
            slots, window, 5, 3, table_row=table, page_size=2, contract={"ties": "any"}
        )

    assert legal([10, 11, 21, -1], [5, 10, 6]) is True
    assert legal([21, 10, 20], [5, 10, 6]) is True
    assert legal([10, 21, 21], [5, 10, 6]) is False
    assert legal([10, 11, 11], [5, 5, 6]) is True
    assert legal([10, 10, 10], [5, 5, 6]) is False
    assert legal([11, 20, 21], [5, 10, 6]) is False
    assert legal([10, 11, 12], [5, 10, 6]) is False


@given(rows(), CONTRACT, st.lists(st.integers(1, 2), min_size=2, max_size=2))
def test_pages_are_the_image_of_a_legal_set(
    row: tuple[list[int], int, list[bool] | None], contract: dict[str, str], table: list[int]
) -> None:
    """A row of slots is legal exactly when some legal set maps to it, as a multiset."""
    window, k, mask = row
    visible = len(window)
    sets = twin.legal_sets(window, visible, k, contract, mask)
    images = [Counter(twin.translate(picks, table, 2)) for picks in sets or ()]
    holes = {**contract, "order": "any"}
    for slots in product((-1, 2, 3, 4, 5), repeat=k):
        got = twin.is_legal_pages(
            slots, window, visible, k, table_row=table, page_size=2, contract=holes, mask=mask
        )
        if sets is None:
            assert got is None
            continue
        kept = [slot for slot in slots if slot != -1]
        short = visible <= k and contract["short_rows"] == "identity"
        anywhere = contract["holes"] == "allow" and visible > 0 and not short
        room = min(k, visible) if anywhere else len(kept)
        placed = all(slot == -1 for slot in slots[room:])
        assert got == (Counter(kept) in images and placed)


def test_planar_pages() -> None:
    """A page holds all values first and then all scales, little-endian."""
    values = list(range(12))
    page = [*values, 0, 0, 0x80, 0x3F, 0, 0, 0, 0x40, 1, 2, 3, 4]
    assert [twin.page_key(page, token, 3) for token in range(3)] == [
        ([0, 1, 2, 3], ONE),
        ([4, 5, 6, 7], f32(2)),
        ([8, 9, 10, 11], 0x04030201),
    ]
    with pytest.raises(ValueError, match="token 3 of 3 in a page of 24 bytes"):
        twin.page_key(page, 3, 3)


# --- geometry ------------------------------------------------------------------------------------


def test_windows_of_a_batch() -> None:
    """Extends of 3 and 2 to lengths of 10 and 4 give the starts and ends of a concatenated K."""
    assert twin.windows([3, 2], [10, 4]) == ([0, 0, 0, 10, 10], [8, 9, 10, 13, 14])


def test_compressed_entries_hold_no_later_token() -> None:
    """At ratio 4 the first entry is seen from position 3 on."""
    got = [twin.compressed_visible(position, 4) for position in range(12)]
    assert got == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_qsa_blocks() -> None:
    """A block is visible when it is complete before the query and in the sequence."""
    got = [twin.qsa_visible_blocks(p, 7) for p in (-1, 2, 3, 6, 7, 11)]
    assert got == [0, 0, 1, 1, 1, 1]
