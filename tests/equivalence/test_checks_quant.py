"""Classic faults of quantisers and gathers are told by their sentence, and honest variants pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from equivalence.checks import misgathered, misquantised
from equivalence.checks.quant import reading
from refimpl import bits, pages, quant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
TOKENS, HEADS, DIM = 6, 64, 16
Outputs = dict[str, "Tensor"]


def wrong_rows(want: Tensor, got: Tensor) -> Tensor:
    """Numbers of the rows that differ in a bit."""
    differ = bits.as_int(want) != bits.as_int(got)
    return differ.view(len(differ), -1).any(1).nonzero()[:, 0]


def told(
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Any],
    want: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
) -> dict[str, str]:
    """The reading of every stage that has a wrong row: an empty dictionary is EQUAL."""
    found = {}
    for stage, right in want.items():
        text = reading(
            stage=stage,
            inputs=inputs,
            params=params,
            want=right,
            got=got[stage],
            rows=torch.arange(len(right)),
            beside={name: other for name, other in got.items() if name != stage},
        )
        assert bool(len(wrong_rows(right, got[stage]))) or not text
        if len(wrong_rows(right, got[stage])):
            found[stage] = text
    return found


# --- quantisers ----------------------------------------------------------------------------------


def queries() -> dict[str, Tensor]:
    """Tokens and heads of many sizes, the last two tokens below the floors, and head gates."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HEADS, DIM, generator=made)
    x *= (torch.arange(HEADS) / 4 - 8)[:, None].exp2()
    x *= torch.randint(-2, 3, (TOKENS, 1, 1), generator=made).float().exp2()
    x[-1] *= 2.0**-40
    x[-2] *= 2.0**-17
    ties = torch.tensor([17.0, 19, 21, -17, -19, 2.5 / 512, 1.5 / 512, -0.5 / 512])
    x[0, 0] = torch.cat([torch.tensor([448.0, 0, -0.0]), ties, torch.ones(5)]) / 64
    gate = torch.randn(TOKENS, HEADS, generator=made)
    return {"x": x, "weights": gate}


QUERIES: dict[str, Any] = queries()
X, GATE = QUERIES["x"], QUERIES["weights"]
FACTORS = (DIM**-0.5, HEADS**-0.5)


def up(s: Tensor) -> Tensor:
    """2^ceil(log2(s))."""
    return s.double().log2().ceil().exp2().float()


def down(s: Tensor) -> Tensor:
    """2^floor(log2(s))."""
    return s.double().log2().floor().exp2().float()


def amax(x: Tensor = X) -> Tensor:
    """Of each vector."""
    return x.abs().amax(-1)


def write(scale: Tensor, stored: Tensor | None = None, cast: Any = None) -> Outputs:  # noqa: ANN401 - a cast
    """Values by one scale, beside it or another, and weights that carry that."""
    stored = scale if stored is None else stored
    by = X / scale[..., None]
    values = by.clamp(-448, 448).to(E4M3) if cast is None else cast(by)
    return {"values": values, "scale": stored, "weights": GATE * stored * FACTORS[0] * FACTORS[1]}


def away(x: Tensor) -> Tensor:
    """Ties away: the least bit more before rounding."""
    more = x.nextafter(x.sign() * float("inf"))
    return torch.where(x == 0, x, more).clamp(-448, 448).to(E4M3)


def toward(x: Tensor) -> Tensor:
    """The largest code that is not above, by looking at all."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    at = torch.searchsorted(codes, x.abs().clamp(max=448).contiguous(), right=True) - 1
    return codes[at].copysign(x).to(E4M3)


def nan_past(x: Tensor) -> Tensor:
    """The cast that does not saturate."""
    held = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return torch.where(x.abs() > 464, 0x7F | (held & 0x80), held).view(E4M3)


EXACT = amax().clamp(min=1e-4) / 448
RIGHT = up(EXACT)
STORED_LATE = "values are divided by the unrounded scale and a power of two is stored"
PAST = " and what is past 464 becomes NaN"
UNROUNDED = "the scale is not rounded up to a power of two"
V4: dict[str, Any] = {"style": "v4-q"}


def other(scale: Tensor) -> Callable[[], Outputs]:
    """A quantiser that only has another scale."""
    return partial(write, scale)


def reweighted(weights: Tensor) -> Callable[[], Outputs]:
    """A quantiser that only has other weights."""
    return lambda: write(RIGHT) | {"weights": weights}


def shared(dims: Any) -> Tensor:  # noqa: ANN401 - a dimension or several
    """The scale of one amax over dimensions of tokens and heads."""
    return up(amax().amax(dims, keepdim=True).expand(TOKENS, HEADS).clamp(min=1e-4) / 448)


def grouped(size: int) -> Tensor:
    """The scale of one amax over so many heads."""
    groups = amax().view(TOKENS, -1, size).amax(2).repeat_interleave(size, 1)
    return up(groups.clamp(min=1e-4) / 448)


FAULTS: dict[str, tuple[Callable[[], Outputs], str]] = {
    "late-rounding": (partial(write, EXACT, RIGHT), STORED_LATE),
    "unrounded": (other(EXACT), UNROUNDED),
    "rounded-down": (other(down(EXACT)), "the scale is rounded down to a power of two"),
    "overflow": (
        partial(write, down(EXACT), cast=nan_past),
        f"the scale is rounded down to a power of two{PAST}",
    ),
    "rounded-nearest": (
        other(EXACT.double().log2().round().exp2().float()),
        "the scale is rounded to the nearest power of two, not up",
    ),
    "undivided-amax": (other(up(amax().clamp(min=1e-4))), "amax is not divided by 448"),
    "fnuz-largest": (
        other(up(amax().clamp(min=1e-4) / 240)),
        "amax is divided by 240, the largest of e4m3fnuz",
    ),
    "no-floor": (other(up(amax() / 448)), "amax has no floor"),
    "floor-1e-10": (other(up(amax().clamp(min=1e-10) / 448)), "amax has the floor 1e-10"),
    "late-floor": (
        other(up((amax() / 448).clamp(min=1e-4))),
        "the floor is applied to the scale, not to amax",
    ),
    "of-tensor": (other(shared((0, 1))), "one amax is taken over the whole tensor"),
    "of-token": (other(shared(1)), "one amax is taken over all heads of a token"),
    "of-head": (other(shared(0)), "one amax is taken over all tokens of a head"),
    **{
        f"of-{size}-heads": (other(grouped(size)), f"one amax is taken over {size} heads")
        for size in (2, 4, 8, 16, 32)
    },
    "signed": (
        other(up(X.amax(-1).clamp(min=1e-4) / 448)),
        "the largest value is taken, not the largest magnitude",
    ),
    "undivided": (
        lambda: write(RIGHT) | {"values": X.clamp(-448, 448).to(E4M3)},
        "values are not divided by the scale",
    ),
    "inverted": (partial(write, RIGHT, 1 / RIGHT), "1 / scale is stored"),
    "fnuz-read": (
        partial(write, RIGHT, cast=lambda x: x.to(E4M3).view(FNUZ).float().to(E4M3)),
        "e4m3fn bytes are read as e4m3fnuz: its exponent bias is 8, so values are half",
    ),
    "fnuz-written": (
        partial(write, RIGHT, cast=lambda x: x.clamp(-240, 240).to(FNUZ).view(E4M3)),
        "e4m3fnuz bytes are written: their exponent bias is 8, so e4m3fn values double",
    ),
    "half-away": (partial(write, RIGHT, cast=away), "a tie is rounded away from zero, not to even"),
    "toward-zero": (partial(write, RIGHT, cast=toward), "values are cut toward zero"),
    "through-bf16": (
        partial(write, RIGHT, cast=lambda x: x.bfloat16().to(E4M3)),
        "x / scale is rounded to bf16 first",
    ),
    "unscaled-weights": (
        reweighted(GATE * FACTORS[0] * FACTORS[1]),
        "q's scale is not in the weights",
    ),
    "no-softmax": (reweighted(GATE * RIGHT * FACTORS[1]), "D^-0.5 is not in the weights"),
    "no-heads": (reweighted(GATE * RIGHT * FACTORS[0]), "H^-0.5 is not in the weights"),
    "bf16-weights": (
        reweighted((GATE * RIGHT * FACTORS[0] * FACTORS[1]).bfloat16().float()),
        "weights are rounded to bf16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_in_every_output_it_changes(name: str) -> None:
    """The whole candidate narrows the causes to the one that was planted."""
    make, cause = FAULTS[name]
    want = quant.quantize_q(**QUERIES, **V4)
    got = told(QUERIES, V4, want, make())
    assert got
    for stage, text in got.items():
        # What overflows is seen in values alone.
        one = cause if stage == "values" else cause.removesuffix(PAST)
        assert text.split(" (")[0] == f"as when {one}"


@pytest.mark.parametrize("name", FAULTS)
def test_one_row_alone_tells_its_cause_or_that_and_another_or_nothing(name: str) -> None:
    """Never a cause that does not fit; where three have the same bits, as in zeros, none."""
    make, cause = FAULTS[name]
    want, got = quant.quantize_q(**QUERIES, **V4), make()
    for stage, right in want.items():
        texts = [
            reading(
                stage=stage,
                inputs=QUERIES,
                params=V4,
                want=right[row : row + 1],
                got=got[stage][row : row + 1],
                rows=torch.tensor([row]),
            )
            for row in wrong_rows(right, got[stage]).tolist()
        ]
        one = cause if stage == "values" else cause.removesuffix(PAST)
        for text in filter(None, texts):
            causes = text.removeprefix("as when ").split(" (")[0].split(", or ")
            assert one in causes
            assert len(causes) <= 2
        assert any(texts) or not texts


def test_the_floor_of_another_engine_is_told() -> None:
    """Quiet tokens of V3.2 under the floor of V4."""
    style = {"style": "v3.2-q"}
    found = told(QUERIES, style, quant.quantize_q(**QUERIES, style="v3.2-q"), write(RIGHT))
    assert found
    assert set(found.values()) == {"as when amax has the floor 0.0001"}


def test_a_wrong_row_that_fits_nothing_has_no_reading() -> None:
    """One bit of one value, scale or weight is told by no cause; nor is a right row by any."""
    want = quant.quantize_q(**QUERIES, **V4)
    for stage, right in want.items():
        flipped = bits.as_int(right).clone()
        flipped.view(-1)[7] ^= 1
        assert told(QUERIES, V4, want, want | {stage: flipped.view(right.dtype)}) == {stage: ""}


@pytest.mark.parametrize("style", ["v3.2-q", "v4-q"])
def test_a_right_quantiser_is_equal_by_whatever_way_it_divides(style: str) -> None:
    """With bf16 inputs: a reciprocal of 448 or of the scale, a float logarithm, another order."""
    held: dict[str, Any] = {"x": X[:, :16].bfloat16(), "weights": GATE[:, :16]}
    x = held["x"].float()
    floored = amax(x).clamp(min=quant.STYLES[style].floor)
    scale = (floored * torch.tensor(1 / 448)).log2().ceil().exp2()
    got = {
        "values": (x * (1 / scale)[..., None]).to(E4M3),
        "scale": scale,
        "weights": held["weights"] * 16**-0.5 * scale * DIM**-0.5,
    }
    assert told(held, {"style": style}, quant.quantize_q(**held, style=style), got) == {}


@pytest.mark.parametrize("style", quant.STYLES)
def test_whatever_numbers_are_wrong_they_are_read_without_a_crash(style: str) -> None:
    """NaNs, infinities, zeros and subnormals as inputs, and as what is wrong."""
    inf = float("inf")
    cells = torch.tensor([float("nan"), inf, -inf, 0.0, -0.0, 2.0**-140, 1.0, 3e38])
    x = cells[torch.cartesian_prod(*[torch.arange(8)] * 2)].view(16, 4, 2)
    want = quant.quantize_q(x=x, weights=x[..., 0], style=style)
    got = {"values": x.flip(0).to(E4M3), "scale": x[..., 1], "weights": x[..., 1]}
    found = told({"x": x, "weights": x[..., 0]}, {"style": style}, want, got)
    assert found == {"values": "", "scale": "", "weights": ""}


def tied_keys() -> Tensor:
    """Keys of 200 sizes, and of each the values at ties between codes."""
    size = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) + 1
    return torch.cat([size, size / 448 * torch.arange(17.0, 33, 2)], 1)


KEYS = tied_keys()
BY_448, BY_RECIPROCAL = amax(KEYS) / 448, amax(KEYS) * torch.tensor(1 / 448)


def keys(scale: Tensor, *, values: Tensor | None = None) -> Outputs:
    """Keys by a scale."""
    by = KEYS / scale[:, None] if values is None else values
    return {"values": by.clamp(-448, 448).to(E4M3), "scale": scale}


ROUNDED = "the scale is rounded up to a power of two, which the style does not do"


@pytest.mark.parametrize(
    ("style", "got", "cause"),
    [
        (
            "k-exact",
            keys(up(BY_448)),
            f"{ROUNDED} (per-token ratio 1.004 to 1.979)",
        ),
        (
            "k-exact",
            keys(BY_448, values=KEYS * (1 / BY_448)[:, None]),
            "x is multiplied by 1 / scale, not divided by it",
        ),
        (
            "k-exact-deepgemm",
            keys(BY_448),
            "x is divided by the scale, not multiplied by 1 / scale",
        ),
        (
            "k-exact",
            keys(BY_RECIPROCAL),
            "amax is multiplied by 1 / 448, not divided by 448",
        ),
        (
            "k-exact-tilelang",
            keys(BY_448),
            "amax is divided by 448, not multiplied by 1 / 448",
        ),
    ],
)
def test_an_unrounded_scale_tells_the_way_of_dividing(style: str, got: Outputs, cause: str) -> None:
    """A last bit of the scale, or a tie that falls the other way."""
    found = told({"x": KEYS}, {"style": style}, quant.quantize_k(x=KEYS, style=style), got)
    assert found
    assert set(found.values()) == {f"as when {cause}"}


def test_three_tokens_inflated_by_one_to_two_are_told_by_their_ratios() -> None:
    """Scales 1.0, 1.01 and 1.99 become 1, 2 and 2: the tokens grow 1.0, 1.98 and 1.005 times."""
    scale = torch.tensor([1.0, 1.01, 1.99])
    x = scale[:, None] * torch.linspace(448, -400, 64)
    want = quant.quantize_k(x=x, style="k")
    got = {
        "values": (x / scale[:, None]).clamp(-448, 448).to(E4M3),
        "scale": torch.tensor([1.0, 2.0, 2.0]),
    }
    grown = got["values"].float()[:, 0] * got["scale"] / x[:, 0]
    assert grown.tolist() == pytest.approx([1.0, 1.98, 1.005], abs=1e-3)
    assert wrong_rows(want["values"], got["values"]).tolist() == [1, 2]
    assert told({"x": x}, {"style": "k"}, want, got) == {
        "values": f"as when {STORED_LATE} (per-token ratio 1.005 to 1.98)"
    }


def test_a_logarithm_in_fp32_is_told_by_the_rows_that_stay_right() -> None:
    """The token an ulp above 448 * 2^20 alone is wrong: nothing is rounded down elsewhere."""
    x = torch.tensor([[448.0 * 2**20], [3.0], [1.5 * 2**20], [5e3]])
    x[0] = x[0].nextafter(torch.tensor(float("inf")))
    scale = (x[:, 0] / 448).log2().ceil().exp2()
    got = {"values": (x / scale[:, None]).clamp(-448, 448).to(E4M3), "scale": scale}
    want = quant.quantize_k(x=x, style="k")
    text = "as when log2 of the scale is rounded to fp32 before it is rounded up"
    assert told({"x": x}, {"style": "k"}, want, got) == {"values": text, "scale": text}
    assert wrong_rows(want["scale"], scale).tolist() == [0]
    # Alone it may as well be rounded down, or to the nearest.
    one = {name: held[:1] for name, held in got.items()}
    assert told({"x": x}, {"style": "k"}, {"scale": want["scale"][:1]}, one) == {"scale": ""}


ORDER = "as when weights are folded in the order "


@pytest.mark.parametrize(
    ("style", "factors", "heads", "text"),
    [
        ("sglang-q", "hqs", 20, None),
        (
            "sglang-q",
            "qsh",
            20,
            f"{ORDER}q_scale, softmax, heads, or {ORDER[8:]}softmax, heads, q_scale",
        ),
        ("sglang-q", "hqs", HEADS, "as when H^-0.5 is that of the padded heads"),
        ("k-exact", "qsh", 20, None),
        ("k-exact", "hqs", 20, f"{ORDER}heads, q_scale, softmax"),
        ("k-exact", "shq", 20, f"{ORDER}softmax, heads, q_scale"),
    ],
)
def test_weights_in_another_order_are_told_as_far_as_the_bits_show_it(
    style: str, factors: str, heads: int, text: str | None
) -> None:
    """A power of two may stand anywhere among the factors: two orders then have the same bits."""
    params: dict[str, Any] = {"style": style, "heads": 20, "softmax_scale": 0.1}
    want = quant.quantize_q(**QUERIES, **params)
    each = {"q": want["scale"], "s": torch.tensor(0.1), "h": torch.tensor(heads**-0.5)}
    weights = GATE
    for factor in factors:
        weights = weights * each[factor]
    found = told(QUERIES, params, want, want | {"weights": weights})
    assert found == ({} if text is None else {"weights": text})


def test_every_cause_in_the_table_is_planted_by_some_test() -> None:
    """By its name above, or in one of the tests of floors, unrounded scales, logs and orders."""
    elsewhere = {
        "rounded",
        "float-log",
        "values-by-reciprocal",
        "values-by-divide",
        "amax-by-reciprocal",
        "amax-by-divide",
        "padded-heads",
        *(f"order-{order}" for order in quant.ORDERS),
        "floor-0.0001",
    }
    assert set(misquantised.FAULTS) == set(FAULTS) | elsewhere


# --- gathers -------------------------------------------------------------------------------------

SIZE, KEY = 4, 16


def pool() -> dict[str, Tensor]:
    """Six pages of 4 keys of 16 values, and requests of 6, 7 and 3 keys out of order."""
    made = torch.Generator().manual_seed(0)
    values = torch.randn(6 * SIZE, KEY, generator=made).mul(50).to(E4M3)
    scale = torch.rand(6 * SIZE, generator=made) + 0.5
    return {
        "kv_cache": pages.pack_keys(values=values, scale=scale, page_size=SIZE),
        "block_table": torch.tensor([[2, 4], [1, 0], [5, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([6, 7, 3], dtype=torch.int32),
    }


POOL = pool()
PAGED = {"page_size": SIZE}
KEPT = [(r, at) for r, length in enumerate((6, 7, 3)) for at in range(length)]


def read(
    cache: Tensor = POOL["kv_cache"],
    *,
    page: Callable[[int, int], int] = lambda r, at: int(POOL["block_table"][r, at // SIZE]),
    kept: list[tuple[int, int]] = KEPT,
    interleaved: bool = False,
    swapped: bool = False,
) -> Outputs:
    """Keys byte by byte out of planar or interleaved pages."""
    values, scales = [], []
    for request, at in kept:
        held, token = cache[page(request, at)].tolist(), at % SIZE
        key, scale = token * KEY, SIZE * KEY + token * 4
        if interleaved:
            key, scale = token * (KEY + 4), token * (KEY + 4) + KEY
        if swapped:
            key, scale = SIZE * 4 + token * KEY, token * 4
        values.append(held[key : key + KEY])
        scales.append(held[scale : scale + 4])
    return {
        "values": torch.tensor(values, dtype=torch.uint8).view(E4M3),
        "k_scale": torch.tensor(scales, dtype=torch.uint8).view(torch.float32)[:, 0],
    }


def interleave(cache: Tensor) -> Tensor:
    """The same keys, each with its scale behind it."""
    values, scale = cache[:, : SIZE * KEY], cache[:, SIZE * KEY :]
    both = torch.cat([values.view(-1, SIZE, KEY), scale.view(-1, SIZE, 4)], 2)
    return both.flatten(1)


RIGHT_KEYS = pages.gather_batch(**POOL, page_size=SIZE)
WHOLE = [(r, at) for r in range(3) for at in range(8)][: len(KEPT)]
GATHERS: dict[str, tuple[Outputs, str]] = {
    "interleaved": (read(interleaved=True), "a planar page is read as interleaved"),
    "written-interleaved": (
        read(interleave(POOL["kv_cache"])),
        "an interleaved page is read as planar",
    ),
    "scales-first": (read(swapped=True), "the scales of a page are read before its values"),
    "logical-pages": (
        read(page=lambda _, at: at // SIZE),
        "pages are read by their logical numbers, without block_table",
    ),
    "first-request": (
        read(page=lambda _, at: int(POOL["block_table"][0, at // SIZE])),
        "every request reads the pages of request 0",
    ),
    "whole-pages": (
        read(kept=WHOLE),
        "whole pages are gathered and the requests not cut to their lengths",
    ),
    "inverted": (RIGHT_KEYS | {"k_scale": 1 / RIGHT_KEYS["k_scale"]}, "1 / scale is given"),
    "fnuz-read": (
        RIGHT_KEYS | {"values": RIGHT_KEYS["values"].view(torch.uint8).view(FNUZ).float().to(E4M3)},
        "e4m3fn bytes are read as e4m3fnuz: its exponent bias is 8, so values are half",
    ),
    "fnuz-written": (
        RIGHT_KEYS | {"values": RIGHT_KEYS["values"].float().clamp(-240, 240).to(FNUZ).view(E4M3)},
        "e4m3fnuz bytes are written: their exponent bias is 8, so e4m3fn values double",
    ),
}
DRIFT = ": from token 1 of each page on, 4 bytes of drift a token"


def test_the_slow_reader_reads_planar_pages_right() -> None:
    """The reader of these tests, without a fault, gives the reference's bytes."""
    assert told(POOL, PAGED, RIGHT_KEYS, read()) == {}


@pytest.mark.parametrize("name", misgathered.FAULTS)
def test_a_wrong_gather_is_told_in_every_output_it_changes(name: str) -> None:
    """Over three requests, whole batch or one row."""
    got, cause = GATHERS[name]
    found = told(POOL, PAGED, RIGHT_KEYS, got)
    assert found
    assert {text.removesuffix(DRIFT) for text in found.values()} == {f"as when {cause}"}
    for stage, right in RIGHT_KEYS.items():
        for row in wrong_rows(right, got[stage]).tolist():
            one = slice(row, row + 1)
            text = reading(
                stage=stage,
                inputs=POOL,
                params=PAGED,
                want=right[one],
                got=got[stage][one],
                rows=torch.tensor([row]),
            )
            assert cause in text


def test_two_planar_pages_read_as_interleaved_go_wrong_from_token_1_of_each_page() -> None:
    """Page 4, D 16, 2 pages: token 0 has its values in both layouts, the last one its scale."""
    held = POOL | {
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([8], dtype=torch.int32),
    }
    want = pages.gather_batch(**held, page_size=SIZE)
    got = read(kept=[(0, at) for at in range(8)], page=lambda _, at: at // SIZE, interleaved=True)
    assert wrong_rows(want["values"], got["values"]).tolist() == [1, 2, 3, 5, 6, 7]
    assert wrong_rows(want["k_scale"], got["k_scale"]).tolist() == [0, 1, 2, 4, 5, 6]
    page = "as when a planar page is read as interleaved"
    assert told(held, PAGED, want, got) == {"values": f"{page}{DRIFT}", "k_scale": page}


def test_a_fault_that_would_leave_the_cache_is_not_tried() -> None:
    """Request 0 reads its one page three times: there is no page 2 to be read by that number."""
    held = {
        "kv_cache": POOL["kv_cache"][:2],
        "block_table": torch.tensor([[1, 1, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([12], dtype=torch.int32),
    }
    want = pages.gather_batch(**held, page_size=SIZE)
    got = want | {"k_scale": want["k_scale"].flip(0)}
    assert told(held, PAGED, want, got) == {"k_scale": ""}


def test_an_output_of_another_dtype_beside_it_narrows_nothing() -> None:
    """Scales in fp64 agree with no cause: the reading is that of the values alone."""
    want = quant.quantize_q(**QUERIES, **V4)
    got = write(EXACT, RIGHT)
    text = reading(
        stage="values",
        inputs=QUERIES,
        params=V4,
        want=want["values"],
        got=got["values"],
        rows=torch.arange(TOKENS),
        beside={"scale": got["scale"].double()},
    )
    assert text.split(" (")[0] == f"as when {STORED_LATE}, or {UNROUNDED}"


def test_the_tables_of_gathers_are_the_same() -> None:
    """Every cause in the table is planted, and no other."""
    assert set(GATHERS) == set(misgathered.FAULTS)


def test_a_page_of_one_token_hides_the_layout() -> None:
    """Value and scale follow each other either way."""
    cache = POOL["kv_cache"][:, : KEY + 4]
    held = {
        "kv_cache": cache,
        "block_table": torch.arange(6, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([6], dtype=torch.int32),
    }
    want = pages.gather_batch(**held, page_size=1)
    got = {
        "values": cache[:, :KEY].view(E4M3),
        "k_scale": cache[:, KEY:].contiguous().view(torch.float32)[:, 0],
    }
    assert told(held, {"page_size": 1}, want, got) == {}
