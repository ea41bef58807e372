"""A rank's plan of one batch: every index that composing it takes, built once for all layers."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equivalence import digest
from equivalence.latest import latest
from equivalence.paths.ipc import moves
from equivalence.paths.ipc.moves import Places, Read
from refimpl import batch as batches
from refimpl import refusals
from refimpl.batch import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from refimpl.batch import Batch

_KEPT = 64
_FREE = Limits()


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """One request in the legacy way; slots and places count from its first slot.

    Attributes:
        slots: where the request stands in the dense buffer.
        prefix: the pages of its prefix that are in the own pool.
        places: its current pages that are one's own.
        tokens: which of the own tokens are its.
    """

    slots: slice
    prefix: Read
    places: Places
    tokens: slice


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What one rank reads and writes for a batch; index tensors stand where the regions do.

    Attributes:
        rank: whose plan it is.
        ranks: how many there are.
        page_size: tokens a page.
        slots: S.
        capacity: staging rows that hold a current page.
        own: int64 [m], which of the T current tokens this rank computes.
        locations: int32 [T], where current tokens stand in the dense buffer.
        prefix: reads through the pools of all ranks.
        current: int64 [C], the slots written in this step.
        padding: int64, slots that hold nothing.
        unread: int64, slots that no pool has: current ones and padding.
        written: reads through the dense buffers of all ranks, current pages at their slots.
        staged: reads through the stagings of all ranks, current pages at their rows.
        table: reads through 2 * cp pointers, pools and then stagings.
        dense: own current pages in a dense buffer.
        compact: own current pages among the current pages.
        staging: own current pages in a staging.
        spans: one for each request with slots.
        hits: by layer, whether its prefix is gathered early by this rank.
    """

    rank: int
    ranks: int
    page_size: int
    slots: int
    capacity: int
    own: Tensor
    locations: Tensor
    prefix: tuple[Read, ...]
    current: Tensor
    padding: Tensor
    unread: Tensor
    written: tuple[Read, ...]
    staged: tuple[Read, ...]
    table: tuple[Read, ...]
    dense: Places
    compact: Places
    staging: Places
    spans: tuple[Span, ...]
    hits: tuple[bool, ...] = ()

    @cached_property
    def prefix_here(self) -> tuple[Read, ...]:
        """The prefix pages of one's own pool, through a table of that alone."""
        own = (read for read in self.prefix if read.source == self.rank)
        return moves.moved(tuple(own), -self.rank)

    @cached_property
    def written_elsewhere(self) -> tuple[Read, ...]:
        """As written, the others' pages alone."""
        return moves.elsewhere(self.written, self.rank)

    @cached_property
    def staged_elsewhere(self) -> tuple[Read, ...]:
        """As staged, the others' pages alone."""
        return moves.elsewhere(self.staged, self.rank)

    @cached_property
    def table_current(self) -> tuple[Read, ...]:
        """As table, current pages alone."""
        return moves.moved(self.staged, self.ranks)


def capacity(batch: Batch, limits: Limits) -> int:
    """Staging rows that hold a current page: as limits say, or enough for this batch.

    Without limits it is a power of two, so that batches of about one size share their memory.
    """
    if limits.staging_pages is not None:
        return limits.staging_pages
    asked = batches.limited_pages(limits, page_size=batch.page_size)
    return room(len(batches.current_slots(batch))) if asked is None else asked


def room(pages: int) -> int:
    """The least power of two that is enough, 1 or more."""
    return 1 << max(pages - 1, 0).bit_length()


def build(
    batch: Batch,
    *,
    rank: int,
    device: torch.device,
    limits: Limits = _FREE,
    hits: Sequence[bool] = (),
) -> Plan:
    """The plan of a batch that may be composed, see `refimpl.refusals.refuse`.

    Args:
        batch: on the CPU.
        rank: whose plan.
        device: where the regions are.
        limits: of admission and of staging.
        hits: by layer, whether the prefix is gathered early.
    """
    now, page = batches.current_slots(batch), batch.slot_pages
    source, row = batches.direct_table(batch)
    old = (source >= 0) & (source < batch.cp)
    writers, staging = batches.page_writers(batch), batches.staging_rows(batch)[now]
    places = _own(batch, rank=rank, now=now, writers=writers)
    prefix = _reads(source.where(old, -1), torch.arange(len(page)), row, batch.cp)
    staged = _reads(writers, now, staging, batch.cp)
    plan = Plan(
        rank=rank,
        ranks=batch.cp,
        page_size=batch.page_size,
        slots=len(page),
        capacity=capacity(batch, limits),
        own=(batch.writer == rank).nonzero()[:, 0],
        locations=batches.row_locations(batch),
        prefix=prefix,
        current=now,
        padding=(source < 0).nonzero()[:, 0],
        unread=(~old).nonzero()[:, 0],
        written=_reads(writers, now, now, batch.cp),
        staged=staged,
        table=(*prefix, *moves.moved(staged, batch.cp)),
        dense=places(now),
        compact=places(torch.arange(len(now))),
        staging=places(staging),
        spans=(),
        hits=tuple(hits),
    )
    moved: Plan = _on(replace(plan, spans=tuple(_spans(batch, plan))), device)
    return moved


def planner() -> Callable[..., Plan]:
    """A function that keeps its latest plans, found by what a batch holds and never by where it is.

    It takes a batch and `pool_pages`, rows that every pool has, beside what `build` takes, and
    raises a ValueError where the batch may not be composed.
    """
    return latest(_planned, key=_content, most=_KEPT)


def _planned(
    batch: Batch,
    *,
    pool_pages: int,
    limits: Limits = _FREE,
    **call: Any,  # noqa: ANN401 - as `build`
) -> Plan:
    refusals.refuse(batch, pool_pages=pool_pages, limits=limits)
    return build(batch, limits=limits, **call)


def _content(batch: Batch, **call: Any) -> str:  # noqa: ANN401 - as `_planned`
    """Everything that a batch says, as a digest, and what else is asked for."""
    sizes = [[name, *getattr(batch, name).shape] for name in batches.TENSORS]
    told = json.dumps(
        [batch.cp, batch.page_size, batch.pool_group, sizes, call], sort_keys=True, default=str
    )
    return told + "".join(digest.of_tensor(getattr(batch, name)) for name in batches.TENSORS)


of = planner()
"""The plans of this process."""


def _own(batch: Batch, *, rank: int, now: Tensor, writers: Tensor) -> Callable[[Tensor], Places]:
    """(rows of current pages in a buffer) -> where a rank's own go there."""
    mine = (writers == rank).nonzero()[:, 0]
    tokens = batches.row_locations(batch).long()[(batch.writer == rank).nonzero()[:, 0]]
    at, offset = torch.searchsorted(now, tokens // batch.page_size), tokens % batch.page_size
    first = _carried(batch)
    first = first[torch.isin(first, now[mine])]
    index = torch.searchsorted(now, first)
    held = batch.local_page.long()[batch.slot_pages.long()[first]]

    def places(rows: Tensor) -> Places:
        return Places(
            pages=rows[mine],
            tokens=rows[at] * batch.page_size + offset,
            carried=rows[index],
            held=held,
        )

    return places


def _carried(batch: Batch) -> Tensor:
    """The slots of current pages that carry earlier tokens, int64."""
    before, now = batches.slot_counts(batch)
    first = (before + now).cumsum(0) - now
    carried: Tensor = first[batches.carried_tokens(batch) > 0]
    return carried


def _reads(source: Tensor, slots: Tensor, rows: Tensor, count: int) -> tuple[Read, ...]:
    """One read for each of `count` pointers that is used; -1 reads nothing."""
    used = [(index, source == index) for index in range(count)]
    return tuple(
        Read(source=index, slots=slots[at], rows=rows[at]) for index, at in used if bool(at.any())
    )


def _spans(batch: Batch, plan: Plan) -> list[Span]:
    """The requests with slots, in order."""
    before, now = batches.slot_counts(batch)
    ends = (before + now).cumsum(0)
    mine = [read for read in plan.prefix if read.source == plan.rank]
    nothing = torch.empty(0, dtype=torch.int64)
    slots, rows = (mine[0].slots, mine[0].rows) if mine else (nothing, nothing)
    owned = plan.dense
    spans = []
    for first, end in zip((ends - before - now).tolist(), ends.tolist(), strict=True):
        if end == first:
            continue
        here = (slots >= first) & (slots < end)
        tokens = owned.tokens // batch.page_size
        begin, stop = torch.searchsorted(tokens, torch.tensor([first, end])).tolist()
        carried = (owned.carried >= first) & (owned.carried < end)
        places = Places(
            pages=owned.pages[(owned.pages >= first) & (owned.pages < end)] - first,
            tokens=owned.tokens[begin:stop] - first * batch.page_size,
            carried=owned.carried[carried] - first,
            held=owned.held[carried],
        )
        spans.append(
            Span(
                slots=slice(first, end),
                prefix=Read(source=0, slots=slots[here] - first, rows=rows[here]),
                places=places,
                tokens=slice(begin, stop),
            )
        )
    return spans


def _on(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - what goes in comes out
    """Tensors of plans, reads and places on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_on(item, device) for item in value)
    if isinstance(value, (Plan, Span, Read, Places)):
        moved = {each.name: _on(getattr(value, each.name), device) for each in fields(value)}
        return replace(value, **moved)
    return value
