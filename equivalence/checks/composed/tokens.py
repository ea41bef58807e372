"""What a page that is no other page is instead, read token by token."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from equivalence.checks.composed.known import (
    Bytes,
    Known,
    Seen,
    bytes_of,
    key_of,
    poisons_of,
    short_key,
)
from equivalence.wording import listing, ranks
from refimpl import batch as batches
from refimpl.bits import SCALE_BYTES
from refimpl.compose import planes

if TYPE_CHECKING:
    from collections.abc import Callable

Told: TypeAlias = tuple[str, str] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Page:
    """One wrong page as rows of tokens."""

    known: Known
    seen: Seen

    @cached_property
    def size(self) -> int:
        """Tokens a page."""
        return self.known.step.batch.page_size

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a token that stand together, part by part."""
        return planes(self.known.kind.name, self.known.kind.rows.shape[-1])

    @cached_property
    def want(self) -> Bytes:
        """u8 [page_size, token_bytes]."""
        return rows_of(self.seen.want, self.widths, self.size)

    @cached_property
    def got(self) -> Bytes:
        """u8 [page_size, token_bytes]."""
        return rows_of(self.seen.got, self.widths, self.size)

    @cached_property
    def wrong(self) -> list[int]:
        """The tokens that differ."""
        places: list[int] = (self.want != self.got).any(1).nonzero()[0].tolist()
        return places

    @cached_property
    def current(self) -> dict[int, int]:
        """The number among current tokens of those that stand in this page."""
        first, places = self.seen.slot * self.size, self.known.locations
        tokens = ((places >= first) & (places < first + self.size)).nonzero()[0].tolist()
        return {int(places[token]) - first: token for token in tokens}


def rows_of(page: Bytes, widths: tuple[int, ...], size: int) -> Bytes:
    """A page as rows of its tokens, u8 [page_size, token_bytes]."""
    first, parts = 0, []
    for width in widths:
        parts.append(page[first * size : (first + width) * size].reshape(size, width))
        first += width
    return np.concatenate(parts, axis=1)


def page_of(rows: Bytes, widths: tuple[int, ...]) -> Bytes:
    """Rows of tokens as a page."""
    edges = np.cumsum([0, *widths])
    parts = [rows[:, a:b].reshape(-1) for a, b in pairwise(edges)]
    return np.concatenate(parts)


def of_tokens(known: Known, seen: Seen) -> tuple[str, str]:
    """The rule that a page breaks which is no whole page of anything, and what it looks like."""
    page = _Page(known=known, seen=seen)
    looks: tuple[Callable[[_Page], Told], ...] = (
        _poisoned,
        _without,
        _twice,
        _laid_out,
        _elsewhere,
    )
    return next((told for look in looks if (told := look(page)) is not None), ("bits", ""))


def _poisoned(page: _Page) -> Told:
    """Tokens that hold nothing but the poison of the buffer."""
    rows = page.got[page.wrong]
    for poison in poisons_of(page.known):
        if (rows == poison).all():
            what = f"every byte of {_tokens(page.wrong)} is {poison:02X}, the buffer's poison"
            return "unwritten", f"{what}: never written{_by(page)}"
    return None


def _without(page: _Page) -> Told:
    """Tokens that are zero, whoever should have brought them."""
    if page.got[page.wrong].any():
        return None
    carried = set(range(page.size)) - set(page.current)
    held = {token for token in carried if page.want[token].any()}
    if held and set(page.wrong) == held:
        owner = page.known.places[page.known.page(page.seen.slot)][0]
        what = f"the carried {_tokens(page.wrong)} of rank {owner}, the owner, are zero"
        return "bits", f"{what}: only new tokens were placed"
    verb = "is" if len(page.wrong) == 1 else "are"
    return "bits", f"{_tokens(page.wrong)} {verb} zero{_by(page)}; the others are right"


def _twice(page: _Page) -> Told:
    """Tokens that several ranks added up."""
    wrong = page.wrong
    rest = page.got[wrong] - page.want[wrong]
    if np.array_equal(rest, page.want[wrong]):
        return "two-writers", f"{_tokens(wrong)} twice the right bytes mod 256: added up twice"
    rank, local = page.known.places[page.known.page(page.seen.slot)]
    pool = bytes_of(page.known.kind.pools[page.seen.layer, rank, local])
    if np.array_equal(rest, rows_of(pool, page.widths, page.size)[wrong]):
        what = f"{_tokens(wrong)} plus what rank {rank}, the owner, had there"
        return "two-writers", f"{what}, byte by byte mod 256"
    return None


def _laid_out(page: _Page) -> Told:
    """Tokens with their scale beside them where parts stand together, or the reverse."""
    width = page.want.shape[1]
    if len(page.widths) > 1 and np.array_equal(page.got, _mixed(page)):
        what = "each token's scale behind its key"
        return "bits", f"rows are interleaved in a planar page: {what}"
    if len(page.widths) > 1 and np.array_equal(page.seen.got, _planar(page.seen.want, page)):
        return "bits", "a planar page was read as interleaved, then made planar again"
    if len(page.widths) == 1 and width > SCALE_BYTES:
        planar = page_of(page.want, (width - SCALE_BYTES, SCALE_BYTES))
        if np.array_equal(page.seen.got, planar):
            parts = f"{width - SCALE_BYTES} and {SCALE_BYTES} bytes of every token"
            return "bits", f"rows are planar, {parts}: here a token's bytes stand together"
    return None


def _mixed(page: _Page) -> Bytes:
    """The right tokens one after another, read back as a planar page."""
    return rows_of(page.want.reshape(-1), page.widths, page.size)


def _planar(want: Bytes, page: _Page) -> Bytes:
    """A planar page taken as interleaved rows."""
    return page_of(want.reshape(page.size, -1), page.widths)


def _elsewhere(page: _Page) -> Told:
    """Tokens that belong elsewhere, each of them whole."""
    known, layer = page.known, page.seen.layer
    place = known.rows_of(layer)
    # What is the same everywhere says nothing of where it came from.
    found = [place.get(key_of(row)) if row.any() else None for row in page.got[page.wrong]]
    theirs = [token for token in found if token is not None]
    if len(theirs) == len(found) and all(token in page.current for token in page.wrong):
        moved = {token - page.current[at] for at, token in zip(page.wrong, theirs, strict=True)}
        return "page-mismatch", _shift(page, theirs, moved)
    whole = _tokens_of_pages(page)
    if whole is None:
        return None
    slot, tokens = whole
    where = f"page {known.page(slot)}, which slot {slot} has"
    held = "holds" if len(page.wrong) == 1 else "hold"
    return (
        "page-mismatch",
        f"{_tokens(page.wrong)} {held} the bytes of {_tokens(tokens)} of {where}",
    )


def _shift(page: _Page, theirs: list[int], moved: set[int]) -> str:
    """Rows of other current tokens: by how many, and whose."""
    writers = sorted({int(page.known.step.batch.writer[token]) for token in theirs})
    whose = f"of {ranks(writers, most=4)}"
    held = "holds the row" if len(page.wrong) == 1 else "hold the rows"
    if len(moved) > 1:
        return f"{_tokens(page.wrong)} {held} of new tokens {listing(theirs)}, {whose}"
    by = next(iter(moved))
    way = "after" if by > 0 else "before"
    if abs(by) == 1:
        return f"{_tokens(page.wrong)} {held} of the token {way}, {whose}: shifted by one"
    return f"{_tokens(page.wrong)} {held} {abs(by)} tokens {way}, {whose}"


def _tokens_of_pages(page: _Page) -> tuple[int, list[int]] | None:
    """The slot whose tokens the wrong ones are, and which."""
    known, rows = page.known, page.got[page.wrong]
    if not rows.any(1).all():
        return None
    held = known.tokens_of(page.seen.layer, lambda one: rows_of(one, page.widths, page.size))
    slots = np.arange(len(held))
    keys = [short_key(row) for row in rows]
    for key in keys:
        slots = slots[(held[slots] == key).any(1)]
    named = (slot for slot in slots.tolist() if known.page(slot) > batches.NOTHING)
    slot = next(named, None)
    if slot is None:
        return None
    return slot, [int((held[slot] == key).nonzero()[0][-1]) for key in keys]


def _tokens(places: list[int]) -> str:
    """Some tokens by number, as a run where they are one."""
    first, last = min(places), max(places)
    if first == last:
        return f"token {first}"
    run = places == list(range(first, last + 1))
    return f"tokens {first}-{last}" if run else f"tokens {listing(places)}"


def _by(page: _Page) -> str:
    """Whose tokens they are."""
    if page.current and set(page.wrong) <= set(page.current):
        return f", new ones of rank {page.known.writers[page.seen.slot]}"
    owner = page.known.places[page.known.page(page.seen.slot)][0]
    return f", of rank {owner}, the owner"
