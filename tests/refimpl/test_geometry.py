"""Windows, compressed lengths and row chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import twin
from hypothesis import given
from hypothesis import strategies as st

from refimpl.geometry import (
    PLAN_STYLES,
    chunk_plan,
    compressed_lengths,
    plan_width,
    qsa_visible_blocks,
    ragged_windows,
)

REQUESTS = st.lists(
    st.integers(0, 12).flatmap(lambda seq: st.tuples(st.integers(0, seq), st.just(seq))),
    max_size=5,
)
STYLES = st.sampled_from(sorted(PLAN_STYLES))


def test_windows_of_a_batch_are_absolute_and_causal() -> None:
    """Extends 3 and 2 of sequences 10 and 4 see columns 0-8, 0-9, 0-10, 10-13 and 10-14."""
    start, end, owner = ragged_windows(extend_lens=[3, 2], seq_lens=[10, 4])
    assert start.tolist() == [0, 0, 0, 10, 10]
    assert end.tolist() == [8, 9, 10, 13, 14]
    assert owner.tolist() == [0, 0, 0, 1, 1]
    assert {start.dtype, end.dtype, owner.dtype} == {torch.int32}


def test_compressed_windows_hold_only_whole_columns() -> None:
    """At ratio 4 a sequence of 10 has two columns; its rows at 7, 8 and 9 see both."""
    start, end, owner = ragged_windows(extend_lens=[3, 2], seq_lens=[10, 4], ratio=4)
    assert (start.tolist(), end.tolist(), owner.tolist()) == (
        [0, 0, 0, 2, 2],
        [2, 2, 2, 2, 3],
        [0, 0, 0, 1, 1],
    )


@given(requests=REQUESTS)
def test_windows_are_those_of_the_twin(requests: list[tuple[int, int]]) -> None:
    """Every row has the window the scalar second reference gives it, batches of none included."""
    extends, totals = [e for e, _ in requests], [s for _, s in requests]
    start, end, owner = ragged_windows(extend_lens=extends, seq_lens=totals)
    assert (start.tolist(), end.tolist()) == twin.windows(extends, totals)
    assert owner.tolist() == [r for r, extend in enumerate(extends) for _ in range(extend)]


@given(requests=REQUESTS, ratio=st.sampled_from([1, 2, 4]))
def test_compressed_windows_start_after_the_columns_of_earlier_requests(
    requests: list[tuple[int, int]], ratio: int
) -> None:
    """At any ratio a request starts after the whole columns of the ones before it."""
    want, first = [], 0
    for extend, total in requests:
        seen = (twin.compressed_visible(p, ratio) for p in range(total - extend, total))
        want += [(first, first + visible) for visible in seen]
        first += total // ratio
    start, end, _ = ragged_windows(
        extend_lens=[e for e, _ in requests], seq_lens=[s for _, s in requests], ratio=ratio
    )
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == want


def test_lengths_may_be_tensors() -> None:
    """Tensors and plain numbers give the same windows."""
    want = ragged_windows(extend_lens=[3, 0, 2], seq_lens=[10, 5, 4])
    got = ragged_windows(
        extend_lens=torch.tensor([3, 0, 2], dtype=torch.int32), seq_lens=torch.tensor([10, 5, 4])
    )
    assert [t.tolist() for t in got] == [t.tolist() for t in want]


@pytest.mark.parametrize(
    ("extends", "totals", "sentence"),
    [
        (
            [3, 5],
            [10, 4],
            "request 1 extends by 5 of 4 tokens; an extend is 0 or more and at most the length",
        ),
        (
            [-1],
            [4],
            "request 0 extends by -1 of 4 tokens; an extend is 0 or more and at most the length",
        ),
        ([3], [10, 4], "extend_lens [1] and seq_lens [2] are not one length a request"),
    ],
)
def test_impossible_lengths_are_named(extends: list[int], totals: list[int], sentence: str) -> None:
    """Lengths that no batch can have raise with the request and both numbers."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole sentence is compared below
        ragged_windows(extend_lens=extends, seq_lens=totals)
    assert str(raised.value) == sentence


@given(
    positions=st.lists(st.integers(-1, 50), max_size=8),
    ratio=st.sampled_from([1, 2, 4, 128]),
    slack=st.integers(-3, 3),
)
def test_visible_columns_are_those_of_the_twin(
    positions: list[int], ratio: int, slack: int
) -> None:
    """Compressed lengths and QSA blocks equal the scalar formulas, padding rows included."""
    at = torch.tensor(positions, dtype=torch.int64)
    lengths = [max(0, p + slack) for p in positions]
    assert compressed_lengths(positions=at, ratio=ratio).tolist() == [
        twin.compressed_visible(p, ratio) for p in positions
    ]
    got = qsa_visible_blocks(positions=at, seq_lens=torch.tensor(lengths, dtype=torch.int32))
    assert got.dtype == torch.int32
    assert got.tolist() == [
        twin.qsa_visible_blocks(p, n) for p, n in zip(positions, lengths, strict=True)
    ]


@given(
    rows=st.integers(0, 40_000),
    columns=st.integers(0, 600_000),
    budget=st.integers(0, 1 << 32),
    name=STYLES,
)
def test_a_plan_covers_every_row_once_and_keeps_to_its_budget(
    rows: int, columns: int, budget: int, name: str
) -> None:
    """Chunks follow one another from the first row to the last and are equal but for the last.

    One of more rows than the quantum stays under the budget, padding counted.
    """
    style = PLAN_STYLES[name]
    plan = chunk_plan(rows=rows, columns=columns, budget_bytes=budget, style=style)
    assert [*(start for start, _ in plan), rows] == [0, *(end for _, end in plan)]
    sizes = [end - start for start, end in plan]
    assert all(size >= 1 for size in sizes)
    assert len(set(sizes[:-1])) <= 1
    width = plan_width(columns=columns, style=style)
    for size in sizes:
        fits = size * width * style.element_bytes <= budget
        assert fits or size <= style.row_quantum or rows * columns < style.unsplit_below


@given(rows=st.integers(1, 300), columns=st.integers(1, 4096), name=STYLES)
def test_a_short_context_is_one_chunk(rows: int, columns: int, name: str) -> None:
    """What fits the budget is not cut."""
    assert chunk_plan(
        rows=rows, columns=columns, budget_bytes=512 << 20, style=PLAN_STYLES[name]
    ) == [(0, rows)]


@pytest.mark.parametrize(
    ("name", "columns", "step"),
    [
        ("dsa", 487_936, 1100),  # 2 GiB // (4 * 487,936)
        ("dsa", 487_937, 1100),
        ("v4.1", 487_936, 1100),  # a multiple of 256 and of 4 rows
        ("v4.1", 488_000, 1096),  # counted as 488,192 columns: 1099 rows, floored
        ("vllm", 487_936, 1100),
        ("qsa", 487_937, 1100),  # counted as 488,000
        ("qsa", 10, 8_388_608),  # counted as 64
    ],
)
def test_each_engine_counts_a_row_its_own_way(name: str, columns: int, step: int) -> None:
    """Rows of a 2 GiB chunk, by style."""
    plan = chunk_plan(
        rows=10_000_000, columns=columns, budget_bytes=2 << 30, style=PLAN_STYLES[name]
    )
    assert plan[0] == (0, step)
    assert plan[-1][1] == 10_000_000


def test_no_budget_is_too_small_for_a_row() -> None:
    """With no bytes at all a chunk is one row, or one quantum."""
    rows, columns = 10, 2_000_000
    assert {
        name: [
            end - start
            for start, end in chunk_plan(rows=rows, columns=columns, budget_bytes=0, style=style)
        ]
        for name, style in PLAN_STYLES.items()
    } == {"dsa": [1] * 10, "v4.1": [4, 4, 2], "vllm": [1] * 10, "qsa": [1] * 10}


def test_the_quantum_of_v41_follows_its_heads() -> None:
    """64 heads floor rows to 2, by a style with another quantum."""
    style = replace(PLAN_STYLES["v4.1"], row_quantum=128 // 64)
    plan = chunk_plan(rows=10, columns=1024, budget_bytes=3 * 4096, style=style)
    assert plan == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize(
    ("heads", "step"), [(None, 4), (8, 16), (16, 8), (24, 5), (32, 4), (64, 2), (128, 1), (256, 1)]
)
def test_a_plan_told_the_heads_takes_its_quantum_from_them(heads: int | None, step: int) -> None:
    """128 heads make a quantum in v4.1; a style without such a rule does not look at heads."""

    def first(name: str) -> tuple[int, int]:
        style = PLAN_STYLES[name]
        return chunk_plan(rows=100, columns=10, budget_bytes=0, style=style, heads=heads)[0]

    assert first("v4.1") == (0, step)
    assert first("vllm") == (0, 1)


def test_qsa_pads_no_wider_than_the_page_table() -> None:
    """A table of 24 keys caps the 64 columns a QSA row is counted as."""
    style = PLAN_STYLES["qsa"]
    assert plan_width(columns=10, style=style) == 64
    assert plan_width(columns=10, style=style, widest=24) == 24
    plan = chunk_plan(rows=4, columns=10, budget_bytes=2 * 24 * 4, style=style, widest=24)
    assert plan == [(0, 2), (2, 4)]


def test_dsa_never_cuts_a_small_launch() -> None:
    """Fewer than 8,000,000 scores are one chunk under any budget."""
    style = PLAN_STYLES["dsa"]
    assert chunk_plan(rows=8, columns=999_999, budget_bytes=0, style=style) == [(0, 8)]
    assert len(chunk_plan(rows=8, columns=1_000_000, budget_bytes=0, style=style)) == 8


def test_a_style_has_its_default_budget() -> None:
    """512 MiB in vLLM; DSA takes a share of free memory and must be told."""
    plan = chunk_plan(rows=16384, columns=60_000, style=PLAN_STYLES["vllm"])
    assert plan[0] == (0, (512 << 20) // 240_000)
    with pytest.raises(ValueError, match="give the budget_bytes it ran with"):
        chunk_plan(rows=1, columns=1, style=PLAN_STYLES["dsa"])


@given(rows=st.integers(1, 5000), columns=st.integers(1, 50_000), name=STYLES)
def test_a_larger_budget_makes_no_more_chunks(rows: int, columns: int, name: str) -> None:
    """Chunks grow with the budget."""
    counts = [
        len(chunk_plan(rows=rows, columns=columns, budget_bytes=b << 20, style=PLAN_STYLES[name]))
        for b in (1, 16, 256)
    ]
    assert all(few >= many for few, many in pairwise(counts))
