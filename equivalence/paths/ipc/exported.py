"""Exported memory with a guard page on each side, and what a step wrote where it may not."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equivalence import poisons
from equivalence.checks.composed.strayed import COLUMNS, REGIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equivalence.world.link import Link

POISON = poisons.BYTE[0]
"""What fresh exported memory, and every private dense buffer of a step, holds."""
MOST = 64
"""Strays that a rank tells at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exported:
    """One region of one kind.

    Attributes:
        region: its number in REGIONS.
        kind: the number of its kind in KINDS.
        rank: one's own.
        flats: u8 [1 + rows + 1, page_bytes] of each rank, the first and last of them guards.
        shape: of what is between.
    """

    region: int
    kind: int
    rank: int
    flats: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def views(self) -> tuple[Tensor, ...]:
        """What is between the guards, by rank."""
        return tuple(
            flat[1:-1].view(self.shape) if len(flat) else flat.view(0, *self.shape[1:])
            for flat in self.flats
        )

    @property
    def own(self) -> Tensor:
        """One's own part."""
        return self.flats[self.rank][1:-1].view(self.shape)


def export(
    link: Link, *, region: int, kind: int, name: str, shape: tuple[int, ...], shared: bool = True
) -> Exported:
    """A region of every rank, poisoned and guarded the first time it is asked for.

    Args:
        link: of this rank; every rank asks for the same.
        region: its number.
        kind: the number of its kind.
        name: what it is exported as.
        shape: [..., page_bytes].
        shared: whether others read it. What is not shared is fresh memory of this rank.
    """
    flat = (prod(shape[:-1]) + 2, shape[-1])
    if shared:
        flats = link.export(name, flat)
    else:
        parts = [torch.empty(0, shape[-1], dtype=torch.uint8, device=link.device)] * link.ranks
        parts[link.rank] = torch.zeros(flat, dtype=torch.uint8, device=link.device)
        flats = tuple(parts)
    made = Exported(region=region, kind=kind, rank=link.rank, flats=flats, shape=shape)
    own, guard = flats[link.rank], _guard(shape[-1], link.device)
    if not torch.equal(own[0], guard):
        own.fill_(POISON)
        own[0], own[-1] = guard, guard
    return made


def guards(exported: Exported) -> Iterator[tuple[int, ...]]:
    """The rows of strays of one's own guard pages, which are put right again."""
    flat = exported.flats[exported.rank]
    guard = _guard(flat.shape[-1], flat.device)
    for side, row in enumerate((0, -1)):
        if not torch.equal(flat[row], guard):
            place = exported.region, exported.kind, REGIONS.index("guard"), side
            yield (*place, *_bytes(flat[row], guard))
            flat[row] = guard


def changes(
    exported: Exported, allowed: Tensor | None, before: Tensor
) -> Iterator[tuple[int, ...]]:
    """The rows of strays of one's own part.

    Args:
        exported: what to look at.
        allowed: bool [first dimension, pages], pages that may change; None where none may.
        before: u8 [n, page_bytes], what the others held, see `watched`.
    """
    own = exported.own
    after = own.flatten(0, 1) if allowed is None else watched(exported, allowed)
    if torch.equal(after, before):
        return
    still = torch.ones(own.shape[:2], dtype=torch.bool) if allowed is None else ~allowed
    where = still.nonzero()
    wrong = (after != before).any(1).nonzero()[:, 0].tolist()
    for row in wrong[:MOST]:
        first, page = where[row].tolist()
        yield (first, exported.kind, exported.region, page, *_bytes(after[row], before[row]))


def watched(exported: Exported, allowed: Tensor) -> Tensor:
    """A copy of the pages that may not change, u8 [n, page_bytes]."""
    return exported.own[~allowed]


def strays(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Int32 [n, 6], n at most MOST."""
    return torch.tensor(rows[:MOST], dtype=torch.int32, device=device).view(-1, len(COLUMNS))


def _bytes(got: Tensor, want: Tensor) -> tuple[int, int]:
    """The first byte that differs, and how many do."""
    differs = got != want
    return int(differs.int().argmax()), int(differs.sum())


def _guard(page_bytes: int, device: torch.device) -> Tensor:
    """What a guard page holds: no constant, so that a fill is seen."""
    return (torch.arange(page_bytes, device=device) * 151 + 83).to(torch.uint8)
