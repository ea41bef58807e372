"""Edits of one row of right picks: each gives another row, or None where it has no room."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equivalence.contract import Contract
from equivalence.planted.reference import UNWRITTEN
from equivalence.selection import nan_order
from refimpl import bits, topk

_FIFTEEN = 15


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One row of right picks, and the scores it was picked from.

    Attributes:
        picks: int64 [slots], relative to the window, pads -1.
        buffer: [W] the row's scores, inside the window and out of it.
        column: where the window's first score stands in the buffer.
        visible: scores in the window.
        start: the window's first column of the concatenated K.
        k: picks the row may hold.
        contract: the freedoms the picks are right under.
    """

    picks: Tensor
    buffer: Tensor
    column: int
    visible: int
    start: int
    k: int
    contract: Contract

    @cached_property
    def scores(self) -> Tensor:
        """[visible] of the window."""
        return self.buffer[self.column : self.column + self.visible]

    @cached_property
    def keys(self) -> Tensor:
        """Order keys of the window, int32 [visible]."""
        free = self.contract
        return bits.order_key(self.scores, zero_sign=free.zero_sign, nan=nan_order(free))

    @cached_property
    def legal(self) -> topk.LegalSet:
        """The legal set of the window."""
        free = self.contract
        return topk.legal_set(
            scores=self.scores,
            k=self.k,
            minus_inf=free.minus_inf,
            nan=nan_order(free),
            zero_sign=free.zero_sign,
        )

    @cached_property
    def need(self) -> int:
        """Picks that stand in the row."""
        return int((self.picks != topk.PAD).sum())

    @cached_property
    def selects(self) -> bool:
        """Whether the row leaves columns out."""
        return self.visible > self.k

    def picked(self, which: Tensor) -> list[int]:
        """Slots whose column is among `which`, bool [visible]."""
        return [s for s, c in enumerate(self.picks.tolist()) if c != topk.PAD and bool(which[c])]

    def unpicked(self, which: Tensor) -> list[int]:
        """Columns of `which` that stand in no slot, best first."""
        left = which.clone()
        left[self.picks[self.picks != topk.PAD]] = False
        columns = left.nonzero()[:, 0]
        order = self.keys[columns].sort(descending=True, stable=True).indices
        return [int(column) for column in columns[order]]

    def put(self, *changes: tuple[int, int]) -> Tensor:
        """The picks with (slot, column) changes."""
        out = self.picks.clone()
        for slot, column in changes:
            out[slot] = column
        return out


Edit = Callable[[Row], Tensor | None]


def next_lower(row: Row) -> Tensor | None:
    """The best column below the cutoff stands for a pick at it."""
    if not row.selects or row.legal.cutoff is None:
        return None
    below = row.unpicked(row.keys < row.legal.cutoff)
    return row.put((row.picked(row.legal.ties)[-1], below[0])) if below else None


def best_lost(row: Row) -> Tensor | None:
    """The best pick is gone, what comes after the last one closes the gap."""
    if not row.selects or not bool(row.legal.must.any()):
        return None
    best = int(row.keys.masked_fill(~row.legal.must, row.legal.cutoff or 0).argmax())
    slot = row.picks.tolist().index(best)
    return row.put((slot, row.unpicked(torch.ones_like(row.legal.must))[0]))


def lost_to_ties(row: Row, *, winners: int = 1) -> Tensor | None:
    """Winners are lost to as many more columns at the cutoff."""
    slots, spare = row.picked(row.legal.must), row.unpicked(row.legal.ties)
    if not row.selects or min(len(slots), len(spare)) < winners:
        return None
    return row.put(*zip(slots[:winners], spare[:winners], strict=True))


def fifteen_lost_to_ties(row: Row) -> Tensor | None:
    """Fifteen winners are lost to fifteen columns at the cutoff."""
    return lost_to_ties(row, winners=_FIFTEEN)


def duplicate(row: Row) -> Tensor | None:
    """The first pick stands in the last place too."""
    return row.put((row.need - 1, int(row.picks[0]))) if row.need > 1 else None


def duplicate_tie(row: Row) -> Tensor | None:
    """One column at the cutoff stands twice, another one is gone."""
    slots = row.picked(row.legal.ties) if row.selects else []
    return row.put((slots[-1], int(row.picks[slots[0]]))) if len(slots) > 1 else None


def all_argmax(row: Row) -> Tensor | None:
    """Every pick is the best column."""
    if row.need < 2:  # noqa: PLR2004 - one pick cannot repeat
        return None
    best = int(row.keys.argmax())
    return row.put(*((slot, best) for slot in range(row.need)))


def hole(row: Row) -> Tensor | None:
    """A pad stands in the middle of a full row."""
    return row.put((row.k // 2, topk.PAD)) if row.need == row.k else None


def past_window(row: Row) -> Tensor | None:
    """The last pick is the first column after the window, one that the buffer holds."""
    if not row.need or row.column + row.visible >= len(row.buffer):
        return None
    return row.put((row.need - 1, row.visible))


def past_buffer(row: Row) -> Tensor | None:
    """The last pick is a column that no buffer holds."""
    return row.put((row.need - 1, len(row.buffer) + 7)) if row.need else None


def below_window(row: Row) -> Tensor | None:
    """The last pick lies two columns before the window; one before it would read as a pad."""
    return row.put((row.need - 1, -2)) if row.need and row.start > 1 else None


def another_base(row: Row) -> Tensor | None:
    """Every pick counts from column 0 of K, not from the window's start."""
    if not row.need or row.start < row.visible:
        return None
    return torch.where(row.picks == topk.PAD, topk.PAD, row.picks + row.start)


def ranked_from_zero(row: Row) -> Tensor | None:
    """The picks of a window of this length that begins at column 0: starts were not passed on."""
    if not row.selects or not row.column:
        return None
    keys = bits.order_key(row.buffer[: row.visible])
    wrong = row.picks.clone()
    wrong[: row.k] = keys.sort(descending=True, stable=True).indices[: row.k]
    cutoff = row.legal.cutoff
    return wrong if cutoff is not None and bool((row.keys[wrong] < cutoff).any()) else None


def pick_for_pad(row: Row) -> Tensor | None:
    """A column stands in the first slot after the prefix."""
    return row.put((row.need, 0)) if row.need < len(row.picks) else None


def tail_unwritten(row: Row) -> Tensor | None:
    """The slots after the prefix keep what the buffer held."""
    slots = range(row.need, len(row.picks))
    return row.put(*((slot, UNWRITTEN) for slot in slots)) if slots else None


def unwritten(row: Row) -> Tensor:
    """No slot was written."""
    return torch.full_like(row.picks, UNWRITTEN)


def short_reversed(row: Row) -> Tensor | None:
    """A row that owes every column gives the last one first."""
    return None if row.selects or row.need < 2 else _reversed(row)  # noqa: PLR2004 - one is in order


def reversed_picks(row: Row) -> Tensor | None:
    """The picks of a row that selects, last one first."""
    return _reversed(row) if row.selects and bool(row.legal.must.any()) else None


def _reversed(row: Row) -> Tensor:
    return torch.cat([row.picks[: row.need].flip(0), row.picks[row.need :]])


def other_tie(row: Row) -> Tensor | None:
    """One column at the cutoff stands for another."""
    spare = row.unpicked(row.legal.ties)
    slots = row.picked(row.legal.ties)
    return row.put((slots[-1], spare[-1])) if row.selects and spare and slots else None


def other_minus_inf(row: Row) -> Tensor | None:
    """`other_tie` where the row is cut among columns at -inf."""
    return other_tie(row) if bool(row.scores[row.legal.ties].isneginf().any()) else None


def other_zero(row: Row) -> Tensor | None:
    """A zero of the other sign stands for the last zero picked."""
    zeros = row.legal.ties & (row.scores == 0)
    slots = row.picked(zeros) if row.selects else []
    if not slots:
        return None
    sign = row.scores[row.picks[slots[-1]]].signbit()
    spare = row.unpicked(zeros & (row.scores.signbit() != sign))
    return row.put((slots[-1], spare[0])) if spare else None


def ties_exchanged(row: Row) -> Tensor | None:
    """Two picks of one score stand in each other's places."""
    slots = row.picked(row.legal.ties) if row.selects else []
    if len(slots) < 2:  # noqa: PLR2004 - it takes two
        return None
    first, last = slots[0], slots[-1]
    return row.put((first, int(row.picks[last])), (last, int(row.picks[first])))


def pad_first(row: Row) -> Tensor | None:
    """A pad stands before the picks of a row that owes fewer than it might hold."""
    if not 0 < row.need < min(row.k, row.visible):
        return None
    return row.picks.roll(1)
