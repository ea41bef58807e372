"""What ranks had in a step and in the steps before, by the digests of its pages."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from equivalence import layout, poisons
from equivalence.checks.composed import wanted
from equivalence.checks.composed.wanted import Kind, Step
from refimpl import batch as batches

Bytes: TypeAlias = npt.NDArray[np.uint8]
Keys: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One wrong page.

    Attributes:
        layer: where it is.
        slot: where it is.
        want: u8 [page_bytes].
        got: u8 [page_bytes].
    """

    layer: int
    slot: int
    want: Bytes
    got: Bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """A page of another turn: how far off the turn is, and its place in words."""

    distance: int
    slot: int
    where: str


@dataclass(kw_only=True, eq=False)
class Pages:
    """The pages of a step by their digests, each layer made when it is first asked for.

    Attributes:
        step: whose.
        kind: which.
    """

    step: Step
    kind: Kind
    _keys: dict[int, list[list[bytes]]] = field(default_factory=dict)
    _pools: dict[int, dict[bytes, list[tuple[int, int]]]] = field(default_factory=dict)
    _slots: dict[int, dict[bytes, list[int]]] = field(default_factory=dict)

    def pools(self, layer: int) -> dict[bytes, list[tuple[int, int]]]:
        """The places in pools that hold some bytes."""
        if layer not in self._pools:
            held: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
            for rank, keys in enumerate(self._pool_keys(layer)):
                for local, key in enumerate(keys):
                    held[key].append((rank, local))
            self._pools[layer] = dict(held)
        return self._pools[layer]

    def slots(self, layer: int) -> dict[bytes, list[int]]:
        """The slots that must hold some bytes; a prefix page is a page of a pool."""
        if layer not in self._slots:
            batch, pools = self.step.batch, self._pool_keys(layer)
            owner, local = batch.owner.tolist(), batch.local_page.tolist()
            now = dict(self._current_keys(layer))
            held: dict[bytes, list[int]] = defaultdict(list)
            for slot, page in enumerate(batch.slot_pages.tolist()):
                if page > batches.NOTHING:
                    held[now.get(slot) or pools[owner[page]][local[page]]].append(slot)
            self._slots[layer] = dict(held)
        return self._slots[layer]

    def _pool_keys(self, layer: int) -> list[list[bytes]]:
        if layer not in self._keys:
            pools = self.kind.pools[layer]
            self._keys[layer] = [[key_of(page) for page in rows_in(pool)] for pool in pools]
        return self._keys[layer]

    def _current_keys(self, layer: int) -> Iterator[tuple[int, bytes]]:
        """The slots of current pages, composed without the prefix."""
        batch = self.step.batch
        slots = batches.current_slots(batch)
        alone = replace(
            batch,
            slot_pages=batch.slot_pages[slots.long()],
            prefix_lens=batches.carried_tokens(batch),
        )
        places = slots.tolist()
        for piece in wanted.layer(replace(self.step, batch=alone), self.kind, layer):
            for slot, page in zip(places[piece.slots], rows_in(piece.want), strict=True):
                yield slot, key_of(page)


@dataclass(kw_only=True, eq=False)
class Known:
    """Everything that ranks had: made as far as wrong pages are looked up.

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
    _rows: dict[int, dict[bytes, int]] = field(default_factory=dict)
    _tokens: dict[int, Keys] = field(default_factory=dict)

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
    def current_set(self) -> frozenset[int]:
        """The same, to look up."""
        return frozenset(self.current)

    @cached_property
    def locations(self) -> npt.NDArray[np.int32]:
        """Where each current token stands in the dense buffer, int32 [T]."""
        places: npt.NDArray[np.int32] = batches.row_locations(self.step.batch).cpu().numpy()
        return places

    @cached_property
    def pages(self) -> Pages:
        """What this step has."""
        return Pages(step=self.step, kind=self.kind)

    @cached_property
    def layers(self) -> range:
        """The layers of this step."""
        return range(len(self.kind.pools))

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
            pages = Pages(step=step, kind=kind)
            for number in range(layers):
                where = f"layer {number} of {said}"
                for key, slots in pages.slots(number).items():
                    held[key] += [Past(distance=turn + number, slot=s, where=where) for s in slots]
        return held

    def rows_of(self, layer: int) -> dict[bytes, int]:
        """The first new token that has some bytes; kept for one layer."""
        if layer not in self._rows:
            rows = list(enumerate(rows_in(self.kind.rows[layer])))
            self._rows = {layer: {key_of(row): token for token, row in reversed(rows)}}
        return self._rows[layer]

    def tokens_of(self, layer: int, split: Callable[[Bytes], Bytes]) -> Keys:
        """Short digests of the tokens of each slot [S, page_size]; kept for one layer.

        Args:
            layer: which.
            split: a page as rows of its tokens.
        """
        if layer not in self._tokens:
            size = self.step.batch.page_size
            keys = np.empty((len(self.slot_pages), size), dtype=np.uint64)
            for piece in wanted.layer(self.step, self.kind, layer):
                for slot, page in enumerate(rows_in(piece.want), start=piece.slots.start):
                    keys[slot] = [short_key(row) for row in split(page)]
            self._tokens = {layer: keys}
        return self._tokens[layer]

    def page(self, slot: int) -> int:
        """The logical page of a slot."""
        return self.slot_pages[slot]

    def said_before(self, slot: int) -> int | None:
        """The page that the step before had in this slot."""
        if not self.earlier or slot >= len(self.earlier[-1].batch.slot_pages):
            return None
        return int(self.earlier[-1].batch.slot_pages[slot])


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, in a row."""
    flat: Bytes = layout.flat_bytes(tensor).cpu().numpy()
    return flat


def rows_in(pages: Tensor) -> Bytes:
    """Pages on the host, u8 [n, page_bytes], without a copy where they are there."""
    rows: Bytes = pages.detach().contiguous().cpu().view(torch.uint8).numpy()
    return rows


def key_of(page: Bytes) -> bytes:
    """What tells pages apart."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(page).data)


def short_key(row: Bytes) -> int:
    """What tells tokens apart, 64 bits."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data)


def poisons_of(known: Known) -> set[int]:
    """Bytes that buffers may have held before."""
    return {*poisons.BYTE, *(() if known.poison is None else (known.poison,))} - {0}
