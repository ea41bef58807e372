"""A published mask: what a kernel wrote of a block of rows, what is legal there, what it admits."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks import maskwords, openblocks
from equivalence.checks.bounds import Ranges
from equivalence.contract import Contract
from refimpl import bits, blocks, forms
from refimpl.topk import PAD

_ROWS = frozenset({"got", "at", "column", "visible", "ids", "picks", "previous"})
_BYTE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Published:
    """A mask over a block of rows, the scores that judge it, and what else is known of the run.

    Attributes:
        got: [B, ...] as the kernel wrote it: bool [B, lc], packed uint8 [B, ceil(lc / 8)] with the
            lowest bit first, or int32 block ids [B, n]; column 0 is the window's first.
        scores: [N, W] fp32, bf16 or fp16.
        at: int64 [B], which row of `scores` each row is.
        column: int64 [B], where the window begins in `scores`.
        visible: int64 [B], columns of the window; no more than a bool or packed mask has.
        topk_blocks: blocks a row publishes at most.
        block_size: columns a block.
        contract: the freedoms. Looked at are ties, nan, short_rows, zero_sign, dead (`zero` and
            `-inf`: columns past the window are False) and order (`ascending`: ids ascend and
            pads follow them; in any other order they are a set).
        nan: the NaN rule that the layer itself declares; None takes that of the contract, where
            `first` is propagate, `last` ignore, and under `reject` rows with a NaN are undecided.
        ids: int64 [B], the rows' numbers in the call.
        pad: the value of an unused slot of ids; -1 and INT32_MAX are pads too.
        stage: the output's name.
        poison: what the buffer held before the launch, where known: an id, or a byte.
        picks: int64 [B, k] window-relative picks of the same run that were made inside this mask,
            pads -1; None where there are none.
        ranges: where the scores may lie, [N, W]; None where they are known to the bit.
        previous: [B, ...] what the same call gave a step earlier, in the form of `got`; where
            known, a stale mask is told.
    """

    got: Tensor
    scores: Tensor
    at: Tensor
    column: Tensor
    visible: Tensor
    topk_blocks: int
    contract: Contract
    ids: Tensor
    block_size: int = blocks.BLOCK
    nan: blocks.Nan | None = None
    pad: int = PAD
    stage: str = "mask"
    poison: int | None = None
    picks: Tensor | None = None
    ranges: Ranges | None = None
    previous: Tensor | None = None

    @property
    def as_ids(self) -> bool:
        """Whether the mask is block ids."""
        return self.got.dtype is torch.int32

    @property
    def columns(self) -> int:
        """Columns of a bool or packed mask, its padding among them; 0 of ids."""
        each = 0 if self.as_ids else _BYTE if self.got.dtype is torch.uint8 else 1
        return self.got.shape[1] * each

    @property
    def row_cells(self) -> int:
        """Cells that one row takes to judge."""
        return max(self.scores.shape[1], self.columns, 4 * self.got.shape[1], 1)

    @property
    def ranks_nan(self) -> blocks.Nan:
        """Where a NaN block stands; `propagate` where the contract rejects it."""
        known: dict[str, blocks.Nan] = {"last": "ignore", "drop": "drop"}
        return self.nan or known.get(self.contract.nan, "propagate")

    def take(self, which: Tensor | slice) -> "Published":
        """The same for some rows of the block."""
        return replace(self, **_cut(self, which, _ROWS))

    def window(self, i: int) -> Tensor:
        """The scores of row i's window."""
        first = int(self.column[i])
        return self.scores[int(self.at[i]), first : first + int(self.visible[i])]


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What the reference knows of rows; B blocks are those of the longest one.

    Attributes:
        scores: [r, B] of the blocks.
        count: int64 [r], blocks of each row.
        need: int64 [r], blocks it owes.
        must: bool [r, B], all of them owed.
        ties: bool [r, B], blocks at the cutoff that leave a choice: need - |must| are owed.
        kept: bool [r, B], the reference's own choice.
        nan: bool [r], rows that cannot be ranked.
    """

    scores: Tensor
    count: Tensor
    need: Tensor
    must: Tensor
    ties: Tensor
    kept: Tensor
    nan: Tensor

    def take(self, which: Tensor) -> "Known":
        """The same for some rows."""
        return Known(**_cut(self, which, frozenset(each.name for each in fields(self))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What a mask admits, block by block, and where its structure is broken.

    A *place* is a slot of ids, or a column of a bool or packed mask.

    Attributes:
        inside: int32 [r, B], live columns of each block that are admitted.
        size: int32 [r, B], its live columns.
        strange: bool [r, places], what is admitted past the window.
        odd: bool [r, places], live bytes of a bool mask other than 0 and 1.
        unwritten: bool [r, places], what still holds the poison, and the reference has not.
        times: int32 [r, B], slots that hold a block; at most 1 in masks that are not ids.
    """

    inside: Tensor
    size: Tensor
    strange: Tensor
    odd: Tensor
    unwritten: Tensor
    times: Tensor

    @property
    def some(self) -> Tensor:
        """Blocks that are admitted at all, bool [r, B]."""
        return self.inside > 0

    @property
    def full(self) -> Tensor:
        """Blocks that are admitted whole, bool [r, B]."""
        return self.some & (self.inside == self.size)


def know(published: Published) -> Known:
    """The legal blocks of every row, by `refimpl.blocks`."""
    contract, visible = published.contract, published.visible
    nan = published.ranks_nan
    best = blocks.block_scores(
        scores=published.scores[published.at],
        row_start=published.column,
        row_end=published.column + visible,
        nan="ignore" if nan == "ignore" else "propagate",
        block_size=published.block_size,
    )
    count = blocks.block_counts(visible=visible, block_size=published.block_size).long()
    legal = blocks.legal_rows(
        block_scores=best,
        blocks=count,
        topk_blocks=published.topk_blocks,
        ties=contract.ties,
        nan=nan,
        short_rows=contract.short_rows,
        zero_sign=contract.zero_sign,
    )
    kept = blocks.chosen(legal, ties=contract.ties)
    if published.ranges is not None:
        legal = openblocks.legal_rows(
            published.ranges.take(published.at),
            row_start=published.column,
            visible=visible,
            count=count,
            topk_blocks=published.topk_blocks,
            block_size=published.block_size,
            whole=contract.short_rows == "identity",
        )
    # Where every tied block has a place, all of them are owed.
    forced = (legal.need - legal.must.sum(1) == legal.ties.sum(1))[:, None] & legal.ties
    read = count > (published.topk_blocks if contract.short_rows == "identity" else 0)
    rejects = published.nan is None and contract.nan == "reject"
    return Known(
        scores=best,
        count=count,
        need=legal.need,
        must=legal.must | forced,
        ties=legal.ties & ~forced,
        kept=kept,
        nan=best.isnan().any(1) & read & rejects,
    )


def written(published: Published, kept: Tensor) -> Tensor:
    """Blocks bool [r, B] in the form of a bool or packed mask, False past the window."""
    form: forms.Form = "packed" if published.got.dtype is torch.uint8 else "bool"
    out = torch.zeros_like(published.got)
    forms.write_blocks(
        out,
        kept,
        visible=published.visible,
        columns=published.columns,
        form=form,
        block_size=published.block_size,
    )
    return out


def see(published: Published, known: Known) -> Seen:
    """What the rows admit."""
    first = torch.arange(known.kept.shape[1], device=published.got.device) * published.block_size
    size = (published.visible[:, None] - first).clamp(0, published.block_size).int()
    return (
        _see_ids(published, known, size) if published.as_ids else _see_cells(published, known, size)
    )


def columns_of(published: Published, i: int) -> Tensor:
    """Which columns of its window row i admits, bool [visible]."""
    row, visible = published.got[i : i + 1], int(published.visible[i])
    if not published.as_ids:
        return maskwords.cells(row, columns=visible)[0] != 0
    ids = row[held_ids(published)[i : i + 1]]
    blocks_in = -(-visible // published.block_size)
    on = torch.zeros(blocks_in, dtype=torch.bool, device=row.device)
    on[ids[(ids >= 0) & (ids < blocks_in)].long()] = True
    return spread(published, on, visible)


def spread(published: Published, kept: Tensor, visible: int) -> Tensor:
    """The columns bool [visible] of blocks bool [B]."""
    wide: Tensor = kept.repeat_interleave(published.block_size)
    return functional.pad(wide, (0, max(0, visible - len(wide))))[:visible]


def held_ids(published: Published) -> Tensor:
    """Slots of ids that hold no pad, bool [r, n]."""
    ids = published.got
    return (ids != PAD) & (ids != forms.FAR_PAD) & (ids != published.pad)


def _see_ids(published: Published, known: Known, size: Tensor) -> Seen:
    ids, held = published.got, held_ids(published)
    strange = held & ((ids < 0) | (ids >= known.count[:, None]))
    width = size.shape[1]
    times = size.new_zeros(len(ids), width + 1)
    # What is no block of the row goes to one column past them.
    times.scatter_add_(1, torch.where(held & ~strange, ids, width).long(), torch.ones_like(ids))
    times = times[:, :width]
    poisoned = torch.zeros_like(held) if published.poison is None else ids == published.poison
    return Seen(
        inside=torch.where(times > 0, size, 0),
        size=size,
        strange=strange,
        odd=torch.zeros_like(held),
        unwritten=poisoned & strange,
        times=times,
    )


def _see_cells(published: Published, known: Known, size: Tensor) -> Seen:
    got, width = published.got, size.shape[1] * published.block_size
    held = maskwords.cells(got, columns=max(width, published.columns))
    live = torch.arange(held.shape[1], device=got.device) < published.visible[:, None]
    looked = published.contract.dead != "ignore"
    on = (held != 0) & live
    inside = on[:, :width].view(len(got), size.shape[1], published.block_size).sum(2).int()
    odd = (held > 1) & live
    unwritten = torch.zeros_like(odd)
    if published.poison is not None and got.dtype is torch.bool:
        unwritten = odd & (held == published.poison % 256)
    elif published.poison is not None:
        want = maskwords.cells(written(published, known.kept), columns=held.shape[1])
        octets = functional.pad((held != want) & live, (0, -held.shape[1] % _BYTE))
        octets = octets.view(len(got), -1, _BYTE).any(2)[:, : got.shape[1]]
        still = octets & (got == published.poison % 256)
        unwritten = still.repeat_interleave(_BYTE, 1)
        unwritten = functional.pad(unwritten, (0, held.shape[1] - unwritten.shape[1])) & live
    return Seen(
        inside=inside,
        size=size,
        strange=(held != 0) & ~live & looked,
        odd=odd,
        unwritten=unwritten,
        times=(inside > 0).int(),
    )


def _cut(record: Any, which: Tensor | slice, names: frozenset[str]) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """The named fields of some rows; None stays None."""
    values = {name: getattr(record, name) for name in names}
    return {name: value if value is None else _rows(value, which) for name, value in values.items()}


def _rows(values: Tensor, which: Tensor | slice) -> Tensor:
    """Some rows; torch would make every bool it gathers 0 or 1, so bytes are gathered."""
    return bits.as_int(values)[which].view(values.dtype)
