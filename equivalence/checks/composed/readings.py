"""What a wrong page is instead: the rule it breaks, and one sentence where its bytes show a cause.

Whole pages are looked up by their digests among everything that the ranks had in this step and in
the steps before; what is no whole page is read token by token in `tokens`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from equivalence.checks.composed.known import (
    Bytes,
    Known,
    Past,
    Seen,
    bytes_of,
    key_of,
    poisons_of,
)
from equivalence.checks.composed.tokens import of_tokens
from equivalence.checks.composed.wanted import Piece
from equivalence.verdict import Finding
from refimpl import batch as batches

_WRAPS = range(16, 33)
_DEEP = 64
"""Pages that are read token by token."""


def of_page(known: Known, seen: Seen, key: bytes) -> tuple[str, str]:
    """The rule that a wrong page of this digest breaks, and what it looks like or ""."""
    at = (seen.layer, seen.slot, key)
    if at not in known.told:
        known.told[at] = _named(known, seen, key)
    return known.told[at]


def _named(known: Known, seen: Seen, key: bytes) -> tuple[str, str]:
    poison = _poison(known, seen.got)
    if poison is not None:
        told = f"every byte is {poison:02X}, the poison of the buffer: it was never written"
        return "unwritten", told
    if known.page(seen.slot) <= batches.NOTHING:
        what = next(_whole(known, seen, key), ("", ""))[1]
        return "pad", "; ".join(filter(None, ["a padding slot is filled with zeros", what]))
    if not seen.got.any():
        return "page-zero", "every byte is zero"
    found = _wrapped(known, seen) or next(_whole(known, seen, key), None) or _sum(known, seen)
    if found is not None:
        return found
    if known.deep >= _DEEP:
        return "bits", ""
    known.deep += 1
    return of_tokens(known, seen)


def _poison(known: Known, page: Bytes) -> int | None:
    """The poison that fills a page, or None."""
    first = int(page[0])
    return first if first in poisons_of(known) and bool((page == first).all()) else None


def first_staged(known: Known, found: Finding, *, wrong: int) -> Finding:
    """The finding, which says so where only the first current page of a rank's layer is missing.

    Args:
        known: what ranks had.
        found: a wrong page.
        wrong: how many current pages of its rank and layer are wrong.
    """
    missing = found.rule in ("unwritten", "page-zero") and wrong == 1
    if not (missing and len(known.current) > 1 and found.row == known.current[0]):
        return found
    hint = "it is the first current page, and the only wrong one: staging row 0 is reserved"
    return replace(found, reading=f"{found.reading}; {hint}")


def _whole(known: Known, seen: Seen, key: bytes) -> Iterator[tuple[str, str]]:
    """Pages that have the bytes of this one, the most telling first."""
    own = known.page(seen.slot)
    for slot in known.pages.slots(seen.layer).get(key, ())[:1]:
        page = known.page(slot)
        plan = ""
        if known.said_before(seen.slot) == page:
            plan = ", as the step before had it in this slot: a plan of the step before"
        yield "page-mismatch", f"holds page {page}, which slot {slot} has{plan}"
    places = known.pages.pools(seen.layer).get(key, ())
    for place in sorted(places, key=lambda at: at != _place_of(known, own)):
        yield _of_pool(known, seen, place)
    yield from _of_turns(known, seen, key)
    yield from _of_layers(known, key)


def _of_turns(known: Known, seen: Seen, key: bytes) -> Iterator[tuple[str, str]]:
    """What this slot holds in other layers, and any in steps before: the nearest turn first."""
    turns = [
        Past(distance=other, slot=seen.slot, where=f"layer {other}")
        for other in known.layers
        if other != seen.layer and seen.slot in known.pages.slots(other).get(key, ())
    ]
    turns += known.past.get(key, ())
    for turn in sorted(turns, key=lambda each: _nearness(seen, each)):
        where = turn.where + ("" if turn.slot == seen.slot else f", slot {turn.slot}")
        # Halves of a staging hold current pages alone.
        staged = seen.slot in known.current_set
        told = _turns(turn.distance - seen.layer, where) if staged else f"holds the page of {where}"
        yield "stale-round", told


def _nearness(seen: Seen, turn: Past) -> tuple[bool, int, bool]:
    """The same slot first, then turns by how far off they are, those before first."""
    distance = turn.distance - seen.layer
    return turn.slot != seen.slot, abs(distance), distance > 0


def _of_layers(known: Known, key: bytes) -> Iterator[tuple[str, str]]:
    """Any page of any layer."""
    for other in known.layers:
        for slot in known.pages.slots(other).get(key, ())[:1]:
            yield "page-mismatch", f"holds page {known.page(slot)} of layer {other}, in slot {slot}"
    for other in known.layers:
        for rank, local in known.pages.pools(other).get(key, ())[:1]:
            yield "page-mismatch", f"holds local page {local} of rank {rank} of layer {other}"


def _place_of(known: Known, page: int) -> tuple[int, int]:
    return known.places[page] if page > batches.NOTHING else (-1, -1)


def _of_pool(known: Known, seen: Seen, place: tuple[int, int]) -> tuple[str, str]:
    """A page that a pool has in this layer, and no slot of this step."""
    (rank, local), mine = place, _place_of(known, known.page(seen.slot))
    if place == mine:
        return "stale-round", "holds what its owner's pool had before this step"
    if local == batches.NOTHING:
        return "page-zero", f"holds local page 0 of rank {rank}, a dummy"
    name = known.names.get(place)
    what = f"local page {local} of rank {rank}" if name is None else f"page {name}"
    if local == mine[1]:
        return "page-mismatch", f"holds local page {local} of rank {rank}: it is rank {mine[0]}'s"
    plan = ""
    if name is not None and known.said_before(seen.slot) == name:
        plan = ", as the step before had it in this slot: a plan of the step before"
    return "page-mismatch", f"holds {what}, which no slot has{plan}"


def _turns(distance: int, where: str) -> str:
    """What another turn has to do with this one."""
    if distance == 1:
        return f"holds the next turn's page ({where}): its half was reused at distance 1"
    turns = f"{abs(distance)} turn{'' if abs(distance) == 1 else 's'}"
    if distance > 0:
        half = ": its half was written again before it was read" if distance == 2 else ""  # noqa: PLR2004 - the same half
        return f"holds the page of {turns} later ({where}){half}"
    if distance % 2:
        return f"holds the page of {turns} before ({where}), which has the other parity half"
    why = "the same parity half, read before it was written"
    return f"holds the page of {turns} before ({where}): {why}"


def _wrapped(known: Known, seen: Seen) -> tuple[str, str] | None:
    """The bytes of the owner's pool at a byte offset that wrapped."""
    if seen.slot in known.writers:
        return None
    (rank, local), width = _place_of(known, known.page(seen.slot)), len(seen.got)
    pool = known.kind.pools[seen.layer, rank]
    offset = local * width
    for bits in _WRAPS:
        at = offset % (1 << bits)
        if at == offset:
            continue
        page, rest = divmod(at, width)
        near = pool[page : page + 2].reshape(-1)[rest : rest + width]
        if np.array_equal(bytes_of(near), seen.got):
            return "page-mismatch", (
                f"local page {local} of rank {rank} begins at byte {offset:,}, and these are its "
                f"bytes from {at:,} on: a {bits}-bit wrap"
            )
    return None


def _sum(known: Known, seen: Seen) -> tuple[str, str] | None:
    """The right page and another one, added up as bytes."""
    rest = seen.got - seen.want
    if np.array_equal(rest, seen.want):
        return "two-writers", "is twice the right page, byte by byte mod 256: two ranks added it up"
    if not np.any(seen.want):
        return None
    key = key_of(rest)
    for slot in known.pages.slots(seen.layer).get(key, ())[:1]:
        what = f"page {known.page(slot)}, which slot {slot} has"
        return "two-writers", f"is the right page plus {what}, byte by byte mod 256"
    for place in known.pages.pools(seen.layer).get(key, ())[:1]:
        rank, local = place
        own = place == _place_of(known, known.page(seen.slot))
        what = "its owner's pool had before" if own else f"rank {rank} has in local page {local}"
        return "two-writers", f"is the right page plus what {what}, byte by byte mod 256"
    return None


@dataclass(kw_only=True, eq=False)
class Zeros:
    """Prefix pages by their owner: local pages that are all zero, and those that are right."""

    zero: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    good: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def right(self, known: Known, rows: set[int], piece: Piece) -> None:
        """Pages that are as they should be, and hold something."""
        some = rows & set(piece.want.any(1).nonzero()[:, 0].tolist())
        for rank, local in _read(known, {piece.slots.start + row for row in some}):
            self.good[rank].add(local)

    def wrong(self, known: Known, slot: int) -> None:
        """A page that is all zero."""
        for rank, local in _read(known, {slot}):
            self.zero[rank].add(local)

    def explain(self, known: Known, found: Finding) -> Finding:
        """The finding, which says so where every page from some local page on is zero."""
        if found.rule != "page-zero" or found.row is None:
            return found
        for rank, _ in _read(known, {found.row}):
            first = min(self.zero[rank], default=0)
            if not self.good[rank] or max(self.good[rank]) >= first:
                return found
            width = known.kind.pools.shape[-1]
            last, end = max(self.good[rank]) * width, (first + 1) * width
            fits = [bits for bits in reversed(_WRAPS) if last < 1 << bits < end]
            told = f"from local page {first} of rank {rank} on every page is zero"
            told += f": fits a {fits[0]}-bit wrap, at byte {1 << fits[0]:,}" if fits else ""
            return replace(found, reading=told)
        return found


def _read(known: Known, slots: set[int]) -> list[tuple[int, int]]:
    """Where pools have the prefix pages of some slots."""
    prefix = slots - known.current_set
    return [_place_of(known, known.page(s)) for s in prefix if known.page(s) > batches.NOTHING]
