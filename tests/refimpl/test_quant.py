"""Quantised queries and keys, folded weights and planar pages, against the twin to the byte."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import twin
import twin_quant
from hypothesis import given
from hypothesis import strategies as st

from refimpl import pages, quant

if TYPE_CHECKING:
    from torch import Tensor

FLOORS = [1e-10, 1e-4, 0.25]
SPECIAL = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 1, 0x7F7FFFFF]
NEAR = [quant.LARGEST * 2.0**k for k in (-20, -3, 0, 7)]


def fp32(bits: list[int]) -> Tensor:
    """Bits as fp32."""
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits]).int().view(torch.float32)


def as_bits(x: Tensor) -> list[Any]:
    """Fp32 as unsigned bits, e4m3 as bytes."""
    if x.dtype is torch.float32:
        return (x.contiguous().view(torch.int32).long() & 0xFFFFFFFF).tolist()
    return x.contiguous().view(torch.uint8).tolist()


def near() -> st.SearchStrategy[int]:
    """Bits a few ulp about the amax whose scale is a power of two."""
    return st.builds(
        lambda value, ulp: twin_quant.f32(value) + ulp, st.sampled_from(NEAR), st.integers(-3, 3)
    )


def cells() -> st.SearchStrategy[int]:
    """Fp32 bits: any, those of bf16 near one, halves between e4m3 codes, and special ones."""
    return st.one_of(
        st.integers(0, (1 << 32) - 1),
        st.builds(lambda b: b << 16, st.integers(0x3C00, 0x4400)),
        st.builds(
            lambda n, s: twin_quant.f32(n / 16) | s << 31, st.integers(0, 512), st.booleans()
        ),
        st.sampled_from(SPECIAL),
        near(),
    )


@given(
    st.lists(cells(), min_size=1, max_size=6),
    st.sampled_from(FLOORS),
    st.sampled_from(["pow2", "exact"]),
    st.sampled_from(["divide", "reciprocal"]),
    st.sampled_from(["divide", "reciprocal"]),
)
def test_a_vector_is_quantised_as_the_twin_does(
    row: list[int], floor: float, scale: quant.Scale, amax_by: quant.By, values_by: quant.By
) -> None:
    """Bytes and scale bits, whatever the style and the numbers."""
    values, got = quant.quantize(
        x=fp32(row), floor=floor, scale=scale, amax_by=amax_by, values_by=values_by
    )
    style = twin_quant.Style(floor, scale, amax_by, values_by)
    want = twin_quant.quantize(row, style)
    assert (as_bits(values), as_bits(got[None])[0]) == want


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=6))
def test_bf16_is_quantised_as_its_fp32(row: list[int]) -> None:
    """The upcast is exact."""
    x = fp32([b << 16 for b in row])
    held = torch.tensor(row, dtype=torch.int32).short().view(torch.bfloat16)
    for name in quant.STYLES:
        one, two = quant.quantize_k(x=x, style=name), quant.quantize_k(x=held, style=name)
        assert {n: as_bits(t[None]) for n, t in one.items()} == {
            n: as_bits(t[None]) for n, t in two.items()
        }


@given(cells())
def test_a_number_is_rounded_to_e4m3_as_the_twin_does(bits: int) -> None:
    """Nearest with ties to even, saturating, NaN 0x7F, and the sign of zero kept."""
    assert as_bits(quant.to_e4m3(fp32([bits]))) == [
        0x7F if twin.is_nan(bits) else twin_quant.to_byte(bits)
    ]


def test_every_code_and_every_tie_between_two_is_rounded_to_even() -> None:
    """All 127 magnitudes come back, and 126 midpoints go to the even byte."""
    codes = torch.tensor([float(c) for c in twin_quant.CODES])
    middle = (codes[1:] + codes[:-1]) / 2
    assert as_bits(quant.to_e4m3(codes)) == list(range(127))
    assert as_bits(quant.to_e4m3(-middle)) == [0x80 | (b + b % 2) for b in range(126)]


def test_special_values_have_one_byte_each() -> None:
    """Any NaN is 0x7F, infinities and 1e9 saturate, -0 and a tiny negative are 0x80."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, -nan, inf, -inf, 1e9, 464.1, -480.0])
    assert as_bits(quant.to_e4m3(x)) == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE]
    assert as_bits(quant.to_e4m3(torch.tensor([0.0, -0.0, -(2.0**-11), 2.0**-10]))) == [
        0,
        128,
        128,
        0,
    ]


def test_a_nan_does_not_count_for_amax_and_an_infinity_takes_its_vector() -> None:
    """[NaN, 448, 1] has scale 1; [inf, 448, -1] has scale inf and signed zeros."""
    nan, inf = float("nan"), float("inf")
    values, scale = quant.quantize(x=torch.tensor([[nan, 448, 1], [inf, 448, -1]]), floor=1e-4)
    assert (as_bits(values), scale.tolist()) == ([[0x7F, 0x7E, 0x38], [0x7F, 0, 0x80]], [1.0, inf])


@pytest.mark.parametrize(
    ("name", "power"), [("v3.2-q", -42), ("v4-q", -22), ("k", -22), ("sglang-q", -22)]
)
def test_a_quiet_token_has_the_scale_of_its_floor(name: str, power: int) -> None:
    """1e-10 / 448 and 1e-4 / 448, rounded up to a power of two; its values are zeros."""
    made = quant.quantize_k(x=torch.zeros(1, 4), style=name)
    assert (as_bits(made["values"]), made["scale"].tolist()) == ([[0] * 4], [2.0**power])


def test_every_bf16_amax_has_one_power_of_two_by_whatever_way() -> None:
    """By division, reciprocal or float logarithm: no bf16 lies close enough above 448 * 2^k."""
    every = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)[:, None]
    for floor in (1e-10, 1e-4):
        one = quant.quantize(x=every, floor=floor)
        two = quant.quantize(x=every, floor=floor, amax_by="reciprocal", values_by="reciprocal")
        assert [as_bits(t) for t in one] == [as_bits(t) for t in two]
        by_log = (every.float()[:, 0].clamp(min=floor) / 448).log2().ceil().exp2()
        assert as_bits(one[1]) == as_bits(by_log)


def test_an_fp32_amax_an_ulp_above_has_another_one_by_a_float_logarithm() -> None:
    """448 * 2^20 and one ulp more needs scale 2^21, and log2 in fp32 says 20."""
    x = torch.tensor([[448.0 * 2**20]]).nextafter(torch.tensor(float("inf")))
    assert quant.quantize(x=x, floor=1e-4)[1].tolist() == [2.0**21]
    assert (x / 448).log2().ceil().exp2().tolist() == [[2.0**20]]


def test_unrounded_scales_depend_on_the_way_of_dividing() -> None:
    """With values at the ties between codes each style of an exact scale has bits of its own."""
    amax = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) + 1
    x = torch.cat([amax, amax / 448 * torch.arange(17.0, 33, 2)], 1)
    exact = [quant.quantize_k(x=x, style=name) for name in quant.STYLES if "exact" in name]
    bits = [(as_bits(made["values"]), as_bits(made["scale"])) for made in exact]
    assert all(one != two for i, one in enumerate(bits) for two in bits[:i])


# --- weights -------------------------------------------------------------------------------------


@given(cells(), cells(), st.sampled_from([8, 32, 64]), st.sampled_from([64, 128, 192]))
def test_weights_are_folded_as_the_twin_does(gate: int, scale: int, heads: int, dim: int) -> None:
    """In every order, each product rounded; a NaN only has to be one."""
    factors = {"q_scale": scale, "softmax": twin_quant.root(dim), "heads": twin_quant.root(heads)}
    for order, names in quant.ORDERS.items():
        got = quant.fold_weights(
            weights=fp32([gate])[None],
            q_scale=fp32([scale])[None],
            head_dim=dim,
            heads=heads,
            order=order,
        )
        want = twin_quant.fold(gate, [factors[name] for name in names])
        bits = as_bits(got)[0][0]
        assert bits == want or (twin.is_nan(bits) and twin.is_nan(want))


@pytest.mark.parametrize(
    ("heads", "scaled", "ways"),
    [(32, "pow2", 1), (64, "pow2", 1), (24, "pow2", 2), (32, "exact", 3)],
)
def test_the_order_of_factors_matters_where_their_roundings_differ(
    heads: int, scaled: str, ways: int
) -> None:
    """With pow2 scales and D 128 not for 32 and 64 heads; for 24, or unrounded scales, it does."""
    made = torch.Generator().manual_seed(0)
    gate = torch.randn(100, heads, generator=made)
    scale = torch.randn(100, heads, generator=made).exp2()
    scale = quant.ceil_pow2(scale) if scaled == "pow2" else scale
    folded = {
        str(as_bits(quant.fold_weights(weights=gate, q_scale=scale, head_dim=128, order=order)))
        for order in quant.ORDERS
    }
    assert len(folded) == ways


@pytest.mark.parametrize("order", quant.ORDERS)
def test_bf16_gates_are_upcast_before_the_first_product(order: str) -> None:
    """The same numbers as fp32 give the same bits, whatever factor comes first."""
    gate = torch.randn(9, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    one, two = (
        quant.fold_weights(weights=w, q_scale=torch.ones(9, 24), head_dim=128, order=order)
        for w in (gate, gate.float())
    )
    assert one.dtype is torch.float32
    assert as_bits(one) == as_bits(two)


def test_padded_heads_keep_the_factor_of_the_model_and_a_given_softmax_scale_holds() -> None:
    """Sixteen columns of a model of four heads are halved, not quartered."""
    got = quant.fold_weights(
        weights=torch.ones(1, 16, dtype=torch.bfloat16),
        q_scale=torch.full((1, 16), 3.0),
        head_dim=128,
        heads=4,
        softmax_scale=0.25,
    )
    assert (got.dtype, got.tolist()) == (torch.float32, [[0.375] * 16])


def test_a_query_quantiser_writes_three_outputs_and_a_key_quantiser_two() -> None:
    """Weights are folded with the scale beside them, in the style's order."""
    made = torch.Generator().manual_seed(0)
    x, gate = torch.randn(5, 32, 16, generator=made).bfloat16(), torch.randn(5, 32, generator=made)
    for name, style in quant.STYLES.items():
        got = quant.quantize_q(x=x, weights=gate, style=name)
        values, scale = quant.quantize(
            x=x,
            floor=style.floor,
            scale=style.scale,
            amax_by=style.amax_by,
            values_by=style.values_by,
        )
        weights = quant.fold_weights(weights=gate, q_scale=scale, head_dim=16, order=style.order)
        want = {"values": values, "scale": scale, "weights": weights}
        assert {n: as_bits(t) for n, t in got.items()} == {n: as_bits(t) for n, t in want.items()}
        assert list(quant.quantize_q(x=x, style=name)) == ["values", "scale"]


# --- pages ---------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_a_batch_is_gathered_as_the_twin_does(data: st.DataObject, size: int, dim: int) -> None:
    """Any bytes, tables and lengths, page by page, in whatever shape the cache has."""
    lengths = data.draw(st.lists(st.integers(0, 3 * size), max_size=4))
    table = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=3, max_size=3),
            min_size=len(lengths),
            max_size=len(lengths),
        )
    )
    made = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    cache = torch.randint(0, 256, (5, size * (dim + 4)), generator=made).byte()
    want = twin_quant.gathered(cache.tolist(), table, lengths, size)
    for shape in ((5, -1), (5, size, 1, dim + 4)):
        got = pages.gather_batch(
            kv_cache=cache.view(shape),
            block_table=torch.tensor(table, dtype=torch.int32).view(-1, 3),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            page_size=size,
        )
        assert as_bits(got["values"]) == [key for key, _ in want]
        assert as_bits(got["k_scale"]) == [scale for _, scale in want]


@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0, -1]))
def test_tokens_are_moved_as_the_twin_does(
    data: st.DataObject, size: int, dim: int, pad: int
) -> None:
    """Any bytes and moves, chains, copies and padding, in whatever shape the cache has."""
    location = st.integers(pad + 1, 4 * size - 1)
    to = data.draw(st.lists(location, unique=True))
    moves = [(data.draw(location), one) for one in to]
    moves = data.draw(st.permutations([*moves, *[(pad, pad)] * data.draw(st.integers(0, 2))]))
    made = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    cache = torch.randint(0, 256, (4, size * (dim + 4)), generator=made).byte()
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    source, destination = torch.tensor(moves, dtype=dtype).view(-1, 2).unbind(1)
    want, before = twin_quant.moved(cache.tolist(), moves, size, pad), cache.clone()
    for shape in ((4, -1), (4, size, 1, dim + 4)):
        got = pages.move_tokens(
            kv_cache=cache.view(shape),
            source=source,
            destination=destination,
            page_size=size,
            pad=pad,
        )
        assert got.flatten(1).tolist() == want
        assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("source", "destination", "size", "pad", "sentence"),
    [
        ([1], [2, 3], 4, 0, "source is [1] and destination [2]: one location a move"),
        ([1], [2], 5, 0, "kv_cache has 32 bytes a page: they hold no 5 keys"),
        ([1], [2], 8, 0, "kv_cache has 32 bytes a page: they hold no 8 keys"),
        ([1], [2], 0, 0, "kv_cache has 32 bytes a page: they hold no 0 keys"),
        (
            [1, 2, 0],
            [3, 4, 5],
            4,
            0,
            "move 2 goes from 0 to 5: padding (0) is on both sides or on none",
        ),
        ([1, 2], [3, -1], 4, -1, "move 1 goes from 2 to -1: padding (-1) is on both sides"),
        ([1, 12], [3, 4], 4, 0, "move 1 reads token 12: 3 pages of 4 hold 12"),
        ([1, -1], [3, 4], 4, 0, "move 1 reads token -1: 3 pages of 4 hold 12"),
        ([1, 2], [70, 4], 4, 0, "move 0 writes token 70: 3 pages of 4 hold 12"),
        ([0, 1, 2, 3], [0, 5, 6, 5], 4, 0, "moves 1 and 3 both go to token 5"),
    ],
)
def test_moves_without_one_answer_are_refused(
    source: list[int], destination: list[int], size: int, pad: int, sentence: str
) -> None:
    """The sentence names the moves and what would fit."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        pages.move_tokens(
            kv_cache=torch.zeros(3, 32, dtype=torch.uint8),
            source=torch.tensor(source),
            destination=torch.tensor(destination),
            page_size=size,
            pad=pad,
        )


@given(st.integers(0, 13), st.integers(1, 5))
def test_packed_keys_are_gathered_back(length: int, size: int) -> None:
    """Every byte of keys and scales, NaNs and -0 among them; the last page ends in zeros."""
    made = torch.Generator().manual_seed(length)
    keys = torch.randint(0, 256, (length, 8), generator=made).byte()
    keys.flatten()[: 2 * length] = torch.tensor([0x7F, 0x80], dtype=torch.uint8).repeat(length)
    scale = torch.randint(-(1 << 31), 1 << 31, (length,), generator=made).int().view(torch.float32)
    cache = pages.pack_keys(values=keys.view(torch.float8_e4m3fn), scale=scale, page_size=size)
    got = pages.gather_batch(
        kv_cache=cache,
        block_table=torch.arange(len(cache), dtype=torch.int32)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32),
        page_size=size,
    )
    assert (as_bits(got["values"]), as_bits(got["k_scale"])) == (keys.tolist(), as_bits(scale))
    assert int(cache.count_nonzero()) == int(
        keys.count_nonzero() + scale.view(torch.uint8).count_nonzero()
    )


def test_a_negative_length_has_no_keys() -> None:
    """A padded request gives no row."""
    got = pages.gather_batch(
        kv_cache=torch.arange(24, dtype=torch.uint8)[None],
        block_table=torch.zeros(3, 1, dtype=torch.int32),
        seq_lens=torch.tensor([1, -4, 1], dtype=torch.int32),
        page_size=2,
    )
    assert as_bits(got["values"]) == [list(range(8))] * 2


# --- mistakes ------------------------------------------------------------------------------------

CACHE: dict[str, Any] = {
    "kv_cache": torch.zeros(2, 24, dtype=torch.uint8),
    "block_table": torch.tensor([[0], [2]], dtype=torch.int32),
    "seq_lens": torch.tensor([2, 1], dtype=torch.int32),
    "page_size": 2,
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: quant.quantize(x=torch.zeros(2, 3).half(), floor=1.0),
            "x is torch.float16 [2, 3]: it is bf16 or fp32 [..., D], D above 0",
        ),
        (
            lambda: quant.quantize(x=torch.zeros(2, 0), floor=1.0),
            "x is torch.float32 [2, 0]: it is bf16 or fp32 [..., D], D above 0",
        ),
        (
            lambda: quant.quantize(x=torch.zeros(1, 1), floor=1.0, scale="up"),  # type: ignore[arg-type] # that is the point
            "scale is 'up': it is 'pow2' or 'exact'",
        ),
        (
            lambda: quant.quantize(x=torch.zeros(1, 1), floor=1.0, values_by="log"),  # type: ignore[arg-type] # that is the point
            "values_by is 'log': it is 'divide' or 'reciprocal'",
        ),
        (
            lambda: quant.quantize_k(x=torch.zeros(1, 1), style="q"),
            f"style is 'q': known are {', '.join(quant.STYLES)}",
        ),
        (
            lambda: quant.fold_weights(
                weights=torch.zeros(2, 3), q_scale=torch.zeros(2, 4), head_dim=8
            ),
            "weights are [2, 3]: q_scale is [2, 4]",
        ),
        (
            lambda: quant.fold_weights(
                weights=torch.zeros(2, 3), q_scale=torch.zeros(2, 3), head_dim=8, order="any"
            ),
            "order is 'any': known are vllm, sglang, gate-first",
        ),
        (
            lambda: pages.gather_batch(**CACHE),
            "request 1 has page 2: the cache has 2",
        ),
        (
            lambda: pages.gather_batch(**CACHE | {"seq_lens": torch.tensor([3, 1])}),
            "request 0 has 3 keys: 1 pages of 2 hold 2",
        ),
        (
            lambda: pages.gather_batch(**CACHE | {"seq_lens": torch.tensor([1])}),
            "seq_lens has 1 requests, block_table 2",
        ),
        (
            lambda: pages.gather_batch(**CACHE | {"page_size": 6}),
            "kv_cache has 24 bytes a page: they hold no 6 keys",
        ),
        (
            lambda: pages.gather_batch(**CACHE | {"page_size": 5}),
            "kv_cache has 24 bytes a page: they hold no 5 keys",
        ),
        (
            lambda: pages.pack_keys(values=torch.zeros(2, 3), scale=torch.zeros(2)),
            "values are torch.float32 and scale torch.float32: e4m3 and float32",
        ),
        (
            lambda: pages.pack_keys(
                values=torch.zeros(2, 3).to(torch.float8_e4m3fn), scale=torch.zeros(3)
            ),
            "scale is [3]: there are 2 keys",
        ),
    ],
)
def test_a_mistake_is_named_with_both_values(call: Any, message: str) -> None:  # noqa: ANN401 - a call of some function
    """Whole sentences, whatever the function."""
    with pytest.raises(ValueError, match=r"^") as caught:
        call()
    assert str(caught.value) == message
