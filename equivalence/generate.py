"""Seeded cases: the rows that kernels get wrong, small enough to print.

One seed gives one case.
Every dense case has the nine windows of `windows`; what its scores hold is named by `Scores`.
Cells outside a window score more than all inside it, so a row that reads them shows.
`forwards` is another kind: the prefills of a serving engine, at any scale (see `scenarios`).
Cases of masks, of QSA, of ranks and of their pages are made in `drawn`.
"""

import torch
from torch import Tensor

from equivalence import draws
from equivalence.case import JSON, Case
from equivalence.drawn import masks
from equivalence.drawn.compose import compose_pages, compose_sequence
from equivalence.drawn.decode import decode_indexer
from equivalence.drawn.qsa import expand_blocks, qsa_indexer
from equivalence.drawn.quant import gather_keys, move_tokens, quantize_k, quantize_q
from equivalence.drawn.ranks import gather_rows, merge_topk
from equivalence.draws import Form, Scores, Spans
from equivalence.errors import UsageError
from equivalence.scenarios import forwards
from refimpl import forms
from refimpl.bits import E4M3
from refimpl.blocks import BLOCK

__all__ = [
    "Scores",
    "apply_mask",
    "compose_pages",
    "compose_sequence",
    "consumer",
    "decode_indexer",
    "expand_blocks",
    "forwards",
    "gather_keys",
    "gather_rows",
    "merge_topk",
    "move_tokens",
    "mqa_logits",
    "prefill_indexer",
    "publish_mask",
    "qsa_indexer",
    "quantize_k",
    "quantize_q",
    "ragged_topk",
    "topk_pages",
    "translate_pages",
    "windows",
]


def windows(*, k: int, columns: int) -> Spans:
    """Nine windows over two requests [0, s) and [s, columns), s = columns * 2 // 5.

    Whole request 0, whole request 1, 2k columns with more behind them, k + 1, exactly k,
    k // 2 of request 0, one column, none, and whole request 1 again.

    Raises:
        UsageError: there are fewer than 6 k columns, or k is below 4.
    """
    if k < 4 or columns < 6 * k:  # noqa: PLR2004 - what so many different windows take
        raise UsageError(f"k is {k} and columns {columns}: k is 4 or more, columns 6 k or more")
    split = columns * 2 // 5
    lengths = [2 * k, k + 1, k]
    return [
        (0, split),
        (split, columns),
        *((split, split + length) for length in lengths),
        (0, k // 2),
        (split, split + 1),
        (split, split),
        (split, columns),
    ]


def ragged_topk(seed: int, *, scores: Scores | None = None, k: int = 16, columns: int = 96) -> Case:
    """Top-k of fp32 scores [9, columns]: selecting rows, short ones, an empty one."""
    random = torch.Generator().manual_seed(seed)
    spans = windows(k=k, columns=columns)
    return Case(
        op="ragged_topk",
        inputs={
            "scores": draws.scores(random, scores or Scores(), spans, k, columns),
            **_rows(spans),
        },
        params={"k": k},
        name=f"ragged_topk seed {seed}",
    )


def topk_pages(
    seed: int,
    *,
    form: Form = "page_table",
    scores: Scores | None = None,
    k: int = 16,
    columns: int = 96,
    page_size: int = 4,
    shared: bool = False,
) -> Case:
    """`ragged_topk` with a way to slots: a page table, a slot for every column, or an offset a row.

    Args:
        seed: of everything.
        form: the way; "offset" gives ragged_indices, the others page_indices.
        scores: see Scores.
        k: picks a row.
        columns: of both requests.
        page_size: keys a page of the table.
        shared: request 1 has its first page twice, so that two columns share a slot.
    """
    random = torch.Generator().manual_seed(seed)
    spans = windows(k=k, columns=columns)
    tensors = {
        "scores": draws.scores(random, scores or Scores(), spans, k, columns),
        **_rows(spans),
        **draws.slots(random, form, spans, columns, page_size, shared=shared),
    }
    params: dict[str, JSON] = {"k": k}
    if form == "page_table":
        params["page_size"] = page_size
    return Case(
        op="topk_pages", inputs=tensors, params=params, name=f"topk_pages {form} seed {seed}"
    )


def translate_pages(
    seed: int, *, rows: int = 6, k: int = 16, page_size: int = 64, first_page: int = 1 << 18
) -> Case:
    """Picks to translate; the default page numbers put every slot above 2**24, where fp32 ends."""
    random = torch.Generator().manual_seed(seed)
    table = 8
    pages = first_page + torch.randperm(4 * table, generator=random)[: 2 * table]
    raw = torch.stack(
        [torch.randperm(table * page_size, generator=random)[:k] for _ in range(rows)]
    )
    raw[0, k // 2 :] = -1
    return Case(
        op="translate_pages",
        inputs={
            "raw_indices": raw.int(),
            "page_table": pages.reshape(2, table).int(),
            "row_to_request": torch.arange(rows, dtype=torch.int32) % 2,
        },
        params={"page_size": page_size},
        name=f"translate_pages seed {seed}",
    )


def mqa_logits(
    seed: int,
    *,
    tie_rich: bool = True,
    scale: float = 1.0,
    k: int = 12,
    columns: int = 80,
    heads: int = 32,
    head_dim: int = 128,
) -> Case:
    """Dense scoring, DeepGEMM arithmetic, the windows of a top-k with this k.

    Args:
        seed: of everything.
        tie_rich: seven different keys repeat, one of them all zero; False gives distinct keys.
        scale: of the weights.
        k: only shapes the windows.
        columns: keys of both requests.
        heads: 16, 24, 32, ...
        head_dim: bytes a key, a multiple of 32.
    """
    random = torch.Generator().manual_seed(seed)
    spans = windows(k=k, columns=columns)
    keys, key_scales = draws.keys(random, columns, head_dim, tie_rich=tie_rich)
    return Case(
        op="mqa_logits",
        inputs={
            "q": torch.randn(len(spans), heads, head_dim, generator=random).to(E4M3),
            "k": keys,
            "k_scale": key_scales,
            "weights": torch.randn(len(spans), heads, generator=random) * scale,
            **_rows(spans),
        },
        arithmetic="deep_gemm.sm90",
        name=f"mqa_logits seed {seed}",
    )


def prefill_indexer(
    seed: int,
    *,
    form: Form = "page_table",
    tie_rich: bool = True,
    scale: float = 1.0,
    topk: int = 12,
    columns: int = 80,
    heads: int = 32,
    head_dim: int = 128,
    page_size: int = 4,
) -> Case:
    """A dense layer: the inputs of `mqa_logits` and one of the ways of `topk_pages`."""
    scoring = mqa_logits(
        seed,
        tie_rich=tie_rich,
        scale=scale,
        k=topk,
        columns=columns,
        heads=heads,
        head_dim=head_dim,
    )
    random = torch.Generator().manual_seed(seed + 1)
    spans = windows(k=topk, columns=columns)
    slots = draws.slots(random, form, spans, columns, page_size, shared=False)
    names = {"page_table": "block_table", "slot_map": "k_slots"}
    params: dict[str, JSON] = {"topk": topk}
    if form == "page_table":
        params["page_size"] = page_size
    return Case(
        op="prefill_indexer",
        inputs={**scoring.inputs, **{names.get(name, name): t for name, t in slots.items()}},
        params=params,
        arithmetic="deep_gemm.sm90",
        name=f"prefill_indexer {form} seed {seed}",
    )


def publish_mask(
    seed: int,
    *,
    scores: Scores | None = None,
    topk_blocks: int = 4,
    columns: int = 384,
    tail: int | None = None,
) -> Case:
    """Scores [9, columns] whose best blocks of 8 are published, ties at the block boundary.

    Args:
        seed: of everything.
        scores: see Scores.
        topk_blocks: blocks a row publishes.
        columns: of both requests, 48 for each block at least.
        tail: only the last so many rows of each request are published.
    """
    spans = _grouped(topk_blocks, columns)
    return masks.publish_mask(seed, spans=spans, topk_blocks=topk_blocks, scores=scores, tail=tail)


def apply_mask(
    seed: int, *, form: forms.Form = "bool", topk_blocks: int = 4, columns: int = 384
) -> Case:
    """Scores of a layer and the mask that another layer published, in one of its forms."""
    spans = _grouped(topk_blocks, columns)
    return masks.apply_mask(seed, spans=spans, topk_blocks=topk_blocks, form=form)


def consumer(
    seed: int,
    *,
    form: forms.Form = "bool",
    topk_blocks: int = 4,
    k: int = 12,
    columns: int = 384,
) -> Case:
    """Top-k of a layer among the columns that another layer published."""
    spans = _grouped(topk_blocks, columns)
    return masks.consumer(seed, spans=spans, topk_blocks=topk_blocks, k=k, form=form)


def _grouped(topk_blocks: int, columns: int) -> Spans:
    """The windows of a selection of blocks, request after request."""
    return sorted(windows(k=topk_blocks * BLOCK, columns=columns), key=lambda span: span[0])


def _rows(spans: Spans) -> dict[str, Tensor]:
    start, end = torch.tensor(spans, dtype=torch.int32).unbind(1)
    return {"row_start": start.contiguous(), "row_end": end.contiguous()}
