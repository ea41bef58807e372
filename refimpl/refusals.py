"""Why a batch may not be composed, whatever bytes would come out: said before any byte is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from refimpl.batch import (
    NOTHING,
    Batch,
    Limits,
    carried_tokens,
    current_slots,
    limited_pages,
    page_writers,
    row_locations,
    slot_counts,
    slot_requests,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_Place: TypeAlias = tuple[int, int, int, int]
"""A slot, its logical page, the page's owner and its local page there."""
_FREE = Limits()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a batch may not be composed, whatever bytes would come out.

    Attributes:
        rule: in the vocabulary of verdicts.
        sentence: what is wrong, with the ids.
        slot: where, or None.
        page: the logical page, or None.
        ranks: those concerned.
    """

    rule: str
    sentence: str
    slot: int | None = None
    page: int | None = None
    ranks: tuple[int, ...] = ()


def problems(batch: Batch, *, pool_pages: int, limits: Limits = _FREE) -> Iterator[Problem]:
    """Everything that forbids to compose a batch, before any byte is moved.

    Args:
        batch: the lengths of its tensors fit each other, see `misfit`.
        pool_pages: rows of a rank's pool, row 0 included.
        limits: of admission and of staging.

    Yields:
        Each page is told of under the first rule it breaks.
    """
    places = _places(batch)
    yield from _strange_pages(batch, places, pool_pages)
    yield from _reserved_pages(batch, places)
    yield from _unowned_pages(batch, places)
    split = list(_written_twice(batch, places))
    yield from split
    if not split and batch.pool_group > 1:
        yield from _groups_written_twice(batch, places)
    yield from _carried_together(batch)
    yield from _beyond_limits(batch, limits)


def refuse(batch: Batch, *, pool_pages: int, limits: Limits = _FREE) -> None:
    """Raise a ValueError with the sentence and the ids unless a batch may be composed.

    Args:
        batch: any.
        pool_pages: as in `problems`, as the next one.
        limits: see there.
    """
    if why := misfit(batch):
        raise ValueError(why)
    for problem in problems(batch, pool_pages=pool_pages, limits=limits):
        raise ValueError(problem.sentence)


def misfit(batch: Batch) -> str:
    """Why the tensors of a batch contradict each other, in one sentence, or ""."""
    if why := _odd_size(batch):
        return why
    tokens = int(batch.extend_lens.long().sum())
    if tokens != len(batch.writer):
        return f"extend_lens add up to {tokens} tokens; writer names {len(batch.writer)}"
    before, now = slot_counts(batch)
    slots = int((before + now).sum())
    if slots > len(batch.slot_pages):
        return f"the requests have {slots} pages; slot_pages lists {len(batch.slot_pages)}"
    padding = batch.slot_pages[slots:]
    if bool((padding > NOTHING).any()):
        at = slots + int((padding > NOTHING).nonzero()[0])
        return (
            f"slot {at} holds page {int(batch.slot_pages[at])} and no request: "
            f"{slots} slots are the requests' pages, padding is 0 or -1"
        )
    return ""


def _odd_size(batch: Batch) -> str:
    """A number or a length that no batch has, or ""."""
    for name in ("cp", "page_size", "pool_group"):
        if (size := int(getattr(batch, name))) < 1:
            return f"{name} is {size}: it is 1 or more"
    for one, two in (("owner", "local_page"), ("prefix_lens", "extend_lens")):
        first, second = len(getattr(batch, one)), len(getattr(batch, two))
        if first != second:
            return f"{one} has {first} entries and {two} {second}: they have as many"
    for name in ("prefix_lens", "extend_lens"):
        lens = getattr(batch, name)
        if len(lens) and int(lens.min()) < 0:
            at = int(lens.argmin())
            return f"{name} of request {at} is {int(lens[at])}: it is 0 or more"
    return ""


def _strange_pages(batch: Batch, places: Sequence[_Place], pool_pages: int) -> Iterator[Problem]:
    """Pages, owners, local pages and writers that do not exist."""
    page = batch.slot_pages.long()
    for slot in ((page >= max(len(batch.owner), 1)) | (page < -1)).nonzero()[:, 0].tolist():
        yield Problem(
            rule="out-of-window",
            sentence=f"page {int(page[slot])} is none of {len(batch.owner)} logical pages",
            slot=slot,
            page=int(page[slot]),
        )
    for slot, page_id, owner, local in places:
        if owner >= batch.cp or owner < -1:
            sentence = f"page {page_id} is owned by rank {owner} of {batch.cp}"
            yield Problem(rule="out-of-window", sentence=sentence, slot=slot, page=page_id)
        elif owner >= 0 and not 0 <= local < pool_pages:
            sentence = (
                f"page {page_id} is local page {local} of rank {owner}, which has {pool_pages}"
            )
            yield Problem(
                rule="out-of-window", sentence=sentence, slot=slot, page=page_id, ranks=(owner,)
            )
    writer = batch.writer.long()
    for token in ((writer >= batch.cp) | (writer < -1)).nonzero()[:1, 0].tolist():
        sentence = f"token {token} is written by rank {int(writer[token])} of {batch.cp}"
        yield Problem(rule="out-of-window", sentence=sentence)


def _reserved_pages(batch: Batch, places: Sequence[_Place]) -> Iterator[Problem]:
    """Slots of requests that rest on page 0, and pages that rest on a pool's row 0."""
    request, page = slot_requests(batch), batch.slot_pages.long()
    for slot in ((request >= 0) & (page <= NOTHING) & (page >= -1)).nonzero()[:, 0].tolist():
        yield Problem(
            rule="page-zero",
            sentence=f"request {int(request[slot])} relies on page {int(page[slot])}, "
            "which holds nothing",
            slot=slot,
            page=int(page[slot]),
        )
    for slot, page_id, owner, local in places:
        if owner >= 0 and local == NOTHING:
            yield Problem(
                rule="page-zero",
                sentence=f"page {page_id} rests on local page 0 of rank {owner}, a dummy",
                slot=slot,
                page=page_id,
                ranks=(owner,),
            )


def _unowned_pages(batch: Batch, places: Sequence[_Place]) -> Iterator[Problem]:
    """Pages that no pool has, and current tokens that no rank writes."""
    for slot, page, owner, _ in places:
        if owner == -1:
            sentence = f"page {page} has no owner"
            yield Problem(rule="no-writer", sentence=sentence, slot=slot, page=page)
    slots = row_locations(batch).long() // batch.page_size
    for slot in _distinct(slots[batch.writer == -1]):
        tokens = int(((slots == slot) & (batch.writer == -1)).sum())
        page = int(batch.slot_pages[slot])
        many = f"{tokens} current token{'' if tokens == 1 else 's'}"
        sentence = f"page {page} has {many} that no rank writes"
        yield Problem(rule="no-writer", sentence=sentence, slot=slot, page=page)


def _written_twice(batch: Batch, places: Sequence[_Place]) -> Iterator[Problem]:
    """Current pages that two ranks write, that stand in two slots, or that are read as prefix."""
    slots = (row_locations(batch).long() // batch.page_size).tolist()
    ranks: dict[int, set[int]] = {}
    for slot, rank in zip(slots, batch.writer.tolist(), strict=True):
        ranks.setdefault(slot, set()).add(rank)
    for slot, several in ranks.items():
        writers = tuple(sorted(several - {-1}))
        if len(writers) > 1:
            page = int(batch.slot_pages[slot])
            sentence = f"page {page} is written by ranks {_listing(writers)}: a split inside a page"
            yield Problem(
                rule="two-writers", sentence=sentence, slot=slot, page=page, ranks=writers
            )
    now = set(current_slots(batch).tolist())
    at: dict[int, list[int]] = {}
    held: dict[tuple[int, int], int] = {}
    for slot, page, owner, local in places:
        at.setdefault(page, []).append(slot)
        if owner >= 0 and held.setdefault((owner, local), page) != page:
            other = held[owner, local]
            sentence = f"pages {other} and {page} are one: local page {local} of rank {owner}"
            yield Problem(
                rule="two-writers", sentence=sentence, slot=slot, page=page, ranks=(owner,)
            )
    for page, where in at.items():
        written = sorted(now & set(where))
        if len(where) > 1 and written:
            sentence = (
                f"page {page} is written in slot {written[0]} and stands in slots {_listing(where)}"
            )
            yield Problem(rule="two-writers", sentence=sentence, slot=written[0], page=page)


def _groups_written_twice(batch: Batch, places: Sequence[_Place]) -> Iterator[Problem]:
    """Pool groups that this step writes and that are of two ranks, though no page of them is."""
    owner = {slot: each for slot, _, each, _ in places}
    now = dict(zip(current_slots(batch).tolist(), page_writers(batch).tolist(), strict=True))
    groups: dict[tuple[int, int], list[int]] = {}
    first: dict[int, int] = {}
    for slot, request in enumerate(slot_requests(batch).tolist()):
        if request >= 0:
            place = slot - first.setdefault(request, slot)
            groups.setdefault((request, place // batch.pool_group), []).append(slot)
    for slots in groups.values():
        written = [slot for slot in slots if slot in now]
        ranks = {now.get(slot, owner.get(slot, -1)) for slot in slots} - {-1}
        if written and len(ranks) > 1:
            pages = [int(batch.slot_pages[slot]) for slot in slots]
            sentence = (
                f"pages {_listing(pages)} are one pool group of ranks {_listing(sorted(ranks))}: "
                "a split inside a group"
            )
            yield Problem(
                rule="two-writers",
                sentence=sentence,
                slot=written[0],
                page=int(batch.slot_pages[written[0]]),
                ranks=tuple(sorted(ranks)),
            )


def _carried_together(batch: Batch) -> Iterator[Problem]:
    """Carried prefixes that run beside others, or that another than their owner writes."""
    carried = carried_tokens(batch)
    before, now = slot_counts(batch)
    first = (before + now).cumsum(0) - now
    active = int((batch.extend_lens > 0).sum())
    slots = row_locations(batch).long() // batch.page_size
    for request in carried.nonzero()[:, 0].tolist():
        slot = int(first[request])
        page, tokens = int(batch.slot_pages[slot]), int(carried[request])
        if len(batch.prefix_lens) > 1:
            others = len(batch.prefix_lens) - 1
            sentence = (
                f"request {request} carries {tokens} tokens of page {page} and runs beside "
                f"{others} other{'s' if others > 1 else ''} ({active} extend): "
                "an unaligned prefix runs alone"
            )
            yield Problem(rule="two-writers", sentence=sentence, slot=slot, page=page)
            continue
        owner = int(batch.owner[page]) if NOTHING < page < len(batch.owner) else -1
        ranks = tuple(w for w in _distinct(batch.writer[slots == slot]) if w >= 0)
        if owner >= 0 and len(ranks) == 1 and ranks[0] != owner:
            sentence = (
                f"page {page} carries {tokens} tokens of rank {owner}, its owner, "
                f"and is written by rank {ranks[0]}"
            )
            yield Problem(
                rule="two-writers",
                sentence=sentence,
                slot=slot,
                page=page,
                ranks=(owner, ranks[0]),
            )


def _beyond_limits(batch: Batch, limits: Limits) -> Iterator[Problem]:
    """More than is admitted, a staging that is not that of the limits, and pages without a row."""
    tokens, requests = len(batch.writer), int((batch.extend_lens > 0).sum())
    for count, most, what in (
        (tokens, limits.max_tokens, "new tokens"),
        (requests, limits.max_requests, "requests that extend"),
    ):
        if most is not None and count > most:
            sentence = f"{count} {what} are more than the {most} that are admitted"
            yield Problem(rule="over-budget", sentence=sentence)
    asked = limited_pages(limits, page_size=batch.page_size)
    staged = asked if limits.staging_pages is None else limits.staging_pages
    if asked is not None and staged != asked:
        yield Problem(
            rule="over-budget",
            sentence=f"staging has {staged} pages; {limits.max_tokens} tokens of "
            f"{limits.max_requests} requests, as admitted, take {asked}",
        )
    pages = batch.slot_pages[current_slots(batch)].tolist()
    if staged is not None and len(pages) > staged:
        yield Problem(
            rule="over-budget",
            sentence=f"{len(pages)} current pages do not fit into {staged} staging pages: "
            f"{_listing(pages[staged:])} have none",
            page=pages[staged],
        )


def _places(batch: Batch) -> list[_Place]:
    """Slots that hold an existing logical page, ascending."""
    owner, local = batch.owner.tolist(), batch.local_page.tolist()
    return [
        (slot, page, owner[page], local[page])
        for slot, page in enumerate(batch.slot_pages.tolist())
        if NOTHING < page < len(owner)
    ]


def _distinct(values: Tensor) -> list[int]:
    """The different values, ascending."""
    return sorted(set(values.tolist()))


def _listing(values: Sequence[int], most: int = 8) -> str:
    """At most a few numbers, then how many more."""
    told = " ".join(map(str, values[:most]))
    return told if len(values) <= most else f"{told} and {len(values) - most} more"
