"""Published masks of a two-level selection: a source layer publishes, its consumers apply.

The forms of a mask are those of `forms`; every function works in blocks of rows,
so that it needs little beyond its inputs and its output.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from refimpl import bits, blocks, forms, topk
from refimpl.blocks import BLOCK

TAIL = 128


def tail_rows(*, extend_lens: Tensor, tail: int = TAIL) -> Tensor:
    """Rows that go on to the late layers: the last min(tail, extend) of each request.

    Args:
        extend_lens: rows of each request, int [B].
        tail: rows a request keeps.

    Returns:
        int64 row numbers, ascending.

    Source: SGLang 0.5.23 dsv4/attn_metadata_kernels.py:457 `late_layer_tail_layout`.
    """
    last = extend_lens.long().cumsum(0).repeat_interleave(extend_lens)
    row = torch.arange(len(last), device=extend_lens.device)
    return row[row >= last - tail]


def publish(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    topk_blocks: int,
    form: forms.Form = "bool",
    rows: Tensor | None = None,
    align: int = BLOCK,
    ties: blocks.Ties = "lowest",
    nan: blocks.Nan = "propagate",
    short_rows: Literal["identity", "any"] = "identity",
    zero_sign: topk.ZeroSign = "distinct",
    block_size: int = BLOCK,
) -> Tensor:
    """The mask a source layer publishes: each row's newest block and its best others.

    Args:
        scores: [T, L] fp32, bf16 or fp16; cells outside the windows are not read.
        row_start: [T] int32, first visible column; block 0 begins here.
        row_end: [T] int32, one past the last; a backward window is empty.
        topk_blocks: blocks a row publishes at most.
        form: of the result.
        rows: the row numbers to publish, int [n], as `tail_rows` gives them; all when None.
        align: bool masks have a multiple of this many columns, no fewer than the longest row's.
        ties: as in `blocks.kept_blocks`, and the next four.
        nan: where a NaN block stands.
        short_rows: whether a row of no more than topk_blocks publishes them all.
        zero_sign: whether -0 stands below +0.
        block_size: columns a block.

    Returns:
        [T, ...] or [n, ...] in the form; ids have min(topk_blocks, most blocks of a row) slots,
        under `ties="all"` as many as the row of most blocks.

    Raises:
        ValueError: what `blocks.block_scores` and `blocks.kept_blocks` raise, or an unknown form.
    """
    visible = blocks.visible_of(row_start=row_start, row_end=row_end, columns=scores.shape[1])
    wanted = torch.arange(len(scores), device=scores.device) if rows is None else rows.long()
    columns = forms.aligned(visible=visible[wanted], align=align)
    counts = blocks.block_counts(visible=visible[wanted], block_size=block_size)
    ids = int(counts.max()) if len(counts) else 0
    ids = ids if ties == "all" else min(topk_blocks, ids)
    out = forms.empty(form=form, rows=len(wanted), columns=columns, ids=ids, device=scores.device)
    for part in blocks.row_blocks(len(wanted), scores.shape[1]):
        row = wanted[part]
        best = blocks.block_scores(
            scores=scores[part] if rows is None else scores[row],
            row_start=row_start[row],
            row_end=row_end[row],
            nan="ignore" if nan == "ignore" else "propagate",
            block_size=block_size,
        )
        kept = blocks.kept_blocks(
            block_scores=best,
            blocks=counts[part],
            topk_blocks=topk_blocks,
            ties=ties,
            nan=nan,
            short_rows=short_rows,
            zero_sign=zero_sign,
        )
        forms.write_blocks(
            out[part], kept, visible=visible[row], columns=columns, form=form, block_size=block_size
        )
    return out


def apply(
    *,
    scores: Tensor,
    mask: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    out: Tensor | None = None,
    block_size: int = BLOCK,
) -> Tensor:
    """Scores with -inf wherever the row's mask or window does not admit, dirty tails included.

    Args:
        scores: [T, L] fp32, bf16 or fp16.
        mask: [T, ...] in any form, read as it is.
        row_start: [T] int32.
        row_end: [T] int32.
        out: [T, L], may be the scores themselves; a new tensor when None.
        block_size: columns a block.

    Raises:
        ValueError: what `forms.read` raises, or a window leaves the scores.
    """
    visible = blocks.visible_of(row_start=row_start, row_end=row_end, columns=scores.shape[1])
    _expect_rows(mask, scores)
    out = torch.empty_like(scores) if out is None else out
    for rows in blocks.row_blocks(*scores.shape):
        out[rows] = _masked(
            scores[rows],
            mask[rows],
            start=row_start[rows],
            visible=visible[rows],
            first=rows.start,
            block_size=block_size,
        )
    return out


def masked_topk(
    *,
    scores: Tensor,
    mask: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    k: int,
    short_rows: Literal["identity", "any"] = "identity",
    empty_rows: Literal["pad", "first"] = "pad",
    block_size: int = BLOCK,
    **order: Any,  # noqa: ANN401 - the other freedoms of topk.ragged_topk, passed on by name
) -> Tensor:
    """A consumer's picks: `ragged_topk(minus_inf="pad")` of the applied scores.

    From block ids only the scores of those blocks are read.

    Args:
        scores: [T, L] fp32, bf16 or fp16.
        mask: [T, ...] in any form.
        row_start: [T] int32.
        row_end: [T] int32.
        k: picks a row.
        short_rows: `identity` gives a row of at most k columns 0 .. visible-1, mask or no mask.
        empty_rows: `first` gives an empty row column 0.
        block_size: columns a block.
        order: order, ties, nan, zero_sign.

    Returns:
        [T, k] int32 relative to row_start; pads -1 follow the picks.

    Raises:
        ValueError: as `apply`.
    """
    visible = blocks.visible_of(row_start=row_start, row_end=row_end, columns=scores.shape[1])
    _expect_rows(mask, scores)
    picks = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    rule: dict[str, Any] = {"short_rows": "any", "minus_inf": "pad"}
    sparse = mask.dtype is torch.int32
    width = max(scores.shape[1], mask.shape[1] * block_size if sparse else 0)
    for rows in blocks.row_blocks(len(scores), width):
        cells, start, seen = scores[rows], row_start[rows], visible[rows]
        near = {"visible": seen, "first": rows.start, "block_size": block_size}
        if sparse:
            best = _block_picks(cells, mask[rows], start=start, k=k, **near, **rule, **order)
        else:
            cells = _masked(cells, mask[rows], start=start, **near)
            best = topk.ragged_topk(
                scores=cells, row_start=start, row_end=start + seen, k=k, **rule, **order
            )
        # Of no columns at all only the identity and the empty rows are left.
        fixed = topk.ragged_topk(
            scores=cells[:, :0],
            row_start=torch.zeros_like(seen),
            row_end=seen,
            k=k,
            short_rows=short_rows,
            empty_rows=empty_rows,
        )
        short = seen <= (k if short_rows == "identity" else 0)
        picks[rows] = torch.where(short[:, None], fixed, best)
    return picks


def pad_minus_inf(
    *,
    raw_indices: Tensor,
    scores: Tensor,
    row_start: Tensor,
    nan: Literal["pick", "pad"] = "pick",
) -> Tensor:
    """Picks of applied scores, a pick at -inf made a pad where it stands: it may leave a hole.

    Args:
        raw_indices: [T, k] int32 relative to row_start, pads -1.
        scores: [T, L] applied.
        row_start: [T] int32.
        nan: `pad` makes a pick at NaN a pad too.

    Source: SGLang 0.5.23 dsv4/candidate_blocks.py:185-222 `topk_among_blocks`.
    """
    valid = raw_indices != topk.PAD
    column = torch.where(valid, raw_indices + row_start[:, None], 0).long()
    picked = scores.gather(1, column)
    valid &= picked > -torch.inf if nan == "pad" else picked != -torch.inf
    return torch.where(valid, raw_indices, topk.PAD)


def _masked(
    scores: Tensor, mask: Tensor, *, start: Tensor, visible: Tensor, first: int, block_size: int
) -> Tensor:
    width = max(1, int(visible.max()))
    admitted = forms.read(mask, visible=visible, columns=width, first=first, block_size=block_size)
    column = torch.arange(scores.shape[1], device=scores.device) - start[:, None]
    inside = (column >= 0) & (column < visible[:, None])
    inside &= admitted.gather(1, column.clamp(0, width - 1))
    return torch.where(inside, scores, -torch.inf)


def _block_picks(
    scores: Tensor,
    ids: Tensor,
    *,
    start: Tensor,
    visible: Tensor,
    first: int,
    block_size: int,
    k: int,
    **order: Any,  # noqa: ANN401 - as above
) -> Tensor:
    """Picks among the columns of ids, which stand in ascending order and then at `visible`."""
    forms.read_ids(ids, visible=visible, first=first, block_size=block_size)
    held = torch.where(ids == topk.PAD, forms.FAR_PAD, ids).sort(dim=1).values.long()
    column = held[:, :, None] * block_size + torch.arange(block_size, device=ids.device)
    column = column.flatten(1).minimum(visible[:, None])[:, : scores.shape[1]]
    live = column < visible[:, None]
    # As integers: gathering bf16 changes the sign of a NaN.
    at = torch.where(live, column + start[:, None], 0)
    cells = bits.as_int(scores).gather(1, at).view(scores.dtype)
    picks = topk.ragged_topk(
        scores=cells, row_start=torch.zeros_like(visible), row_end=live.sum(1), k=k, **order
    )
    at = torch.nn.functional.pad(column, (0, 1)).gather(1, picks.clamp(min=0).long())
    return torch.where(picks == topk.PAD, topk.PAD, at.int())


def _expect_rows(mask: Tensor, scores: Tensor) -> None:
    if mask.dim() != 2 or len(mask) != len(scores):  # noqa: PLR2004 - rows and columns
        raise ValueError(f"mask is {list(mask.shape)}: scores have {len(scores)} rows")
