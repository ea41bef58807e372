"""Packed rows of QSA: the expansion of the block ids beside them, or of some ids at all.

A row holds the tokens of its blocks, those of its open group, pads, and a count in the last column.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.rows import (
    IDENTICAL,
    UNDECIDED,
    Decided,
    code,
    failing,
    name,
    set_first,
)
from equivalence.verdict import Evidence, Finding
from refimpl import topk
from refimpl.qsa import BLOCK_TOKENS, expand_blocks

_SHOWN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Packed rows a kernel wrote for a block of rows.

    Attributes:
        values: int32 [B, n * block_size + block_size].
        positions: int32 [B] of the rows' tokens.
        visible: int32 [B], blocks each row sees.
        ids: int64 [B], the rows' numbers in the call.
        block_size: tokens a block.
        poison: what the buffer held before the launch, where known.
        stage: the output's name.
    """

    values: Tensor
    positions: Tensor
    visible: Tensor
    ids: Tensor
    block_size: int = BLOCK_TOKENS
    poison: int | None = None
    stage: str = "packed"

    @property
    def blocks(self) -> int:
        """Blocks a row has room for."""
        return self.values.shape[1] // self.block_size - 1

    @property
    def filled(self) -> Tensor:
        """Tokens of blocks in each row, holes among them, int64 [B]."""
        return self.visible.long().clamp(0, self.blocks) * self.block_size

    @property
    def counts(self) -> Tensor:
        """The counted prefix of each row, int64 [B]."""
        return self.filled + (self.positions.long().clamp(min=-1) + 1) % self.block_size

    def expanded(self, block_ids: Tensor) -> Tensor:
        """The packed rows of block ids [B, n]."""
        return expand_blocks(
            block_ids=block_ids.int(),
            positions=self.positions,
            visible_blocks=self.visible,
            block_size=self.block_size,
        )

    def row(self, i: int, values: Tensor | None = None) -> "Packed":
        """Row i alone, perhaps with other values [1, width]."""
        at = slice(i, i + 1)
        return Packed(
            values=self.values[at] if values is None else values,
            positions=self.positions[at],
            visible=self.visible[at],
            ids=self.ids[at],
            block_size=self.block_size,
            poison=self.poison,
            stage=self.stage,
        )


Wanted = Callable[[Packed, int], Tensor]
"""(row i alone, i) -> what it should be, [1, width]."""


def decide_joint(packed: Packed, block_ids: Tensor, classes: Tensor | None = None) -> Decided:
    """Packed rows beside the block ids of the same run: exactly their expansion.

    Args:
        packed: the rows.
        block_ids: int64 [B, n] as the run gave them, right or wrong, pads -1.
        classes: int8 [B] what the ids were decided to be; a right row takes their class, or
            identical where the ids themselves fail or are undecided. None makes it identical.
    """
    want = packed.expanded(block_ids)
    return _decide(packed, want, classes, lambda _, i: want[i : i + 1])


def decide_alone(packed: Packed) -> tuple[Decided, Tensor]:
    """Packed rows of a run that gave no block ids: whether each is the expansion of some ids.

    Which blocks these are, and how often, is for the check of picks: a group of -1 is a missing
    block, and a block that the row does not see is one as well.

    Returns:
        What the rows are, and `blocks_of` them; ids count only of rows that do not fail.
    """
    ids = blocks_of(packed)
    return _decide(packed, packed.expanded(ids), None, _readable), ids


def blocks_of(packed: Packed) -> Tensor:
    """The block that each group of tokens stands for, int64 [B, n], pads -1.

    A group that is not the tokens of one block stands for the block of its upper median.
    """
    size, n = packed.block_size, packed.blocks
    groups = packed.values[:, : n * size].long().reshape(-1, n, size).sort(2).values
    blocks = groups[:, :, size // 2] // size
    there = torch.arange(n, device=blocks.device) * size < packed.filled[:, None]
    return torch.where(there & (blocks >= 0), blocks, topk.PAD)


def _readable(turned: Packed, i: int) -> Tensor:
    del i
    return turned.expanded(blocks_of(turned))


def _decide(
    packed: Packed,
    want: Tensor,
    classes: Tensor | None,
    wanted: Wanted,
) -> Decided:
    """Name every row by the first rule it breaks."""
    got = packed.values
    codes = torch.full((len(got),), IDENTICAL, dtype=torch.int8, device=got.device)
    if classes is not None:
        unsaid = failing(classes) | (classes == UNDECIDED)
        codes = torch.where(unsaid, IDENTICAL, classes)
    bad = got != want
    fresh = torch.zeros_like(bad) if packed.poison is None else got == packed.poison
    tokens = bad[:, :-1]
    inside = torch.arange(tokens.shape[1], device=got.device) < packed.counts[:, None]
    open_rows = torch.ones_like(codes, dtype=torch.bool)
    set_first(codes, open_rows, (bad & fresh).any(1), code("unwritten"))
    set_first(codes, open_rows, (tokens & ~inside).any(1), code("pad"))
    set_first(codes, open_rows, (tokens & (got[:, :-1] == topk.PAD)).any(1), code("hole"))
    set_first(codes, open_rows, tokens.any(1), code("page-mismatch"))
    set_first(codes, open_rows, bad[:, -1], code("bits"))
    return Decided(
        codes=codes,
        power=bool((packed.counts > 0).any()),
        explain=partial(_explain, packed, want, wanted, codes),
    )


def _explain(
    packed: Packed,
    want: Tensor,
    wanted: Wanted,
    codes: Tensor,
    i: int,
) -> Finding:
    got, right = packed.values[i].long(), want[i].long()
    at = (got != right).nonzero()[:, 0].tolist()
    filled, count = int(packed.filled[i]), int(packed.counts[i])
    lines = []
    for s in at[:_SHOWN]:
        what = "after the counted prefix"
        if s == len(got) - 1:
            what = "the count"
        elif s < filled:
            what = f"block {s // packed.block_size}"
        elif s < count:
            what = "the open group"
        lines.append(
            Evidence(label="slot", place=f"{s}   {what}", value=f"want {right[s]}   got {got[s]}")
        )
    if len(at) > _SHOWN:
        lines.append(Evidence(label="slot", place=f"and {len(at) - _SHOWN:,} more"))
    return Finding(
        stage=packed.stage,
        rule=name(int(codes[i])),
        row=int(packed.ids[i]),
        place=f"{len(at):,} of {len(got):,} slots",
        evidence=tuple(lines),
        reading=_reading(packed, right, wanted, i),
    )


def _reading(packed: Packed, right: Tensor, wanted: Wanted, i: int) -> str:
    """The likely cause, or ""."""
    got = packed.values[i].long()
    filled, count = int(packed.filled[i]), int(packed.counts[i])
    want, cells = right[:-1], got[:-1]
    at = (cells != want).nonzero()[:, 0]
    if not len(at):
        return _of_count(int(got[-1]), int(right[-1]), len(cells))
    held = want[want != topk.PAD]
    firsts = want[: filled : packed.block_size] // packed.block_size
    shift = set((cells - want)[at].tolist()) if bool((want[at] != topk.PAD).all()) else set()
    causes = {
        "the open group's tail is missing": count > filled
        and torch.equal(cells[:filled], want[:filled])
        and bool((cells[filled:] == topk.PAD).all()),
        "the open group's tail stands before the blocks": _turned(packed, wanted, i),
        "the holes are closed up: a block that is -1 leaves its slots at -1": len(held) < count
        and torch.equal(cells[: len(held)], held),
        "blocks stand where their tokens should": len(firsts) > 1
        and torch.equal(cells[: len(firsts)], firsts),
        "the same tokens in another order than the blocks": torch.equal(
            cells.sort().values, want.sort().values
        ),
        f"every wrong token is off by {next(iter(shift), 0):+,}": len(shift) == 1 < len(at),
    }
    return next((sentence for sentence, holds in causes.items() if holds), "")


def _of_count(got: int, want: int, most: int) -> str:
    """What a count is that is not the row's."""
    if got > most:
        return f"the count column holds a token id: {got:,} here, want {want:,}"
    return f"the last column is a count: {got} here, want {want}"


def _turned(packed: Packed, wanted: Wanted, i: int) -> bool:
    """Whether the row is right once the tokens of its open group go behind those of the blocks."""
    filled, count = int(packed.filled[i]), int(packed.counts[i])
    tail = count - filled
    if not tail or not filled:
        return False
    cells = packed.values[i : i + 1]
    turned = torch.cat([cells[:, tail:count], cells[:, :tail], cells[:, count:]], dim=1)
    want = wanted(packed.row(i, turned), i)
    return torch.equal(turned[:, :-1], want[:, :-1])
