"""Kernels never leave the bound: measured and published models, and heads in any order."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import twin_mx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refimpl import bound, heads, mx, rounding, scoring, tensorcore, tiles
from refimpl.bits import E4M3
from refimpl.profiles import PUBLISHED, find
from refimpl.published import published_logits, values
from refimpl.rounding import ANY_DOT, Dot
from refimpl.scaled import BLOCK_SCALED, accumulate_scaled
from refimpl.tensorcore import INSTRUCTIONS, Instruction, fma, fma_bf16

MODELS = [name for name, row in PUBLISHED.items() if row.instructions is not None]
FORMATS = ["fp8", "mxfp8", "mxfp4"]
KINDS = ["random", "plateau", "cancelling", "outliers", "subnormal", "positive", "huge", "few"]
ROWS, COLUMNS, HEADS, DIM = 2, 24, 16, 128


def inputs(kind: str, seed: int, *, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, weights and k_scale in fp32 of one kind of trouble."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, heads, DIM, generator=g)
    k = torch.randn(COLUMNS, DIM, generator=g)
    w = torch.randn(ROWS, heads, generator=g)
    scale = torch.rand(COLUMNS, generator=g) + 0.01
    if kind == "plateau":
        q, k, w = q.abs(), -k.abs(), w.abs()
        k[::3] = -k[0]
    elif kind == "cancelling":
        q[:, 1::2], w[:, 1::2] = q[:, ::2], -w[:, ::2] * (1 + 2.0**-7)
    elif kind == "outliers":
        q[:, :, seed % DIM] *= 150
        k[:, (seed // 2) % DIM] *= 150
        w[:, seed % heads] *= 1000
    elif kind == "subnormal":
        q, k, w, scale = q * 2.0**-8, k * 2.0**-8, w * 2.0**-60, scale * 2.0**-64
    elif kind == "positive":
        q, k, w = q.abs(), k.abs(), w.abs()
    elif kind == "huge":
        w, scale = w * 2.0**60, scale * 2.0**50
    elif kind == "few":
        q, k = q.sign() * (q.abs() > 1), k.sign() * (k.abs() > 1)
    return q, k, w, scale


def operands(form: str, kind: str, seed: int, *, heads: int = HEADS) -> dict[str, Any]:
    """The same as a scoring call takes them."""
    q, k, w, scale = inputs(kind, seed, heads=heads)
    if form == "mxfp4":
        (a, a_scale), (b, b_scale) = mx.quantize(q), mx.quantize(k)
        return {"q": a, "q_scale": a_scale, "k": b, "k_scale": b_scale, "weights": w}
    got: dict[str, Any] = {"q": q.to(E4M3), "k": k.to(E4M3), "weights": w, "k_scale": scale}
    if form == "mxfp8":
        g = torch.Generator().manual_seed(seed)
        low, high = {"huge": (150, 170), "subnormal": (60, 70)}.get(kind, (115, 135))
        for name, shape in (("q_scale", (ROWS, heads, 4)), ("k_scale", (COLUMNS, 4))):
            got[name] = torch.randint(low, high, shape, generator=g, dtype=torch.uint8)
    return got


def share(got: Tensor, both: tuple[Tensor, Tensor]) -> float:
    """The largest part of its bound that an error uses up; more than 1 is a bound broken."""
    scores, limit = both
    error = (got.double() - scores).abs()
    assert scores.isfinite().all()
    used = torch.where(error == 0, 0.0, error / limit)
    return float(torch.where(limit.isinf(), 0.0, used).max())


def windows(columns: int = COLUMNS) -> dict[str, Any]:
    """Rows that see every column."""
    zero = torch.zeros(ROWS, dtype=torch.int32)
    return {"row_start": zero, "row_end": zero + columns}


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.sampled_from([16, 32]))
def test_the_measured_kernel_stays_inside(kind: str, seed: int, count: int) -> None:
    """DeepGEMM on SM90, bit for bit, lies within its own bound and within that of `exact`."""
    case = operands("fp8", kind, seed, heads=count) | windows()
    got = scoring.mqa_logits(**case)
    for arithmetic in ("deep_gemm.sm90", "exact"):
        assert share(got, bound.mqa_bound(**case, arithmetic=arithmetic)) <= 1


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("arithmetic", MODELS)
@settings(max_examples=16)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
def test_published_kernels_stay_inside(form: str, arithmetic: str, kind: str, seed: int) -> None:
    """Each model of SM100 lies within its bound and within the one that knows no order."""
    case = operands(form, kind, seed)
    if find(arithmetic).sums is torch.bfloat16:
        case["weights"] = case["weights"].to(torch.bfloat16)
    got = published_logits(**case, arithmetic=arithmetic)
    vague = "exact" if find(arithmetic).logits is torch.float32 else "any_order.bf16"
    for name in (arithmetic, vague):
        assert share(got, bound.scores_and_bound(**case, arithmetic=name)) <= 1


FP32 = st.builds(
    lambda sign, exponent, fraction: sign << 31 | exponent << 23 | fraction,
    st.integers(0, 1),
    st.integers(100, 140),
    st.one_of(st.integers(0, 2**23 - 1), st.sampled_from([0, 0x8000, 0x7F8000, 0x18000])),
)


@given(st.lists(FP32, min_size=8, max_size=8), st.lists(FP32, min_size=8, max_size=8), FP32)
def test_packed_sums_are_the_twin_s(acc: list[int], weights: list[int], scale: int) -> None:
    """Lanes of fp32 sums have the twin's bits, with a scale and without."""
    a, w, s = (
        torch.tensor(x, dtype=torch.int64).to(torch.int32).view(torch.float32)
        for x in (acc, weights, [scale])
    )
    for bits, factor in ((None, None), (scale, s)):
        got = heads.reduce_packed(a[None, :, None], w[None], factor, sums=torch.float32)
        want = twin_mx.packed_sum(acc, weights, bits)
        assert int(got.view(torch.int32)) & 0xFFFFFFFF == want


@given(
    st.lists(FP32, min_size=8, max_size=8),
    st.lists(FP32.map(lambda x: x >> 16), min_size=8, max_size=8),
)
def test_packed_bf16_sums_are_the_twin_s(acc: list[int], weights: list[int]) -> None:
    """Lanes of bf16 sums are rounded once a step."""
    a = torch.tensor(acc, dtype=torch.int64).to(torch.int32).view(torch.float32)
    w = torch.tensor(weights, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = heads.reduce_packed(a[None, :, None], w[None], None, sums=torch.bfloat16)
    want = torch.tensor([[twin_mx.packed_bf16(acc, weights) << 16]], dtype=torch.int64)
    assert torch.equal(got, want.to(torch.int32).view(torch.float32))


def test_a_fused_bf16_product_is_rounded_once() -> None:
    """261 / 256 lies halfway between two bf16: what is added decides, however small."""
    a, b, c = (
        torch.tensor(x).to(torch.bfloat16)
        for x in ([3.0] * 3, [87 / 256] * 3, [-(2.0**-60), 0, 2.0**-60])
    )
    assert (fma_bf16(a, b, c).float() * 128).tolist() == [130, 130, 131]


def in_any_order(r: Tensor, w: Tensor, *, seed: int, sums: torch.dtype, fused: bool) -> Tensor:
    """Sum w * r [R, H, n] along a random tree, every step rounded to `sums`."""
    g = torch.Generator().manual_seed(seed)
    terms: list[Tensor] = []
    for head in torch.randperm(r.shape[1], generator=g).tolist():
        x, y = r[:, head].to(sums), w[:, head, None].to(sums)
        if fused and terms and torch.rand((), generator=g) < 0.5:
            step = fma if sums is torch.float32 else fma_bf16
            terms[-1] = step(x, y.expand_as(x), terms[-1])
        else:
            terms.append(x * y)
    while len(terms) > 1:
        at = int(torch.randint(len(terms) - 1, (1,), generator=g))
        terms[at : at + 2] = [terms[at] + terms[at + 1]]
    return terms[0]


@pytest.mark.parametrize("row", ["sm90.wgmma.e4m3", "sm89.mma.e4m3", "sm100.f8f6f4.e4m3"])
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
@settings(max_examples=20)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), fused=st.booleans())
def test_any_order_stays_inside(
    row: str,
    sums: torch.dtype,
    kind: str,
    seed: int,
    fused: bool,  # noqa: FBT001 - drawn by name
) -> None:
    """Heads in any order, fused or not, on any tensor core, keep the bound that knows nothing."""
    case = operands("fp8", kind, seed)
    a, w = case["q"].flatten(0, 1), case["weights"]
    acc = tensorcore.accumulate(a, case["k"], instruction=INSTRUCTIONS[row]).view(ROWS, HEADS, -1)
    total = in_any_order(heads.relu(acc), w, seed=seed, sums=sums, fused=fused)
    got = (total.float() * case["k_scale"]).to(sums)
    arithmetic = "exact" if sums is torch.float32 else "any_order.bf16"
    assert share(got, bound.scores_and_bound(**case, arithmetic=arithmetic)) <= 1


@settings(max_examples=40)
@given(st.sampled_from(["bf16", "e4m3"]), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_qsa_stays_inside(dtype: str, kind: str, seed: int) -> None:
    """The QSA prefill kernel lies within its own bound and within that of `exact`."""
    q, k, _, _ = inputs(kind, seed, heads=4)
    cast = {"bf16": torch.bfloat16, "e4m3": E4M3}[dtype]
    case: dict[str, Any] = {
        "q": q.to(cast),
        "k_cache": k.to(cast).view(3, 8, 1, DIM),
        "page_table": torch.tensor([[2, 0, 1]], dtype=torch.int32),
        "visible_blocks": torch.tensor([24, 13], dtype=torch.int32),
        "page_size": 8,
    }
    got = scoring.qsa_logits(**case)
    for arithmetic in ("vllm_qsa_prefill.sm90", "exact"):
        scores, limit = bound.qsa_bound(**case, arithmetic=arithmetic)
        assert torch.equal(scores.isneginf(), got.isneginf())
        seen = ~got.isneginf()
        assert share(got[seen], (scores[seen], limit[seen])) <= 1


LEAST = {
    "deep_gemm.sm90": 0.1,
    "deep_gemm.sm100": 0.05,
    "deep_gemm.sm100.bf16_logits": 0.8,
    "deep_gemm.sm100.bf16_sums": 0.2,
}


@pytest.mark.parametrize("arithmetic", LEAST)
def test_bounds_are_no_wider_than_they_must_be(arithmetic: str) -> None:
    """The largest error of positive inputs is far more than a hundredth of its bound."""
    case = operands("fp8", "positive", 7, heads=64)
    if arithmetic == "deep_gemm.sm90":
        got = scoring.mqa_logits(**case, **windows())
    else:
        if find(arithmetic).sums is torch.bfloat16:
            case["weights"] = case["weights"].to(torch.bfloat16)
        got = published_logits(**case, arithmetic=arithmetic)
    used = share(got, bound.scores_and_bound(**case, arithmetic=arithmetic))
    assert LEAST[arithmetic] <= used <= 1


@pytest.mark.parametrize(
    ("kernel", "arithmetic"),
    [
        ("deep_gemm.sm90", "deep_gemm.sm100"),
        ("deep_gemm.sm100.bf16_logits", "deep_gemm.sm100"),
        ("deep_gemm.sm100.bf16_sums", "deep_gemm.sm100.bf16_logits"),
    ],
)
def test_a_coarser_kernel_leaves_a_finer_bound(kernel: str, arithmetic: str) -> None:
    """F 13 is no F 25, and bf16 is no fp32: the bound of the finer one is broken."""
    case = operands("fp8", "random", 7)
    case["weights"] = case["weights"].to(torch.bfloat16).float()
    if kernel == "deep_gemm.sm90":
        got = scoring.mqa_logits(**case, **windows())
    else:
        got = published_logits(**case, arithmetic=kernel)
    assert share(got, bound.scores_and_bound(**case, arithmetic=arithmetic)) > 1


@pytest.mark.parametrize(
    ("bf16", "arithmetic"),
    [(2.0**-11, "deep_gemm.sm100.bf16_sums"), (2.0**-9, "deep_gemm.sm100.bf16_logits")],
)
def test_half_a_unit_is_needed(
    monkeypatch: pytest.MonkeyPatch, bf16: float, arithmetic: str
) -> None:
    """With a smaller unit of rounding the bound is broken by the model."""
    case = operands("fp8", "positive", 7)
    monkeypatch.setitem(rounding._UNIT, torch.bfloat16, bf16)
    got = published_logits(**case, arithmetic=arithmetic)
    assert share(got, bound.scores_and_bound(**case, arithmetic=arithmetic)) > 1


def dot_of(row: Instruction, **change: int) -> Dot:
    """What the bound takes an instruction to be, or something else."""
    bits = {"e8m13": 13, "fp32": 23}[row.output]
    dot = Dot(k=row.k, span=row.k, fraction_bits=row.fraction_bits, output_bits=bits)
    return replace(dot, group=row.group, **change)


def dots_and_model(name: str, seed: int, dot: Dot | None = None) -> float:
    """How much of the bound of its dots a tensor core uses up, on numbers of many sizes."""
    row = {**INSTRUCTIONS, **BLOCK_SCALED}[name]
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, DIM, generator=g) for n in (5, 40))
    x, y = (t * 2.0 ** torch.randint(-(seed % 7), 1, t.shape, generator=g) for t in (x, y))
    if seed % 2:
        x, y = x.abs(), y.abs()
    a_scale, b_scale = (
        torch.randint(127 - seed % 12, 128, (len(t), 4), generator=g).to(torch.uint8)
        for t in (x, y)
    )
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if name in BLOCK_SCALED:
        scales = a_scale, b_scale
        a, b = (t.to(E4M3) if row.operand is E4M3 else mx.encode_e2m1(t) for t in (x, y))
        acc = accumulate_scaled(
            values(a),
            values(b),
            a_scale=mx.decode_ue8m0(a_scale),
            b_scale=mx.decode_ue8m0(b_scale),
            instruction=row,
        )
    else:
        a, b = x.to(row.operand), y.to(row.operand)
        acc = tensorcore.accumulate(a, b, instruction=row)
    dot = dot or dot_of(row)
    both = [
        rounding.operand(t, scale, group=dot.group) for t, scale in zip((a, b), scales, strict=True)
    ]
    return share(acc, rounding.dots(*both, dot=dot))


@pytest.mark.parametrize("name", [*INSTRUCTIONS, *BLOCK_SCALED])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_dots_stay_inside(name: str, seed: int) -> None:
    """Every tensor core keeps the bound of its numbers, and that of no known tensor core."""
    assert dots_and_model(name, seed) <= 1
    assert dots_and_model(name, seed, ANY_DOT) <= 1


@pytest.mark.parametrize("name", [*INSTRUCTIONS, *BLOCK_SCALED])
def test_bounds_of_dots_are_tight(name: str) -> None:
    """The largest error of a tensor core is far more than a hundredth of its bound."""
    assert 0.03 <= max(dots_and_model(name, seed) for seed in range(20)) <= 1


@pytest.mark.parametrize("name", [*INSTRUCTIONS, *BLOCK_SCALED])
def test_every_bit_of_a_dot_is_needed(name: str) -> None:
    """A bound that grants a tensor core more fraction bits than it has is broken."""
    row = {**INSTRUCTIONS, **BLOCK_SCALED}[name]
    fault = dot_of(row, fraction_bits=row.fraction_bits + 6, output_bits=30)
    assert max(dots_and_model(name, seed, fault) for seed in range(20)) > 1


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_a_bound_without_an_order_is_no_wider_than_a_hundred_errors(sums: torch.dtype) -> None:
    """Of positive inputs summed in a chain, the worst order, an error is a hundredth of it."""
    case = operands("fp8", "positive", 3)
    a, w = case["q"].flatten(0, 1), case["weights"]
    acc = tensorcore.accumulate(a, case["k"], instruction=INSTRUCTIONS["sm90.wgmma.e4m3"])
    total = torch.zeros(ROWS, COLUMNS, dtype=sums)
    for head in range(HEADS):
        total = total + acc.view(ROWS, HEADS, -1)[:, head].to(sums) * w[:, head, None].to(sums)
    got = (total.float() * case["k_scale"]).to(sums)
    arithmetic = "exact" if sums is torch.float32 else "any_order.bf16"
    assert 0.01 <= share(got, bound.scores_and_bound(**case, arithmetic=arithmetic)) <= 1


@pytest.mark.parametrize("last", [0.0, -1.0])
def test_swallowed_heads_stay_inside(last: float) -> None:
    """Thirty heads of just under half a unit each vanish in a chain, also where its end cancels."""
    q, k = torch.zeros(1, 32, DIM), torch.zeros(1, DIM)
    q[:, :, 0] = k[:, 0] = 1
    w = torch.full((1, 32), 0.99 * 2.0**-8).to(torch.bfloat16)
    w[0, 0], w[0, -1] = 1, last
    total = torch.zeros((), dtype=torch.bfloat16)
    for head in w[0]:
        total = total + head
    assert total == 1 + last
    case = {"q": q.to(E4M3), "k": k.to(E4M3), "weights": w}
    used = share(total[None, None], bound.scores_and_bound(**case, arithmetic="any_order.bf16"))
    assert 0.3 < used <= 1


def test_scores_are_the_formula_s() -> None:
    """Scores are sums of w * relu(q . k) * scale in fp64, of fp4 with the scales of the blocks."""
    case = operands("fp8", "random", 5)
    dots = torch.einsum("thd,ld->thl", case["q"].double(), case["k"].double())
    want = (dots.clamp(min=0) * case["weights"].double()[:, :, None]).sum(1) * case["k_scale"]
    got = bound.scores_and_bound(**case)[0]
    assert torch.allclose(got, want, rtol=1e-14, atol=1e-14)
    case = operands("mxfp4", "random", 5)
    q, k = (mx.dequantize(case[n], case[f"{n}_scale"]).double() for n in ("q", "k"))
    dots = torch.einsum("thd,ld->thl", q, k)
    want = (dots.clamp(min=0) * case["weights"].double()[:, :, None]).sum(1)
    got = bound.scores_and_bound(**case)[0]
    assert torch.allclose(got, want, rtol=1e-14, atol=1e-14)


def test_where_no_head_is_positive_the_bound_is_zero() -> None:
    """A column whose every dot is surely negative scores 0 in every kernel."""
    case = operands("fp8", "plateau", 1)
    for arithmetic in ("exact", "deep_gemm.sm90", "any_order.bf16", *MODELS):
        scores, limit = bound.scores_and_bound(**case, arithmetic=arithmetic)
        dead = torch.arange(COLUMNS) % 3 != 0
        assert not scores[:, dead].any()
        assert not limit[:, dead].any()
        assert (limit[:, ~dead] > 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("weights", math.inf), ("weights", math.nan), ("k_scale", math.inf), ("weights", 3e38)],
)
def test_nothing_is_claimed_past_the_range(name: str, value: float) -> None:
    """Where an operand is not finite or a sum may overflow, the bound is inf."""
    case = operands("fp8", "positive", 1)
    case[name] = torch.full_like(case[name], value)
    for arithmetic in ("exact", "deep_gemm.sm100.bf16_sums"):
        assert bound.scores_and_bound(**case, arithmetic=arithmetic)[1].isposinf().all()


def test_a_nan_spoils_its_own_column_only() -> None:
    """A NaN key is bounded by inf, and its neighbours as before."""
    case = operands("fp8", "random", 1)
    before = bound.scores_and_bound(**case)
    case["k"][3, 5] = math.nan
    after = bound.scores_and_bound(**case)
    others = torch.arange(COLUMNS) != 3
    assert after[1][:, 3].isposinf().all()
    assert all(torch.equal(a[:, others], b[:, others]) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_paged_is_dense(form: str) -> None:
    """Keys in planar pages have the scores and bounds of the same keys in one tensor."""
    case = operands(form, "random", 9)
    table = torch.tensor([[4, 1, 3], [0, 2, 5]], dtype=torch.int32)
    payload, scales = case["k"].view(torch.uint8), case["k_scale"].view(COLUMNS, -1)
    keys = scales.view(torch.uint8)
    planes = [x.reshape(6, 4, -1).flatten(1) for x in (payload, keys)]
    cache = torch.cat(planes, 1)
    lens = torch.tensor([[11], [9]], dtype=torch.int32)
    more = {"q_scale": case["q_scale"][:, None]} if form != "fp8" else {}
    got = bound.paged_mqa_bound(
        q=case["q"][:, None],
        kv_cache=cache,
        weights=case["weights"],
        context_lens=lens,
        block_table=table,
        page_size=4,
        **more,
    )
    for request in range(2):
        at = (table[request].long()[:, None] * 4 + torch.arange(4)).flatten()
        length = int(lens[request])
        part = {n: case[n][request : request + 1] for n in ("q", "weights")}
        part |= {n: case[n][at] for n in ("k", "k_scale")}
        part |= {n: case[n][request : request + 1] for n in more}
        want = bound.scores_and_bound(**part)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x[request, :length], y[0, :length])
        assert got[0][request, length:].isneginf().all()
        assert not got[1][request, length:].any()


def test_blocks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many columns there are, no block holds more cells than a tile."""
    sizes = []

    def block(q: Tensor, q_scale: None, k: Tensor, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
        sizes.append(q.shape[0] * q.shape[1] * k.shape[0])
        return rounding.block(q, q_scale, k, *rest, **more)

    monkeypatch.setattr(bound, "block", block)
    case = operands("fp8", "random", 4)
    case |= {"k": case["k"].repeat(300, 1), "k_scale": case["k_scale"].repeat(300)}
    got = bound.scores_and_bound(**case)
    assert sum(sizes) == ROWS * HEADS * COLUMNS * 300
    assert max(sizes) <= bound._TILE["cpu"].cells
    assert torch.equal(got[0][:, :COLUMNS], got[0][:, -COLUMNS:])


def test_windows_and_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of any size give the same numbers up to fp64, and outside a window there is nothing."""
    case = operands("fp8", "random", 4)
    start = torch.tensor([3, 0], dtype=torch.int32)
    end = torch.tensor([20, 24], dtype=torch.int32)
    whole = bound.mqa_bound(**case, row_start=start, row_end=end)
    moved = bound.mqa_bound(**case, row_start=start, row_end=end, columns="row-relative")
    assert torch.equal(moved[0][0, :17], whole[0][0, 3:20])
    assert whole[0][0].isneginf().nonzero()[:, 0].tolist() == [0, 1, 2, 20, 21, 22, 23]
    assert not whole[1][0, :3].any()
    monkeypatch.setattr(bound, "_TILE", {"cpu": tiles.Tile(cells=HEADS * 5, columns=5)})
    cut = bound.mqa_bound(**case, row_start=start, row_end=end)
    assert torch.equal(cut[0], whole[0])
    assert torch.allclose(cut[1], whole[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arithmetic": "deep_gemm.sm80"}, "arithmetic is 'deep_gemm.sm80': known are deep_gemm"),
        ({"k": torch.zeros(3, 64).to(E4M3)}, "q is torch.float8_e4m3fn with 128 a head and the "),
        (
            {"weights": torch.ones(2, 3)},
            r"weights is torch.float32 \[2, 3\]: q makes it .* \[2, 16\]",
        ),
        ({"k_scale": torch.ones(3)}, r"k_scale is torch.float32 \[3\]: k makes it .* \[24\]"),
        ({"q_scale": torch.ones(2, 16, 4)}, "ue8m0 scales come with both q and k, or with neither"),
        ({"q": torch.zeros(2, 12, 128).to(E4M3), "weights": torch.ones(2, 12)}, "has 12 heads"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    """A call that fits no profile says what it has and what it takes."""
    case = operands("fp8", "random", 4) | {"arithmetic": "deep_gemm.sm90"} | change
    with pytest.raises(ValueError, match=message):
        bound.scores_and_bound(**case)
