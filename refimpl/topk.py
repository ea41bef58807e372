"""Top-k of a row window under a total order, and the set of picks that are legal for it.

A row sees columns `[row_start, row_end)`.
`key(s)` is the IEEE total order of a score's bits (`bits.order_key`).
E is what may be picked, `need = min(k, |E|)`, and the cutoff is the need-th largest key over E.
`must` are the keys above the cutoff, `ties` the keys at it:
a legal row holds all of must and need - |must| of ties.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl import bits

PAD = -1
Order = Literal["score", "ascending", "any"]
Ties = Literal["lowest", "highest", "any"]
Nan = Literal["reject", "first", "last"]
ZeroSign = Literal["distinct", "equal"]
MinusInf = Literal["pick", "pad"]

_NEVER = torch.iinfo(torch.int32).min


@dataclass(frozen=True, kw_only=True, eq=False)
class LegalSet:
    """What one row may pick.

    Attributes:
        need: how many picks the row owes.
        cutoff: order key of the need-th largest score, None where need is 0.
        must: bool [visible], columns above the cutoff: all of them are picked.
        ties: bool [visible], columns at the cutoff: need - |must| of them are picked.
    """

    need: int
    cutoff: int | None
    must: Tensor
    ties: Tensor

    @property
    def free(self) -> int:
        """How many of the tied columns are picked."""
        return self.need - int(self.must.sum())


def eligible(keys: Tensor, *, minus_inf: MinusInf, dtype: torch.dtype) -> Tensor:
    """Which order keys may be picked at all: `pad` takes those of -inf and below out."""
    if minus_inf == "pick":
        return torch.ones_like(keys, dtype=torch.bool)
    lowest = torch.tensor(-torch.inf, dtype=dtype, device=keys.device)
    return keys > bits.order_key(lowest)


def ragged_topk(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    k: int,
    order: Order = "score",
    ties: Ties = "lowest",
    short_rows: Literal["identity", "any"] = "identity",
    empty_rows: Literal["pad", "first"] = "pad",
    minus_inf: MinusInf = "pick",
    nan: Nan = "reject",
    zero_sign: ZeroSign = "distinct",
) -> Tensor:
    """The picks of every row, relative to its start, best score first.

    Args:
        scores: [T, L] fp32, bf16 or fp16.
        row_start: [T] int32, first visible column.
        row_end: [T] int32, one past the last; a backward window is empty.
        k: picks a row.
        order: `ascending` sorts the picks by column; `any` is given best score first.
        ties: which of the columns at the cutoff are taken; `any` takes the lowest.
        short_rows: `identity` gives a row of at most k columns 0 .. visible-1, scores unread.
        empty_rows: `first` gives an empty row column 0.
        minus_inf: `pad` never picks a column at -inf.
        nan: where NaN stands in the order; `reject` leaves the total order of its bits.
        zero_sign: whether -0 stands below +0.

    Returns:
        [T, k] int32, pads are -1.

    Source: DESIGN "the legal set"; the short-row rule is that of every native kernel.
    """
    rows, columns = scores.shape
    keys = bits.order_key(scores, zero_sign=zero_sign, nan=nan)
    picks = torch.full((rows, k), PAD, dtype=torch.int32, device=scores.device)
    column = torch.arange(columns, device=scores.device)
    inside = (column >= row_start[:, None]) & (column < row_end[:, None])
    inside &= eligible(keys, minus_inf=minus_inf, dtype=scores.dtype)
    # An excluded column sinks below every key, then is cut by need.
    keys = torch.where(inside, keys.long(), _NEVER - 1)
    need = inside.sum(1).clamp(max=k)
    if ties == "highest":
        best = columns - 1 - keys.flip(1).sort(dim=1, descending=True, stable=True).indices
    else:
        best = keys.sort(dim=1, descending=True, stable=True).indices
    width = min(k, columns)
    best = best[:, :width] - row_start[:, None]
    taken = torch.arange(width, device=scores.device) < need[:, None]
    if order == "ascending":
        best = torch.where(taken, best, columns).sort(dim=1).values
    picks[:, :width] = torch.where(taken, best, PAD).int()
    visible = (row_end - row_start).clamp(min=0)
    slot = torch.arange(k, device=scores.device, dtype=torch.int32)
    if short_rows == "identity":
        identity = torch.where(slot < visible[:, None], slot, PAD)
        picks = torch.where((visible <= k)[:, None], identity, picks)
    if empty_rows == "first":
        first = torch.where(slot == 0, 0, PAD).int()
        picks = torch.where((visible == 0)[:, None], first, picks)
    return picks


def legal_set(
    *,
    scores: Tensor,
    k: int,
    minus_inf: MinusInf = "pick",
    nan: Nan = "reject",
    zero_sign: ZeroSign = "distinct",
) -> LegalSet:
    """The legal set of one row from the scores of its window.

    Args:
        scores: [visible] the window's scores.
        k: picks the row may hold.
        minus_inf: `pad` takes columns at -inf out of E.
        nan: where NaN stands in the order.
        zero_sign: whether -0 stands below +0.
    """
    keys = bits.order_key(scores, zero_sign=zero_sign, nan=nan)
    inside = eligible(keys, minus_inf=minus_inf, dtype=scores.dtype)
    need = min(k, int(inside.sum()))
    if need == 0:
        nothing = torch.zeros_like(inside)
        return LegalSet(need=0, cutoff=None, must=nothing, ties=nothing)
    cutoff = keys[inside].sort(descending=True).values[need - 1]
    return LegalSet(
        need=need,
        cutoff=int(cutoff),
        must=inside & (keys > cutoff),
        ties=inside & (keys == cutoff),
    )
