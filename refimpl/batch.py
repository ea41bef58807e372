"""A batch under context parallelism as data: which pages it reads and writes, and who has them.

A request has `prefix` tokens from earlier steps and is extended by `extend` tokens in this one.
Its slots are its pages in order: those that hold prefix alone, then the current ones, which this
step writes. A prefix that ends inside a page carries that page's tokens into a current page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOTHING = 0
"""The page id of no page; row 0 of a pool and of a staging is reserved for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One step of a batch, the same on every rank.

    Attributes:
        slot_pages: int32 [S], the logical page of each slot, request by request; 0 or -1 past the
            last request is padding.
        owner: int32 [N], the rank whose pool has each logical page.
        local_page: int32 [N], where it stands there.
        writer: int32 [T], the rank that computes each current token, request by request.
        prefix_lens: int32 [R], tokens of each request written in earlier steps.
        extend_lens: int32 [R], tokens written in this step.
        cp: ranks.
        page_size: tokens a page.
    """

    slot_pages: Tensor
    owner: Tensor
    local_page: Tensor
    writer: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    cp: int
    page_size: int = 64


TENSORS = ("slot_pages", "owner", "local_page", "writer", "prefix_lens", "extend_lens")
"""The tensors of a batch."""


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


def slot_counts(batch: Batch) -> tuple[Tensor, Tensor]:
    """Prefix slots and current slots of each request, int64 [R] each."""
    prefix, extend, size = batch.prefix_lens.long(), batch.extend_lens.long(), batch.page_size
    every = (prefix + extend + size - 1) // size
    before = torch.where(extend > 0, prefix // size, every)
    return before, every - before


def slot_requests(batch: Batch) -> Tensor:
    """The request of each slot, int64 [S]; -1 for padding."""
    before, now = slot_counts(batch)
    owner = torch.arange(len(before), device=before.device).repeat_interleave(before + now)
    padded = owner.new_full((len(batch.slot_pages),), -1)
    padded[: len(owner)] = owner
    return padded


def current_slots(batch: Batch) -> Tensor:
    """The slots that this step writes, int64 [C], ascending."""
    before, now = slot_counts(batch)
    first = (before + now).cumsum(0) - now
    return _ranges(first, now)


def row_locations(batch: Batch) -> Tensor:
    """Where each current token stands in the dense buffer, slot * page_size + offset, int32 [T]."""
    before, now = slot_counts(batch)
    first = (before + now).cumsum(0) - (before + now)
    prefix, extend = batch.prefix_lens.long(), batch.extend_lens.long()
    return _ranges(first * batch.page_size + prefix, extend).int()


def carried_tokens(batch: Batch) -> Tensor:
    """Earlier tokens in each request's first current page, int64 [R]."""
    prefix = batch.prefix_lens.long()
    return torch.where(batch.extend_lens > 0, prefix % batch.page_size, 0)


def page_writers(batch: Batch) -> Tensor:
    """The one rank that writes each current slot, int64 [C].

    Raises:
        ValueError: a page has two.
    """
    at = torch.searchsorted(current_slots(batch), row_locations(batch).long() // batch.page_size)
    writer = batch.writer.long()
    low = writer.new_full((len(current_slots(batch)),), batch.cp)
    high = torch.full_like(low, -1)
    low.scatter_reduce_(0, at, writer, "amin")
    high.scatter_reduce_(0, at, writer, "amax")
    if bool((low != high).any()):
        slot = int(current_slots(batch)[low != high][0])
        raise ValueError(f"slot {slot} has no single writer")
    return low


def staging_rows(batch: Batch) -> Tensor:
    """The staging row of each slot, int64 [S]: current page i has row i + 1, others row 0.

    Row 0 is reserved, since kernels that fill pages skip id 0.
    """
    rows = torch.zeros(len(batch.slot_pages), dtype=torch.int64, device=batch.slot_pages.device)
    now = current_slots(batch)
    rows[now] = torch.arange(1, len(now) + 1, device=rows.device)
    return rows


def direct_table(batch: Batch) -> tuple[Tensor, Tensor]:
    """What one gather over 2 * cp pointers reads for each slot, int64 [S] each.

    Pointers are the pools of ranks 0 .. cp - 1, then their stagings.

    Returns:
        source: the owner's pool of a prefix page, cp + writer of a current one, -1 for padding.
        row: the row to read there.
    """
    now, page = current_slots(batch), batch.slot_pages.long()
    read = page > NOTHING
    source, row = torch.full_like(page, -1), torch.full_like(page, NOTHING)
    source[read] = batch.owner.long()[page[read]]
    row[read] = batch.local_page.long()[page[read]]
    source[now] = batch.cp + page_writers(batch)
    row[now] = staging_rows(batch)[now]
    return source, row


def split_tokens(*, prefix: int, extend: int, cp: int, page_size: int) -> list[int]:
    """A page-aligned split of a request's new tokens in sequence: cp + 1 edges from 0 to extend.

    Ranks take runs of whole pages, the first ones a page more where it does not come out even.
    A carried page belongs to the first run.
    """
    carried = prefix % page_size
    pages = -(-(carried + extend) // page_size)
    whole, more = divmod(pages, cp)
    edges = [rank * whole + min(rank, more) for rank in range(cp + 1)]
    return [min(max(edge * page_size - carried, 0), extend) for edge in edges]


def split_writers(
    *, prefix_lens: Sequence[int], extend_lens: Sequence[int], cp: int, page_size: int
) -> Tensor:
    """The writer of each current token by `split_tokens`, int32 [T], request by request."""
    rank = torch.arange(cp, dtype=torch.int32)
    runs = [
        torch.tensor(split_tokens(prefix=prefix, extend=extend, cp=cp, page_size=page_size)).diff()
        for prefix, extend in zip(prefix_lens, extend_lens, strict=True)
    ]
    return torch.cat([rank.new_empty(0), *(rank.repeat_interleave(run) for run in runs)])


def admitted_pages(*, prefix: int, extend: int, page_size: int) -> int:
    """Staging pages that a request takes, its true carried prefix counted.

    A prefix of 70 extended by 60 takes two pages of 64, not the one that 60 tokens alone would.
    """
    if not extend:
        return 0
    return -(-(prefix + extend) // page_size) - prefix // page_size


def staging_capacity(*, max_tokens: int, max_requests: int, page_size: int) -> int:
    """Staging pages that no admitted batch exceeds: fixed by admission limits, never by a batch.

    Many requests waste most where each but one adds a single token; one that runs alone may carry
    all but one token of a page.
    """
    requests = min(max_requests, max_tokens)
    if requests < 1:
        return 0
    together = (max_tokens - requests) // page_size + requests
    alone = -(-(max_tokens + page_size - 1) // page_size)
    return max(together, alone)


def problems(
    batch: Batch, *, pool_pages: int, staging_pages: int | None = None
) -> Iterator[Problem]:
    """Everything that forbids to compose a batch, before any byte is moved.

    Args:
        batch: the lengths of its tensors fit each other, see `misfit`.
        pool_pages: rows of a rank's pool, row 0 included.
        staging_pages: staging rows that hold a current page; None where there is no limit.

    Yields:
        Each page is told of under the first rule it breaks.
    """
    yield from _strange_pages(batch, pool_pages)
    yield from _reserved_pages(batch)
    yield from _unowned_pages(batch)
    yield from _written_twice(batch)
    yield from _carried_together(batch)
    needed = len(current_slots(batch))
    if staging_pages is not None and needed > staging_pages:
        pages = batch.slot_pages[current_slots(batch)][staging_pages:].tolist()
        yield Problem(
            rule="over-budget",
            sentence=f"{needed} current pages do not fit into {staging_pages} staging pages: "
            f"{_listing(pages)} have none",
            page=pages[0],
        )


def refuse(batch: Batch, *, pool_pages: int, staging_pages: int | None = None) -> None:
    """Raise a ValueError with the sentence and the ids unless a batch may be composed.

    Args:
        batch: any.
        pool_pages: as in `problems`, as the next one.
        staging_pages: see there.
    """
    if why := misfit(batch):
        raise ValueError(why)
    for problem in problems(batch, pool_pages=pool_pages, staging_pages=staging_pages):
        raise ValueError(problem.sentence)


def misfit(batch: Batch) -> str:
    """Why the tensors of a batch contradict each other, in one sentence, or ""."""
    if batch.cp < 1 or batch.page_size < 1:
        return f"cp is {batch.cp} and page_size {batch.page_size}: both are 1 or more"
    for name in ("prefix_lens", "extend_lens"):
        lens = getattr(batch, name)
        if len(lens) and int(lens.min()) < 0:
            at = int(lens.argmin())
            return f"{name} of request {at} is {int(lens[at])}: it is 0 or more"
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


def _strange_pages(batch: Batch, pool_pages: int) -> Iterator[Problem]:
    """Pages, owners, local pages and writers that do not exist."""
    page = batch.slot_pages.long()
    for slot in ((page >= max(len(batch.owner), 1)) | (page < -1)).nonzero()[:, 0].tolist():
        yield Problem(
            rule="out-of-window",
            sentence=f"page {int(page[slot])} is none of {len(batch.owner)} logical pages",
            slot=slot,
            page=int(page[slot]),
        )
    for slot, page_id, owner, local in _places(batch):
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


def _reserved_pages(batch: Batch) -> Iterator[Problem]:
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
    for slot, page_id, owner, local in _places(batch):
        if owner >= 0 and local == NOTHING:
            yield Problem(
                rule="page-zero",
                sentence=f"page {page_id} rests on local page 0 of rank {owner}, a dummy",
                slot=slot,
                page=page_id,
                ranks=(owner,),
            )


def _unowned_pages(batch: Batch) -> Iterator[Problem]:
    """Pages that no pool has, and current tokens that no rank writes."""
    for slot, page, owner, _ in _places(batch):
        if owner == -1:
            sentence = f"page {page} has no owner"
            yield Problem(rule="no-writer", sentence=sentence, slot=slot, page=page)
    slots = row_locations(batch).long() // batch.page_size
    for slot in _distinct(slots[batch.writer == -1]):
        tokens = int(((slots == slot) & (batch.writer == -1)).sum())
        page = int(batch.slot_pages[slot])
        sentence = f"page {page} has {tokens} current tokens that no rank writes"
        yield Problem(rule="no-writer", sentence=sentence, slot=slot, page=page)


def _written_twice(batch: Batch) -> Iterator[Problem]:
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
    for slot, page, owner, local in _places(batch):
        at.setdefault(page, []).append(slot)
        if owner >= 0 and held.setdefault((owner, local), page) != page:
            other = held[owner, local]
            sentence = f"pages {other} and {page} are one: local page {local} of rank {owner}"
            yield Problem(
                rule="two-writers", sentence=sentence, slot=slot, page=page, ranks=(owner,)
            )
    for page, places in at.items():
        written = sorted(now & set(places))
        if len(places) > 1 and written:
            sentence = (
                f"page {page} is written in slot {written[0]} and stands in slots "
                f"{_listing(places)}"
            )
            yield Problem(rule="two-writers", sentence=sentence, slot=written[0], page=page)


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


def _places(batch: Batch) -> list[tuple[int, int, int, int]]:
    """Slots that hold an existing logical page: slot, page, its owner and its local page."""
    owner, local = batch.owner.tolist(), batch.local_page.tolist()
    return [
        (slot, page, owner[page], local[page])
        for slot, page in enumerate(batch.slot_pages.tolist())
        if NOTHING < page < len(owner)
    ]


def _distinct(values: Tensor) -> list[int]:
    """The different values, ascending."""
    return sorted(set(values.tolist()))


def _ranges(first: Tensor, count: Tensor) -> Tensor:
    """first[i], first[i] + 1, ... of count[i] numbers, one range after another, int64."""
    own = torch.arange(len(count), device=count.device).repeat_interleave(count)
    start = count.cumsum(0) - count
    ranges: Tensor = first[own] + torch.arange(len(own), device=own.device) - start[own]
    return ranges


def _listing(values: Sequence[int], most: int = 8) -> str:
    """At most a few numbers, then how many more."""
    told = " ".join(map(str, values[:most]))
    return told if len(values) <= most else f"{told} and {len(values) - most} more"
