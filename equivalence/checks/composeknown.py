"""What ranks had in a step and in the steps before, by the digests of its pages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from equivalence import poisons
from equivalence.compose import wanted
from equivalence.compose.wanted import Kind, Piece, Step
from refimpl import batch as batches

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One wrong page.

    Attributes:
        layer: where it is.
        slot: where it is.
        want: u8 [page_bytes].
        got: u8 [page_bytes].
        alone: whether it is the only current page of its rank and layer that is wrong.
    """

    layer: int
    slot: int
    want: Bytes
    got: Bytes
    alone: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """A page of another turn: how far off the turn is, and its place in words."""

    distance: int
    slot: int
    where: str


@dataclass(kw_only=True, eq=False)
class Known:
    """Everything that ranks had: made when the first wrong page is looked up.

    Attributes:
        step: what they composed.
        kind: which.
        earlier: the steps before on the same ranks, the latest last.
        poison: what the buffers held before, where known.
        told: the readings of wrong pages.
        deep: how many of them were read token by token.
    """

    step: Step
    kind: Kind
    earlier: Sequence[Step] = ()
    poison: int | None = None
    told: dict[tuple[int, int, bytes], tuple[str, str]] = field(default_factory=dict)
    deep: int = 0

    @cached_property
    def slot_pages(self) -> list[int]:
        """The logical page of each slot."""
        pages: list[int] = self.step.batch.slot_pages.tolist()
        return pages

    @cached_property
    def current(self) -> list[int]:
        """The slots that this step writes."""
        slots: list[int] = batches.current_slots(self.step.batch).tolist()
        return slots

    @cached_property
    def writers(self) -> dict[int, int]:
        """The rank that writes each of them."""
        writers = batches.page_writers(self.step.batch).tolist()
        return dict(zip(self.current, writers, strict=True))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The owner of each logical page, and where it stands there."""
        batch = self.step.batch
        return list(zip(batch.owner.tolist(), batch.local_page.tolist(), strict=True))

    @cached_property
    def names(self) -> dict[tuple[int, int], int]:
        """The logical page of each place in a pool."""
        return {place: page for page, place in enumerate(self.places) if page > batches.NOTHING}

    @cached_property
    def slots(self) -> list[dict[bytes, list[int]]]:
        """The slots that must hold some bytes, layer by layer."""
        return [_slots_of(self.step, self.kind, number) for number in range(len(self.kind.pools))]

    @cached_property
    def pools(self) -> list[dict[bytes, list[tuple[int, int]]]]:
        """The places in pools that hold some bytes, layer by layer."""
        found = []
        for layer in self.kind.pools:
            held: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
            for rank, pool in enumerate(layer):
                for local, page in enumerate(pool.cpu()):
                    held[key_of(bytes_of(page))].append((rank, local))
            found.append(held)
        return found

    @cached_property
    def past(self) -> dict[bytes, list[Past]]:
        """Pages of the steps before, by distance from layer 0 of this one, the nearest first."""
        held: dict[bytes, list[Past]] = defaultdict(list)
        turn = 0
        for ago, step in enumerate(reversed(self.earlier), start=1):
            kind = step.kinds.get(self.kind.name)
            layers = len(next(iter(step.kinds.values())).pools)
            turn -= layers
            said = "the step before" if ago == 1 else f"{ago} steps before"
            if kind is None:
                continue
            for number in range(layers):
                for key, slots in _slots_of(step, kind, number).items():
                    where = f"layer {number} of {said}"
                    held[key] += [Past(distance=turn + number, slot=s, where=where) for s in slots]
        return held

    def page(self, slot: int) -> int:
        """The logical page of a slot."""
        return self.slot_pages[slot]

    def current_wrong(self, rows: Sequence[int], piece: Piece) -> int:
        """How many of some wrong rows of a piece are current pages."""
        return len({piece.slots.start + row for row in rows} & set(self.current))

    def said_before(self, slot: int) -> int | None:
        """The page that the step before had in this slot."""
        if not self.earlier or slot >= len(self.earlier[-1].batch.slot_pages):
            return None
        return int(self.earlier[-1].batch.slot_pages[slot])


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, in a row."""
    flat: Bytes = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
    return flat


def key_of(page: Bytes) -> bytes:
    """What tells pages apart."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(page).data)


def _slots_of(step: Step, kind: Kind, layer: int) -> dict[bytes, list[int]]:
    held: dict[bytes, list[int]] = defaultdict(list)
    pages = step.batch.slot_pages.tolist()
    for piece in wanted.layer(step, kind, layer):
        for slot, page in enumerate(piece.want.cpu(), start=piece.slots.start):
            if pages[slot] > batches.NOTHING:
                held[key_of(bytes_of(page))].append(slot)
    return held


def poisons_of(known: Known) -> set[int]:
    """Bytes that buffers may have held before."""
    return {*poisons.BYTE, *(() if known.poison is None else (known.poison,))} - {0}
