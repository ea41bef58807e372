"""Blocks of a row's window: their scores, those a source layer keeps, and its legal choices.

Block b of a row is columns `[b * block_size, (b + 1) * block_size)` counted from the row's start,
cut at the window's end. The newest block is the last: it is always kept, whatever it scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl import bits, topk

BLOCK = 8
CELLS = 1 << 20
Nan = Literal["propagate", "ignore", "drop"]
Ties = Literal["lowest", "highest", "any", "all"]

_PINNED = torch.iinfo(torch.int32).max
_NEVER = torch.iinfo(torch.int32).min


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Ranges of rows of at most CELLS cells, at least one row: what bounds every intermediate."""
    step = max(1, CELLS // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def visible_of(*, row_start: Tensor, row_end: Tensor, columns: int) -> Tensor:
    """Columns each row sees, int32 [T]; a backward window is empty.

    Raises:
        ValueError: a window leaves the `columns` of the scores.
    """
    visible = (row_end - row_start).clamp(min=0).int()
    beyond = (visible > 0) & ((row_start < 0) | (row_end > columns))
    if beyond.any():
        row = int(beyond.nonzero()[0])
        raise ValueError(
            f"row {row} sees columns {int(row_start[row])} to {int(row_end[row])}: "
            f"scores have {columns}"
        )
    return visible


def block_counts(*, visible: Tensor, block_size: int = BLOCK) -> Tensor:
    """Blocks of each row, the last one perhaps in part: ceil(visible / block_size), int32 [T]."""
    return (-(-visible // block_size)).clamp(min=0).int()


def block_scores(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    nan: Literal["propagate", "ignore"] = "propagate",
    block_size: int = BLOCK,
) -> Tensor:
    """The largest score of every block, by the total order of bits: +0 stands above -0.

    Args:
        scores: [T, L] fp32, bf16 or fp16; cells outside the windows are not read.
        row_start: [T] int32.
        row_end: [T] int32.
        nan: `propagate` makes the block of a NaN NaN, as torch.amax does; `ignore` passes NaNs
            over, as fmax does, and a block of nothing else is -inf.
        block_size: columns a block.

    Returns:
        [T, blocks of the longest row] in the dtype of the scores; -inf where a row has no block.

    Raises:
        ValueError: a window leaves the scores, or `nan` is unknown.

    Source: SGLang 0.5.23 dsv4/candidate_blocks.py:93 `amax8_varlen` (fmax), :162-182 (torch.amax).
    """
    if nan not in {"propagate", "ignore"}:
        raise ValueError(f"nan is {nan!r}: block scores know 'propagate' and 'ignore'")
    visible = visible_of(row_start=row_start, row_end=row_end, columns=scores.shape[1])
    most = int(visible.max()) if len(visible) else 0
    blocks = -(-most // block_size)
    best = scores.new_empty(len(scores), blocks)
    column = torch.arange(blocks * block_size, device=scores.device)
    for rows in row_blocks(len(scores), len(column)):
        cells = _from(scores[rows], row_start[rows], len(column))
        cells = torch.where(column < visible[rows, None], cells, -torch.inf)
        if nan == "ignore":
            cells = cells.masked_fill(cells.isnan(), -torch.inf)
        cells = cells.view(len(cells), blocks, block_size)
        top = _ordered(_ordered(bits.as_int(cells)).amax(2)).view(cells.dtype)
        best[rows] = top.masked_fill(cells.amax(2).isnan(), torch.nan)
    return best


def kept_blocks(
    *,
    block_scores: Tensor,
    blocks: Tensor,
    topk_blocks: int,
    ties: Ties = "lowest",
    nan: Nan = "propagate",
    short_rows: Literal["identity", "any"] = "identity",
    zero_sign: topk.ZeroSign = "distinct",
) -> Tensor:
    """The blocks a source layer publishes: the newest, then the best scores above -inf.

    Args:
        block_scores: [T, B] as `block_scores` gives them.
        blocks: [T] int32, how many of them a row has.
        topk_blocks: blocks a row publishes at most.
        ties: which of the blocks at the cutoff are kept; `any` keeps the lowest, `all` every one
            of them, as a mask of `score >= cutoff` does: then a row may hold more.
        nan: `propagate` puts a NaN block above +inf, `ignore` below -inf;
            `drop` lets it take a place as `propagate` does and then publishes it not.
        short_rows: `identity` keeps all of a row's blocks where there are no more than
            topk_blocks, scores unread; `any` leaves out those at -inf there too.
        zero_sign: whether -0 stands below +0.

    Returns:
        bool [T, B].

    Raises:
        ValueError: topk_blocks is below one.

    Source: SGLang 0.5.23 dsv4/candidate_blocks.py:162-182, which drops NaN (and under topk_blocks
    NaN blocks loses the newest one, which is a fault here); the sparse table has the identity.
    """
    legal = legal_rows(
        block_scores=block_scores,
        blocks=blocks,
        topk_blocks=topk_blocks,
        ties=ties,
        nan=nan,
        short_rows=short_rows,
        zero_sign=zero_sign,
    )
    return chosen(legal, ties=ties)


@dataclass(frozen=True, kw_only=True, eq=False)
class LegalRows:
    """What some rows may publish: `topk.LegalSet`, row by row.

    Attributes:
        need: int64 [T], how many blocks a row owes.
        must: bool [T, B], all of them are published, the newest always.
        ties: bool [T, B], blocks at the cutoff: need - |must| of them are published.
    """

    need: Tensor
    must: Tensor
    ties: Tensor


def legal_rows(
    *,
    block_scores: Tensor,
    blocks: Tensor,
    topk_blocks: int,
    ties: Ties = "lowest",
    nan: Nan = "propagate",
    short_rows: Literal["identity", "any"] = "identity",
    zero_sign: topk.ZeroSign = "distinct",
) -> LegalRows:
    """The blocks that rows may publish; the arguments are those of `kept_blocks`.

    Under `ties="all"` the blocks at the cutoff are in must; otherwise ties changes nothing here.

    Raises:
        ValueError: topk_blocks is below one.
    """
    _expect_places(topk_blocks)
    column = torch.arange(block_scores.shape[1], device=block_scores.device)
    there = column < blocks[:, None]
    newest = column == blocks[:, None] - 1
    keys = _keys(block_scores, nan, zero_sign)
    able = there & topk.eligible(keys, minus_inf="pad", dtype=block_scores.dtype) | newest
    keys = torch.where(newest, _PINNED, torch.where(able, keys, _NEVER))
    need = able.sum(1).clamp(max=topk_blocks)
    must = tied = able
    width = min(topk_blocks, len(column))
    if width:
        at = (need - 1).clamp(min=0)[:, None]
        cutoff = keys.topk(width, dim=1).values.gather(1, at)
        must, tied = able & (keys > cutoff) | newest, able & (keys == cutoff) & ~newest
    if nan == "drop":
        lost = block_scores.isnan() & there & ~newest
        need = need - torch.minimum(lost.sum(1), (need - 1).clamp(min=0))
        must, tied = must & ~lost, tied & ~lost
    if short_rows == "identity":
        whole = there & (blocks <= topk_blocks)[:, None]
        must, tied = must | whole, tied & ~whole
        need = torch.where(blocks <= topk_blocks, blocks.long(), need)
    if ties == "all":
        must, tied = must | tied, torch.zeros_like(tied)
        need = must.sum(1)
    return LegalRows(need=need, must=must, ties=tied)


def chosen(legal: LegalRows, *, ties: Ties) -> Tensor:
    """The blocks bool [T, B] of rows, ties broken by their rule; `any` takes the lowest."""
    free = legal.need - legal.must.sum(1)
    tied = legal.ties
    rank = tied.flip(1).cumsum(1).flip(1) if ties == "highest" else tied.cumsum(1)
    return legal.must | tied & (rank <= free[:, None])


def legal_blocks(
    *,
    block_scores: Tensor,
    topk_blocks: int,
    ties: Ties = "lowest",
    nan: Nan = "propagate",
    short_rows: Literal["identity", "any"] = "identity",
    zero_sign: topk.ZeroSign = "distinct",
) -> topk.LegalSet:
    """The blocks one row may publish; the settings are those of `kept_blocks`.

    Args:
        block_scores: [blocks of the row].
        topk_blocks: blocks a row publishes at most.
        ties: `all` puts the blocks at the cutoff into must, and need counts them.
        nan: where a NaN block stands.
        short_rows: whether a row of no more than topk_blocks publishes them all.
        zero_sign: whether -0 stands below +0.

    Returns:
        The newest block is in must; the cutoff is that of the others, None where none is owed.

    Raises:
        ValueError: topk_blocks is below one.
    """
    _expect_places(topk_blocks)
    count = len(block_scores)
    every = torch.ones(count, dtype=torch.bool, device=block_scores.device)
    if count == 0 or (short_rows == "identity" and count <= topk_blocks):
        return topk.LegalSet(need=count, cutoff=None, must=every, ties=~every)
    others = block_scores[:-1]
    rest = topk.legal_set(
        scores=others,
        k=topk_blocks - 1,
        minus_inf="pad",
        nan="last" if nan == "ignore" else "first",
        zero_sign=zero_sign,
    )
    lost = others.isnan() if nan == "drop" else torch.zeros_like(rest.must)
    owed = rest.need - min(rest.need, int(lost.sum()))
    must = torch.cat([rest.must & ~lost, every[-1:]])
    tied = torch.cat([rest.ties & ~lost, ~every[-1:]])
    if ties == "all":
        must, tied = must | tied, torch.zeros_like(tied)
        owed = int(must.sum()) - 1
    return topk.LegalSet(need=owed + 1, cutoff=rest.cutoff if owed else None, must=must, ties=tied)


def _from(scores: Tensor, start: Tensor, width: int) -> Tensor:
    """Cells [r, width] from each row's start on; those past the scores hold anything."""
    first, last = start.aminmax() if len(start) else (0, 0)
    if 0 <= int(first) == int(last) <= scores.shape[1]:
        cells = scores[:, int(first) : int(first) + width]
        return torch.nn.functional.pad(cells, (0, width - cells.shape[1]))
    at = start[:, None] + torch.arange(width, device=scores.device)
    return scores.gather(1, at.clamp(0, max(0, scores.shape[1] - 1)))


def _ordered(values: Tensor) -> Tensor:
    """Bits of floats as integers of the same width that sort as they do, and back again."""
    return values ^ (values >> (values.element_size() * 8 - 1) & torch.iinfo(values.dtype).max)


def _keys(scores: Tensor, nan: Nan, zero_sign: topk.ZeroSign) -> Tensor:
    return bits.order_key(scores, zero_sign=zero_sign, nan="last" if nan == "ignore" else "first")


def _expect_places(topk_blocks: int) -> None:
    if topk_blocks < 1:
        raise ValueError(f"topk_blocks is {topk_blocks}: a row publishes its newest block at least")
