"""Seeded cases that publish a mask, apply one, or pick under one."""

from dataclasses import replace

import torch
from torch import Tensor

from equivalence import draws
from equivalence.case import JSON, Case
from equivalence.draws import Scores, Spans
from refimpl import forms, masks
from refimpl.blocks import BLOCK


def publish_mask(
    seed: int,
    *,
    spans: Spans,
    topk_blocks: int,
    scores: Scores | None = None,
    tail: int | None = None,
    name: str = "publish_mask",
) -> Case:
    """Scores whose best blocks are published.

    Args:
        seed: of everything.
        spans: windows of the rows; the rows of a request stand together.
        topk_blocks: blocks a row publishes.
        scores: see `draws.Scores`.
        tail: only so many last rows of each request are published.
        name: of the case.
    """
    random = torch.Generator().manual_seed(seed)
    columns = max(end for _, end in spans)
    like = scores or Scores()
    tensors = {
        "scores": draws.scores(random, like, spans, topk_blocks * BLOCK, columns),
        **rows_of(spans),
    }
    if tail is not None:
        starts = torch.tensor([start for start, _ in spans])
        _, extend = torch.unique_consecutive(starts, return_counts=True)
        tensors["rows"] = masks.tail_rows(extend_lens=extend, tail=tail).int()
    return Case(
        op="publish_mask",
        inputs=tensors,
        params={"topk_blocks": topk_blocks},
        name=f"{name} seed {seed}",
    )


def apply_mask(seed: int, *, spans: Spans, topk_blocks: int, form: forms.Form = "bool") -> Case:
    """Scores and the mask that another layer published, in one of its forms."""
    source = publish_mask(seed, spans=spans, topk_blocks=topk_blocks)
    own = publish_mask(seed + 1, spans=spans, topk_blocks=topk_blocks)
    return Case(
        op="apply_mask",
        inputs={**own.inputs, **_published(source, form)},
        name=f"apply_mask {form} seed {seed}",
    )


def consumer(
    seed: int, *, spans: Spans, topk_blocks: int, k: int, form: forms.Form = "bool"
) -> Case:
    """Top-k among the columns that another layer published."""
    case = apply_mask(seed, spans=spans, topk_blocks=topk_blocks, form=form)
    return replace(
        case, op="ragged_topk", params={"k": k}, name=f"ragged_topk under {form} seed {seed}"
    )


def source(case: Case, *, topk_blocks: int, tail: int | None = None) -> Case:
    """A layer that also publishes; of its rows only the last `tail` of each request."""
    params: dict[str, JSON] = {**case.params, "topk_blocks": topk_blocks}
    tensors = dict(case.inputs)
    if tail is not None:
        extend = torch.unique_consecutive(tensors["row_start"], return_counts=True)[1]
        tensors["rows"] = masks.tail_rows(extend_lens=extend, tail=tail).int()
    return replace(case, inputs=tensors, params=params, name=f"{case.name} publishing")


def rows_of(spans: Spans) -> dict[str, Tensor]:
    """The windows as the inputs of an op."""
    start, end = torch.tensor(spans, dtype=torch.int32).reshape(-1, 2).unbind(1)
    return {"row_start": start.contiguous(), "row_end": end.contiguous()}


def _published(source: Case, form: forms.Form) -> dict[str, Tensor]:
    blocks = source.params["topk_blocks"]
    assert isinstance(blocks, int)  # noqa: S101 - it was put there above
    mask = masks.publish(
        scores=source.inputs["scores"],
        row_start=source.inputs["row_start"],
        row_end=source.inputs["row_end"],
        topk_blocks=blocks,
        form=form,
    )
    return {"block_ids" if mask.dtype is torch.int32 else "mask": mask}
