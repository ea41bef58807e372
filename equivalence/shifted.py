"""Shifted rows: which rows of an output would be right in the place of which others."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks import topk
from equivalence.checks.rows import TIED, code
from equivalence.selection import Picks, Selection, nan_order
from refimpl import bits
from refimpl.topk import PAD

_HIGHEST = torch.iinfo(torch.int64).max


def picks(selection: Selection, got: Picks) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows of picks that are a legal row of others, in any order.

    A legal choice of ties shows nothing of its own: it must be the reference's choice, or most
    of the picks must be certain.
    """
    selection = replace(selection, contract=replace(selection.contract, order="any"))
    slots = got.values.shape[1]
    relative, zero = got.columns(slots).int(), torch.zeros_like(got.base)
    every = Picks(values=relative, base=zero, stage=got.stage)

    def held(rows: Tensor, others: Tensor) -> Tensor:
        theirs, mine = selection.take(others), every.take(rows)
        codes = topk.name_rows(theirs, mine)
        want = mine.written(theirs.want)
        # A short row reads no scores, and its only order is 0, 1, 2, ...
        same = (mine.values.sort(1).values == want.sort(1).values).all(1)
        legal = (codes <= TIED) | ((codes == code("order")) & same)
        certain, need = _certain(theirs)
        short = theirs.visible <= selection.k
        told = (same & ((certain > 0) | short)) | (2 * certain >= need.clamp(min=1))
        return legal & told & (need > 0) & ~theirs.nan

    return held


def _certain(selection: Selection) -> tuple[Tensor, Tensor]:
    """How many picks of each row lie above the cutoff, and how many it owes."""
    wanted = selection.want != PAD
    keys = selection.keys(selection.want.long()).long()
    cutoff = keys.masked_fill(~wanted, _HIGHEST).amin(1, keepdim=True)
    return (wanted & (keys > cutoff)).sum(1), wanted.sum(1)


def telling(selection: Selection) -> Tensor:
    """Rows whose picks hardly stand in another row by chance, bool [B]."""
    return selection.visible >= 2 * selection.k


def windows(selection: Selection, got: Picks) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows of picks that are right for as many of their own columns as others see."""
    relative = got.columns(got.values.shape[1])
    surplus = got.values.shape[1] - selection.want.shape[1]

    @cache
    def fitting() -> tuple[Tensor, Tensor]:
        return _lengths(selection, got)

    def ranked(rows: Tensor, others: Tensor) -> Tensor:
        fewest, most = fitting()
        theirs = selection.take(others)
        visible = theirs.visible
        best = (visible >= fewest[rows]) & (visible <= most[rows])
        whole = (relative[rows] == functional.pad(theirs.want, (0, surplus), value=PAD)).all(1)
        return torch.where(visible > selection.k, best, whole & (visible > 0))

    return ranked


def _lengths(selection: Selection, got: Picks) -> tuple[Tensor, Tensor]:
    """The fewest and the most columns of which each row's picks are the best, int64 [B] each.

    None fits a row that does not hold k columns, or that holds one at -inf: so the reference
    has what lies outside a window.
    """
    free = selection.contract
    own = selection.scores[selection.at]
    keys = bits.order_key(own, zero_sign=free.zero_sign, nan=nan_order(free))
    lowest = bits.order_key(keys.new_full((), -torch.inf, dtype=selection.scores.dtype))
    rows, width = keys.shape
    relative = got.columns(got.values.shape[1])
    if not width:
        return torch.ones_like(selection.visible), torch.zeros_like(selection.visible)
    at = relative + selection.column[:, None]
    usable = (relative >= 0) & (at < width)
    picked = torch.zeros((rows, width + 1), dtype=torch.bool, device=keys.device)
    picked.scatter_(1, at.where(usable, width), value=True)
    picked = picked[:, :width]
    own = keys.gather(1, at.clamp(0, width - 1))
    cutoff = own.masked_fill(~usable, torch.iinfo(own.dtype).max).amin(1, keepdim=True)
    column = torch.arange(width, device=keys.device)
    better = (keys > cutoff) & ~picked & (column >= selection.column[:, None])
    most = torch.where(better, column, width).amin(1) - selection.column
    fewest = relative.amax(1) + 1
    full = (picked.sum(1) == selection.k) & (usable.sum(1) == selection.k)
    full &= ((relative == PAD) | usable).all(1) & (cutoff[:, 0] > lowest)
    return fewest, torch.where(full, most, 0)


def borrowed(selection: Selection, got: Picks) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows of picks that are the best of as many columns as they see, by the scores of others.

    Both windows count from their own first column, as they stand in a compact workspace.
    """
    free = selection.contract
    width = selection.scores.shape[1]
    lowest, highest = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    column = torch.arange(width, device=selection.at.device)
    relative = got.columns(got.values.shape[1])

    def held(rows: Tensor, others: Tensor) -> Tensor:
        mine, first = selection.visible[rows, None], selection.column[rows, None]
        at = column + (selection.column[others, None] - first)
        scores = selection.scores[selection.at[others]].gather(1, at.clamp(0, width - 1))
        scores = scores.masked_fill((at < 0) | (at >= width), -torch.inf)
        keys = bits.order_key(scores, zero_sign=free.zero_sign, nan=nan_order(free))
        usable = (relative[rows] >= 0) & (relative[rows] < mine)
        picked = torch.zeros((len(rows), width + 1), dtype=torch.bool, device=keys.device)
        picked.scatter_(1, (relative[rows] + first).where(usable, width), value=True)
        picked = picked[:, :width]
        left = (column >= first) & (column < first + mine) & ~picked
        best = keys.masked_fill(~left, lowest).amax(1, keepdim=True)
        worst = keys.masked_fill(~picked, highest).amin(1, keepdim=True)
        scored = scores.masked_fill(~picked, 0).isfinite().all(1)
        # Of picks at the cutoff any choice is right; most must lie above it.
        certain = 2 * (picked & (keys > best)).sum(1) >= selection.k
        full = (picked.sum(1) == selection.k) & (mine[:, 0] > selection.k)
        return full & scored & certain & (worst >= best)[:, 0]

    return held


def scores(
    want: Tensor, got: Tensor, inside: Tensor, poison: float | None
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Rows of scores that are those of others, and rows scored in the windows of others alone.

    Args:
        want: [B, W] of the reference.
        got: [B, W] of the same dtype.
        inside: bool [B, W], the windows.
        poison: what the buffer held before the launch, where known.
    """

    def held(rows: Tensor, others: Tensor) -> Tensor:
        mine, here, there = got[rows], inside[rows], inside[others]
        same = bits.as_int(mine) == bits.as_int(want[others])
        differ = here & (bits.as_int(mine) != bits.as_int(want[rows]))
        # Zeros and what was not written fit anything; they do not count.
        told = (mine != 0) & mine.isfinite()
        told = told if poison is None else told & (mine != poison)
        shown = (differ & there & told).sum(1)
        scored = (same | ~(here & there)).all(1) & (2 * shown >= (differ & told).sum(1))
        # A copy has the other row's window too, and of its own hardly anything.
        copied = (same | ~there).all(1) & (2 * differ.sum(1) >= here.sum(1))
        return (scored & (shown > 0)) | (copied & (there & told).any(1))

    def within(rows: Tensor, others: Tensor) -> Tensor:
        mine, here, there = got[rows], inside[rows], inside[others]
        right = bits.as_int(mine) == bits.as_int(want[rows])
        empty = ~mine.isfinite() | (mine == 0)
        empty = empty if poison is None else empty | (mine == poison)
        return torch.where(there, right | ~here, empty | ~here).all(1) & there.any(1)

    return held, within


def slots(want: Tensor, got: Tensor, pad: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows of slots that are those of others, slot by slot, int [B, n] each."""

    def held(rows: Tensor, others: Tensor) -> Tensor:
        theirs = want[others]
        return (got[rows] == theirs).all(1) & (theirs != pad).any(1)

    return held
