"""Logits agree with the twin cell by cell, and windows decide only what is written."""

from typing import Any, Literal

import pytest
import torch
import twin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refimpl import tensorcore, tiles
from refimpl.bits import E4M3, as_int
from refimpl.scoring import PROFILES, mqa_logits, paged_mqa_logits, qsa_logits
from refimpl.tensorcore import INSTRUCTIONS, Instruction

MINUS_INF = float("-inf")
WEIGHT = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x3F800000, 0xBF000000]),
)


def codes(generator: torch.Generator, *shape: int) -> Tensor:
    """Rounded normal numbers as e4m3."""
    return torch.randn(*shape, generator=generator).to(E4M3)


def dense(rows: int, columns: int, *, heads: int = 16, dim: int = 32) -> dict[str, Any]:
    """Inputs of `mqa_logits` in which every row sees every column."""
    g = torch.Generator().manual_seed(rows * columns)
    return {
        "q": codes(g, rows, heads, dim),
        "k": codes(g, columns, dim),
        "k_scale": torch.rand(columns, generator=g),
        "weights": torch.randn(rows, heads, generator=g),
        "row_start": torch.zeros(rows, dtype=torch.int32),
        "row_end": torch.full((rows,), columns, dtype=torch.int32),
    }


def words(x: Tensor) -> list[int]:
    """Fp32 as unsigned bits."""
    return [bits & 0xFFFFFFFF for bits in as_int(x).flatten().tolist()]


def fp32(bits: list[int]) -> Tensor:
    """Fp32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def int32(*values: int) -> Tensor:
    """A window bound."""
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=40)
@given(
    st.sampled_from([16, 24]),
    st.lists(WEIGHT, min_size=24, max_size=24),
    st.lists(WEIGHT, min_size=2, max_size=2),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0xFF, 0xBF, 0x8F]),
)
def test_mqa_logits_are_the_twin_s(
    heads: int, weights: list[int], scales: list[int], seed: int, keep: int
) -> None:
    """Any bytes under any weights and scales, infinite and NaN ones too, give the twin's bits."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 256, (heads, 32), generator=g, dtype=torch.uint8) & keep
    k = torch.randint(0, 256, (2, 32), generator=g, dtype=torch.uint8) & keep
    got = mqa_logits(
        q=q.view(E4M3)[None],
        k=k.view(E4M3),
        k_scale=fp32(scales),
        weights=fp32(weights[:heads])[None],
        row_start=int32(0),
        row_end=int32(2),
    )
    want = [twin.mqa_logit(q.tolist(), k[j].tolist(), scales[j], weights[:heads]) for j in range(2)]
    assert words(got) == want


@settings(max_examples=40)
@given(
    st.sampled_from(["bf16", "e4m3"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0xFFFF, 0xBFBF, 0x8F8F]),
)
def test_qsa_logits_are_the_twin_s(dtype: Literal["bf16", "e4m3"], seed: int, keep: int) -> None:
    """Any bf16 or e4m3 bits in 4 heads give the twin's bits."""
    g = torch.Generator().manual_seed(seed)
    width, view, kind = {
        "bf16": (0x10000, torch.int16, torch.bfloat16),
        "e4m3": (0x100, torch.uint8, E4M3),
    }[dtype]
    q = torch.randint(0, width, (4, 32), generator=g) & keep
    k = torch.randint(0, width, (2, 32), generator=g) & keep
    got = qsa_logits(
        q=q.to(view).view(kind)[None],
        k_cache=k.to(view).view(kind).view(1, 2, 1, 32),
        page_table=int32(0)[None],
        visible_blocks=int32(2),
        page_size=2,
    )
    assert words(got) == [twin.qsa_logit(q.tolist(), k[j].tolist(), dtype) for j in range(2)]


def test_windows_decide_only_what_is_written() -> None:
    """Inside its window a row has the logits of the full call, outside it -inf."""
    case = dense(7, 300)
    full = mqa_logits(**case)
    start, end = int32(0, 5, 5, 9, 200, 4, 0), int32(300, 105, 106, 9, 300, 3, 1)
    got = mqa_logits(**case | {"row_start": start, "row_end": end})
    column = torch.arange(300)
    inside = (column >= start[:, None]) & (column < end[:, None])
    assert torch.equal(got, torch.where(inside, full, MINUS_INF))


def test_strange_windows_are_empty() -> None:
    """Backward and negative windows write nothing, and columns past L do not exist."""
    case = dense(4, 20) | {"row_start": int32(9, -3, 0, 18), "row_end": int32(2, 5, -1, 90)}
    got = mqa_logits(**case)
    assert (got[:3] == MINUS_INF).all()
    assert got[3].isfinite().tolist() == [False] * 18 + [True] * 2


def test_row_relative_logits_are_the_absolute_ones_moved() -> None:
    """Cell j of a row-relative result is column row_start + j."""
    start, end = int32(0, 5, 17), int32(20, 25, 40)
    case = dense(3, 40) | {"row_start": start, "row_end": end}
    absolute = mqa_logits(**case)
    moved = mqa_logits(**case, columns="row-relative", width=24)
    assert moved.shape == (3, 24)
    for row, (i, j) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        assert torch.equal(moved[row, : j - i], absolute[row, i:j])
        assert (moved[row, j - i :] == MINUS_INF).all()


def test_rows_do_not_know_their_companions() -> None:
    """Each row alone has the bits it has among others."""
    case = dense(5, 130) | {"row_end": int32(130, 129, 128, 127, 126)}
    whole = mqa_logits(**case)
    names = ("q", "weights", "row_start", "row_end")
    for row in range(5):
        alone = {name: case[name][row : row + 1] for name in names}
        assert torch.equal(mqa_logits(**case | alone), whole[row : row + 1])


@pytest.mark.parametrize("shape", [(36, 1), (1, 36)])
def test_paged_logits_are_the_dense_ones(shape: tuple[int, int]) -> None:
    """Scattered planar pages score as the keys they hold, for each row's own length."""
    g = torch.Generator().manual_seed(3)
    pages, size, dim = 9, 4, 32
    cache = torch.zeros(pages, size * (dim + 4), dtype=torch.uint8)
    k, scale = codes(g, pages * size, dim), torch.rand(pages * size, generator=g)
    cache[:, : size * dim] = as_int(k).view(pages, -1)
    cache[:, size * dim :] = scale.view(torch.uint8).view(pages, -1)
    table = int32(3, 8, 1, 5, 2, 7, 0, 0).view(2, 4)
    case = dense(4, 16)
    lens = int32(16, 15, 5, 0).view(2, 2)
    got = paged_mqa_logits(
        q=case["q"].view(2, 2, 16, dim),
        kv_cache=cache if shape[1] == 1 else cache.view(pages, size, 1, dim + 4),
        weights=case["weights"],
        context_lens=lens,
        block_table=table,
        page_size=size,
    )
    for row in range(4):
        slots = (table[row // 2, :, None] * size + torch.arange(size)).flatten()
        mine = {name: case[name][row : row + 1] for name in ("q", "weights", "row_start")}
        end = lens.flatten()[row : row + 1]
        want = mqa_logits(**mine, k=k[slots], k_scale=scale[slots], row_end=end)
        assert torch.equal(got[row : row + 1], want)


def test_qsa_requests_read_their_own_pages() -> None:
    """query_start_loc gives each row its request's page table."""
    g = torch.Generator().manual_seed(4)
    q, cache = codes(g, 3, 4, 32), codes(g, 5, 2, 1, 32)
    table, visible = int32(3, 1, 4, 2).view(2, 2), int32(4, 3, 4)
    call: dict[str, Any] = {"k_cache": cache, "page_size": 2}
    got = qsa_logits(
        q=q, page_table=table, visible_blocks=visible, query_start_loc=int32(0, 1, 3), **call
    )
    for row, request in enumerate((0, 1, 1)):
        mine = slice(row, row + 1)
        alone = qsa_logits(
            q=q[mine],
            page_table=table[request : request + 1],
            visible_blocks=visible[mine],
            **call,
        )
        assert torch.equal(got[mine], alone)


def test_exact_is_the_formula_in_fp64() -> None:
    """`exact` rounds the fp64 value of the formula once; the kernel's bits lie near it."""
    case = dense(3, 50)
    got = mqa_logits(**case, arithmetic="exact")
    q, k = case["q"].double(), case["k"].double()
    dots = torch.einsum("thd,ld->thl", q, k).relu()
    want = torch.einsum("th,thl->tl", case["weights"].double(), dots) * case["k_scale"].double()
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mqa_logits(**case), got, rtol=0, atol=1e-2)


def test_exact_scores_bf16_and_e4m3_qsa() -> None:
    """`exact` serves qsa logits of both dtypes, and its bf16 bits do not depend on the rows."""
    g = torch.Generator().manual_seed(5)
    for dtype in (torch.bfloat16, E4M3):
        q = torch.randn(6, 4, 32, generator=g).to(dtype)
        cache = torch.randn(1, 8, 1, 32, generator=g).to(dtype)
        call: dict[str, Any] = {"k_cache": cache, "page_table": int32(0)[None], "page_size": 8}
        got = qsa_logits(q=q, visible_blocks=int32(*[8] * 6), arithmetic="exact", **call)
        want = torch.einsum("thd,ld->thl", q.double(), cache[0, :, 0].double()).relu().sum(1)
        torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6)
        alone = qsa_logits(q=q[2:3], visible_blocks=int32(8), arithmetic="exact", **call)
        assert torch.equal(alone, got[2:3])


def test_blocks_bound_every_accumulator() -> None:
    """However long rows are and however many there are, a chain gets one block, inside windows."""
    cells, asked = [], 0

    def spy(a: Tensor, b: Tensor, *, instruction: Instruction) -> Tensor:
        nonlocal asked
        cells.append(max(a.shape[0], 64) * max(b.shape[0], 64))
        asked += a.shape[0] * b.shape[0]
        return tensorcore.accumulate(a[:, :32], b[:1, :32], instruction=instruction).expand(
            -1, b.shape[0]
        )

    long = dense(1, 50_000)
    mqa_logits(**long, accumulate=spy)
    assert asked == 16 * 50_000
    many = dense(3000, 40) | {"row_end": (torch.arange(3000) % 40).to(torch.int32)}
    asked = 0
    mqa_logits(**many, accumulate=spy)
    visible = 16 * int(many["row_end"].sum())
    assert visible <= asked <= visible * 9 / 8
    assert max(cells) <= tiles.TILES["cpu"].cells


def test_the_chain_is_a_seam() -> None:
    """What `accumulate` returns is what is reduced, and it learns the profile's instruction."""
    seen = []

    def zeros(a: Tensor, b: Tensor, *, instruction: Instruction) -> Tensor:
        seen.append(instruction)
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)

    case = dense(1, 3) | {"weights": -torch.ones(1, 16)}
    assert words(mqa_logits(**case, accumulate=zeros)) == [0x80000000] * 3
    assert seen == [INSTRUCTIONS["sm90.wgmma.e4m3"]]


def test_profiles_are_named_and_sourced() -> None:
    """Each profile is filed under its own name and says where its numbers come from."""
    assert list(PROFILES) == ["deep_gemm.sm90", "vllm_qsa_prefill.sm90", "exact"]
    assert all(name == row.name and row.source for name, row in PROFILES.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arithmetic": "deep_gemm.sm80"}, "arithmetic is 'deep_gemm.sm80': known are deep_gemm"),
        ({"arithmetic": "vllm_qsa_prefill.sm90"}, "computes no mqa logits"),
        ({"columns": "slot"}, "columns is 'slot'"),
        ({"width": 19}, "width is 19: the absolute windows need 20 cells"),
        ({"k_scale": torch.ones(19)}, r"k_scale is torch.float32 \[19\]: k makes it .* \[20\]"),
        ({"row_end": torch.zeros(2, dtype=torch.int64)}, r"row_end is torch.int64 \[2\]"),
        ({"q": torch.zeros(2, 12, 32).to(E4M3)}, r"q has 12 heads: .* multiple of 8, at least 16"),
        ({"q": torch.zeros(2, 8, 32).to(E4M3)}, "q has 8 heads"),
        ({"q": torch.zeros(2, 16, 64).to(E4M3)}, "with D 64 and the keys are .* with D 32"),
        ({"q": torch.zeros(2, 16, 32)}, "q is torch.float32 with D 32"),
        (
            {"q": torch.zeros(2, 16, 48).to(E4M3), "k": torch.zeros(20, 48).to(E4M3)},
            "q has D 48: deep_gemm.sm90 takes a multiple of 32",
        ),
        (
            {"q": torch.zeros(2, 16, 32).bfloat16(), "k": torch.zeros(20, 32).bfloat16()},
            "q is torch.bfloat16: it is e4m3",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    """A wrong dtype, shape or setting is refused with the name and both values."""
    case = dense(2, 20)
    weights = {"weights": torch.zeros(change["q"].shape[:2])} if "q" in change else {}
    with pytest.raises(ValueError, match=message):
        mqa_logits(**case | weights | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": int32(7)[None]}, "page_table has page 7 inside a window: .* has 1 pages"),
        ({"q": torch.zeros(1, 8, 32).to(E4M3)}, "q has 8 heads: qsa logits have 4"),
        ({"page_size": 4}, "k_cache has 2 keys a page and page_size is 4"),
        ({"arithmetic": "deep_gemm.sm90"}, "computes no qsa logits"),
        ({"query_start_loc": int32(0, 2)}, r"query_start_loc is \[0, 2\]"),
    ],
)
def test_qsa_inputs_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    """A page outside the cache, another head count or row split is refused with the values."""
    case: dict[str, Any] = {
        "q": torch.zeros(1, 4, 32).to(E4M3),
        "k_cache": torch.zeros(1, 2, 1, 32).to(E4M3),
        "page_table": int32(0)[None],
        "visible_blocks": int32(2),
        "page_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        qsa_logits(**case | change)
