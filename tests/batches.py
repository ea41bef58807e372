"""Small batches of prefill_indexer: requests by their new rows and lengths, every way to slots."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equivalence import draws
from equivalence.case import JSON, Case
from equivalence.draws import Form
from refimpl.bits import E4M3
from refimpl.geometry import ragged_windows

HEADS, HEAD_DIM, TOPK, PAGE = 16, 32, 4, 4

Batch = list[tuple[int, int]]
Way = Callable[..., dict[str, Tensor]]

BATCHES: dict[str, Batch] = {
    "cold": [(9, 9)],
    "four cold prompts": [(3, 3), (4, 4), (2, 2), (5, 5)],
    "prefix hit": [(5, 17)],
    "prefill beside decode": [(6, 10), (1, 12), (1, 3), (1, 20)],
    "a request without new rows": [(3, 8), (0, 6), (4, 9)],
}
"""(new rows, tokens) of each request."""

DRAWN = st.lists(
    st.integers(0, 14).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))),
    max_size=4,
)


def case(
    batch: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    ratio: int = 1,
    form: Form = "page_table",
    tie_rich: bool = True,
    heads: int = HEADS,
    topk: int = TOPK,
) -> Case:
    """A batch with seeded values; with a page table of its own for each request."""
    random = torch.Generator().manual_seed(seed)
    start, end, owner = ragged_windows(
        extend_lens=[new for new, _ in batch], seq_lens=[total for _, total in batch], ratio=ratio
    )
    rows, columns = len(start), sum(total // ratio for _, total in batch)
    keys, scales = draws.keys(random, max(1, columns), HEAD_DIM, tie_rich=tie_rich)
    inputs = {
        "q": torch.randn(rows, heads, HEAD_DIM, generator=random).to(E4M3),
        "k": keys[:columns],
        "k_scale": scales[:columns],
        "weights": torch.randn(rows, heads, generator=random),
        "row_start": start,
        "row_end": end,
    }
    params: dict[str, JSON] = {"topk": topk}
    if form == "page_table":
        pages = max(1, *(-(-total // PAGE) for _, total in batch)) if batch else 1
        table = 1 + torch.randperm(max(1, len(batch)) * pages, generator=random)
        inputs |= {"block_table": table.reshape(-1, pages).int(), "row_to_request": owner}
        params["page_size"] = PAGE
    elif form == "slot_map":
        inputs["k_slots"] = 1 + torch.randperm(columns, generator=random)
    else:
        inputs["topk_indices_offset"] = torch.randint(
            1000, (rows,), generator=random, dtype=torch.int32
        )
    return Case(
        op="prefill_indexer",
        inputs=inputs,
        params=params,
        arithmetic="deep_gemm.sm90",
        name=f"{len(batch)} requests, {rows} rows of {columns} columns",
    )


def call(case: Case, way: Way, **how: Any) -> dict[str, Tensor]:  # noqa: ANN401 - keywords of a way
    """What a path gives for a case."""
    return way(**{**case.inputs, **case.params, **how})
