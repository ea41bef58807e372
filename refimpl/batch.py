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
    from collections.abc import Sequence

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
        pool_group: pages that a row of the index pool stands for.
    """

    slot_pages: Tensor
    owner: Tensor
    local_page: Tensor
    writer: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    cp: int
    page_size: int = 64
    pool_group: int = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is admitted to a step, and the staging that is there for it; None where nobody says.

    Attributes:
        staging_pages: staging rows that hold a current page.
        max_tokens: new tokens of a step.
        max_requests: requests that a step extends.
    """

    staging_pages: int | None = None
    max_tokens: int | None = None
    max_requests: int | None = None


TENSORS = ("slot_pages", "owner", "local_page", "writer", "prefix_lens", "extend_lens")
"""The tensors of a batch."""


def admitted_pages(*, prefix_lens: Tensor, extend_lens: Tensor, page_size: int) -> Tensor:
    """Staging pages that each request takes, its true carried prefix counted: int64 [R].

    A prefix of 70 extended by 60 takes two pages of 64, not the one that 60 tokens alone would.

    Args:
        prefix_lens: int [R], as in `Batch`.
        extend_lens: int [R].
        page_size: tokens a page.
    """
    prefix, extend = prefix_lens.long(), extend_lens.long()
    touched = (prefix + extend + page_size - 1) // page_size - prefix // page_size
    return torch.where(extend > 0, touched, 0)


def slot_counts(batch: Batch) -> tuple[Tensor, Tensor]:
    """Prefix slots and current slots of each request, int64 [R] each."""
    prefix, extend, size = batch.prefix_lens.long(), batch.extend_lens.long(), batch.page_size
    now = admitted_pages(prefix_lens=prefix, extend_lens=extend, page_size=size)
    return (prefix + extend + size - 1) // size - now, now


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


def limited_pages(limits: Limits, *, page_size: int) -> int | None:
    """Staging pages that admission limits ask for, see `staging_capacity`; None without limits."""
    if limits.max_tokens is None or limits.max_requests is None:
        return None
    return staging_capacity(
        max_tokens=limits.max_tokens, max_requests=limits.max_requests, page_size=page_size
    )


def _ranges(first: Tensor, count: Tensor) -> Tensor:
    """first[i], first[i] + 1, ... of count[i] numbers, one range after another, int64."""
    own = torch.arange(len(count), device=count.device).repeat_interleave(count)
    start = count.cumsum(0) - count
    ranges: Tensor = first[own] + torch.arange(len(own), device=own.device) - start[own]
    return ranges
