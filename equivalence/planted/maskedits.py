"""Edits of a right mask: blocks that its rows publish instead, or what stands in memory instead.

An edit of blocks is written in whatever form the right mask has.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.planted.plants import seeded
from equivalence.planted.published import Right
from refimpl import blocks, forms
from refimpl.topk import PAD

_BYTE = 8
_IDS = ("unordered", "ascending")
Edit = Callable[[Right], Tensor | None]
"""A right mask -> another, of its form unless the fault is another form; None without room."""


def of_blocks(edit: Callable[[Right], Tensor]) -> Edit:
    """An edit that gives the blocks of each row, bool [P, B]."""
    return lambda right: right.render(edit(right))


def of_row(edit: Callable[[Right, Tensor], Tensor], able: Callable[[Right], Tensor]) -> Edit:
    """An edit of the blocks of one row, of those that are able: (right, blocks [B]) -> blocks."""

    def one(right: Right) -> Tensor | None:
        row = right.row(able(right))
        if row is None:
            return None
        kept = right.kept
        kept[row] = edit(right, kept[row])
        return right.render(kept)

    return one


def one_bit(right: Right) -> Tensor | None:
    """One live bit is flipped."""
    row = right.row(right.visible > 0)
    if row is None:
        return None
    column = seeded(int(right.visible[row]), right.seed)[0]
    cells = right.admitted
    cells[row, column] = ~cells[row, column]
    return right.cells(cells)


def grid_of_k(right: Right) -> Tensor:
    """Blocks begin at multiples of 8 of the concatenated K, not at the row's start."""
    shift = right.start % right.size
    kept = right.choose(
        right.scored(start=right.start - shift, visible=right.visible + shift),
        blocks=blocks.block_counts(visible=right.visible + shift, block_size=right.size),
    )
    wide = kept.repeat_interleave(right.size, dim=1)
    column = torch.arange(right.columns, device=kept.device)
    at = (column + shift[:, None]).clamp(max=max(0, wide.shape[1] - 1))
    live = column < right.visible[:, None]
    return right.cells(wide.gather(1, at) & live)


def ids_of_k(right: Right) -> Tensor:
    """Ids count the blocks of the concatenated K."""
    held = (right.mask != PAD) & (right.mask != forms.FAR_PAD)
    return torch.where(held, right.mask + right.start[:, None] // right.size, right.mask)


def finer_blocks(right: Right) -> Tensor:
    """Blocks of half the columns, as many of them."""
    size = right.size // 2
    best = right.scored(start=right.start, visible=right.visible, size=size)
    kept = right.choose(best, blocks=blocks.block_counts(visible=right.visible, block_size=size))
    wide = kept.repeat_interleave(size, dim=1)
    wide = functional.pad(wide, (0, right.columns - wide.shape[1]))
    live = torch.arange(right.columns, device=wide.device) < right.visible[:, None]
    return right.cells(wide & live)


def pooled(right: Right, how: Literal["sum", "mean", "amin"]) -> Tensor:
    """Blocks by another statistic of their columns."""
    many = right.kept.shape[1]
    column = torch.arange(many * right.size, device=right.mask.device)
    live = column < right.visible[:, None]
    at = (right.start[:, None] + column).clamp(max=max(0, right.scores.shape[1] - 1))
    cells = right.scores[right.rows].gather(1, at)
    cells = cells.masked_fill(~live, torch.inf if how == "amin" else 0.0)
    cells = cells.view(-1, many, right.size)
    sums = {"sum": cells.sum(2), "mean": cells.mean(2), "amin": cells.amin(2)}
    return right.choose(sums[how])


def from_column_0(right: Right) -> Tensor:
    """Blocks are scored from column 0 of the buffer on, as if every row began there."""
    return right.choose(right.scored(start=torch.zeros_like(right.start), visible=right.visible))


def previous_step(right: Right) -> Tensor:
    """What was published before each row's newest column came."""
    seen = (right.visible - 1).clamp(min=0)
    counts = blocks.block_counts(visible=seen, block_size=right.size)
    kept = right.choose(right.scored(start=right.start, visible=seen), blocks=counts)
    kept = functional.pad(kept, (0, right.kept.shape[1] - kept.shape[1]))
    if right.form in _IDS:
        return right.render(kept)
    wide = kept.repeat_interleave(right.size, dim=1)
    wide = functional.pad(wide, (0, max(0, right.columns - wide.shape[1])))[:, : right.columns]
    live = torch.arange(right.columns, device=wide.device) < seen[:, None]
    return right.cells(wide & live)


def padding_counted(right: Right) -> Tensor:
    """Alignment padding makes blocks too: the newest is the last of the widest row."""
    every = torch.full_like(right.counts, right.kept.shape[1])
    return right.choose(right.best, blocks=torch.where(right.counts > 0, every, 0).int())


def future_block(right: Right) -> Tensor:
    """Each row sees one block more than it may, where the scores have one."""
    room = right.scores.shape[1] - right.start
    seen = torch.minimum(right.visible + right.size, room).clamp(min=0).int()
    seen = torch.where(right.visible > 0, seen, 0).int()
    counts = blocks.block_counts(visible=seen, block_size=right.size)
    return right.choose(right.scored(start=right.start, visible=seen), blocks=counts)


def unpinned(right: Right) -> Tensor:
    """The newest block is ranked as the others are."""
    # The place behind the newest is taken by a block that is then left out.
    more = functional.pad(right.best, (0, 1), value=-torch.inf)
    kept = right.choose(more, blocks=right.counts + 1, topk_blocks=right.topk_blocks + 1)
    return kept[:, :-1] & (right.number < right.counts[:, None])


def tail_shifted(right: Right) -> Tensor:
    """Each row holds the mask of the row before it."""
    return right.mask.roll(1, 0)


def of_neighbour(right: Right) -> Tensor | None:
    """One row holds that of another request."""
    row = right.row(right.start != right.start[:1])
    if row is None:
        return None
    out = right.mask.clone()
    out[row] = right.mask[0]
    return out


def inverted(right: Right) -> Tensor:
    """True where a column may not be picked."""
    return ~right.mask


def additive(right: Right) -> Tensor:
    """0 where a column may be picked and -inf elsewhere, to be added to scores."""
    zero = torch.zeros((), device=right.mask.device)
    return torch.where(right.admitted, zero, -torch.inf)


def byte_2(right: Right) -> Tensor | None:
    """One True is the byte 2."""
    row = right.row(right.admitted.any(1))
    if row is None:
        return None
    out = right.mask.clone()
    out.view(torch.uint8)[row, int(right.admitted[row].int().argmax())] = 2
    return out


def bits_reversed(right: Right) -> Tensor:
    """The highest bit of a byte is its first column."""
    bit = torch.arange(_BYTE, dtype=torch.uint8, device=right.mask.device)
    octets = right.mask[:, :, None] >> bit & 1
    return (octets << (_BYTE - 1 - bit)).sum(2, dtype=torch.uint8)


def last_repeated(right: Right) -> Tensor | None:
    """One row's last id stands in its first slot too."""
    held = (right.mask != PAD) & (right.mask != forms.FAR_PAD)
    row = right.row(held.sum(1) > 1)
    if row is None:
        return None
    out = right.mask.clone()
    out[row, 0] = out[row, held[row]][-1]
    return out


def pads_are_0(right: Right) -> Tensor:
    """Unused slots hold block 0."""
    held = (right.mask != PAD) & (right.mask != forms.FAR_PAD)
    return torch.where(held, right.mask, 0)


def none(right: Right) -> Tensor | None:
    """One row admits nothing."""
    return _row_of(right, full=False)


def every(right: Right) -> Tensor | None:
    """One row that selects admits all that it sees."""
    return _row_of(right, full=True)


def _row_of(right: Right, *, full: bool) -> Tensor | None:
    able = right.selects[:, 0] if full else right.visible > 0
    row = right.row(able)
    if row is None:
        return None
    kept = right.kept
    kept[row] = full & (right.number < right.counts[row])
    return right.render(kept)


def without_newest(right: Right) -> Tensor:
    """The newest block is left out."""
    return right.kept & ~(right.newest & right.selects)


def whole_tie_set(right: Right) -> Tensor:
    """Every block that scores no less than the cutoff: a threshold in place of a choice."""
    return right.choose(right.best, ties="all")


def other_ties(right: Right) -> Tensor:
    """The highest of the blocks that are tied at the cutoff, not the lowest."""
    return right.choose(right.best, ties="highest")


def with_minus_inf(right: Right) -> Tensor:
    """Places that would stay empty are filled with blocks at -inf."""
    low = right.best.clamp(min=torch.finfo(right.best.dtype).min)
    return right.choose(low)


def nan_dropped(right: Right) -> Tensor:
    """A NaN block takes a place and is then published not."""
    return right.choose(right.best, nan="drop", short_rows="any")


def one_place(right: Right, *, more: int) -> Tensor:
    """topk_blocks is off by one."""
    return right.choose(right.best, topk_blocks=max(1, right.topk_blocks + more))


def dead_true(right: Right) -> Tensor:
    """Columns past the window are True."""
    dead = torch.arange(right.columns, device=right.mask.device) >= right.visible[:, None]
    return right.cells(right.admitted | dead)


def wider(right: Right) -> Tensor:
    """Rows are aligned to 64 columns more."""
    return functional.pad(right.mask, (0, 64 if right.form == "bool" else 64 // _BYTE))


def shuffled(right: Right) -> Tensor:
    """Ids stand in descending order, pads behind them."""
    return right.mask.sort(dim=1, descending=True).values


def other_pad(right: Right) -> Tensor:
    """Unused slots hold the other pad."""
    pads = {PAD: forms.FAR_PAD, forms.FAR_PAD: PAD}
    out = right.mask.clone()
    for old, new in pads.items():
        out[right.mask == old] = new
    return out


def more_slots(right: Right) -> Tensor:
    """Rows have 5 slots more than they can use."""
    pad = PAD if right.form == "unordered" else forms.FAR_PAD
    return functional.pad(right.mask, (0, 5), value=pad)


def all_rows(right: Right) -> Tensor | None:
    """Rows that nobody asked for are published too."""
    if len(right.rows) == len(right.scores):
        return None
    out = right.mask.new_zeros(len(right.scores), right.mask.shape[1])
    out[right.rows] = right.mask
    return out
