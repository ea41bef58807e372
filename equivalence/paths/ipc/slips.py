"""Faults of content: plans, tables, offsets and sums that are wrong whatever the time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equivalence.paths.ipc import plan as plans
from equivalence.paths.ipc.moves import Places, Read
from equivalence.paths.ipc.peers import Regions
from refimpl import batch as batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equivalence.paths.ipc.faulty import Fault
    from equivalence.paths.ipc.peers import Peers
    from equivalence.paths.ipc.plan import Plan
    from equivalence.world.link import Link
    from refimpl.batch import Batch

_LEFT = 0x5A


def address_key(_: Fault, link: Link, batch: Batch, right: Plan, call: Mapping[str, Any]) -> Plan:
    """The plan of the first batch that this world had with tensors of these shapes."""
    tensors = [getattr(batch, name).int() for name in batches.TENSORS]
    told = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sizes = "-".join(str(len(tensor)) for tensor in tensors)
    name = f"plans.{batch.page_size}.{call['pool_pages']}.{sizes}"
    held = link.export(name, (1 + told.nbytes,))[link.rank]
    if not held[0]:
        held[0] = 1
        held[1:] = told.view(torch.uint8).to(held.device)
        return right
    lengths = [len(tensor) for tensor in tensors]
    values = torch.split(held[1:].cpu().clone().view(torch.int32), lengths)
    named: dict[str, Any] = dict(zip(batches.TENSORS, values, strict=True))
    return plans.of(replace(batch, **named), **dict(call))


def wrong_owner(_: Fault, __: Link, batch: Batch, ___: Plan, call: Mapping[str, Any]) -> Plan:
    """Prefix pages are looked for one rank further."""
    owner = torch.where(batch.owner >= 0, (batch.owner + 1) % batch.cp, batch.owner)
    settings = {name: call[name] for name in ("rank", "device", "limits", "hits")}
    return plans.build(replace(batch, owner=owner), **settings)


def unaligned_split(
    _: Fault, link: Link, batch: Batch, right: Plan, call: Mapping[str, Any]
) -> Plan:
    """The later half of the first page that has two tokens goes to the next rank."""
    slots = batches.row_locations(batch).long() // batch.page_size
    counts = slots.bincount()
    page = int((counts > 1).nonzero()[0])
    tokens = (slots == page).nonzero()[:, 0]
    moved = tokens[len(tokens) // 2 :]
    writer = batch.writer.clone()
    writer[moved] = (writer[moved] + 1) % batch.cp
    own = (writer == link.rank).nonzero()[:, 0].to(call["device"])
    every = right.locations.long()[own]
    now = right.current
    at = torch.searchsorted(now, every // batch.page_size)
    offset = every % batch.page_size

    def places(old: Places, rows: Tensor) -> Places:
        return replace(old, tokens=rows[at] * batch.page_size + offset)

    return replace(
        right,
        own=own,
        dense=places(right.dense, now),
        compact=places(right.compact, torch.arange(len(now), device=now.device)),
        staging=places(right.staging, torch.arange(1, len(now) + 1, device=now.device)),
    )


def overflow_past(_: Fault, __: Link, ___: Batch, right: Plan, ____: Mapping[str, Any]) -> Plan:
    """The memory is made a page too small."""
    return replace(right, capacity=len(right.current) - 1)


def past_the_end(_: Fault, __: Link, peers: Peers, plan: Plan) -> Peers:
    """Stagings are addressed as if they had a row for every current page."""

    def longer(part: Tensor) -> Tensor:
        rows, size = 1 + len(plan.current), part.shape[-1]
        return part.as_strided((len(part), rows, size), part.stride(), part.storage_offset())

    regions = {
        kind: Regions(pools=part.pools, staging=tuple(map(longer, part.staging)), dense=part.dense)
        for kind, part in peers.regions.items()
    }
    return replace(peers, regions=regions)


def overflow_wrapped(
    _: Fault, __: Link, batch: Batch, right: Plan, ____: Mapping[str, Any]
) -> Plan:
    """So few rows that two pages of one writer meet in one."""
    writers = batches.page_writers(batch).tolist()
    last: dict[int, int] = {}
    rows = len(writers)
    for page, rank in enumerate(writers):
        rows = min(rows, page - last.get(rank, page - rows))
        last[rank] = page
    return _staged(right, lambda row: (row - 1) % rows + 1)


def row_zero(_: Fault, __: Link, ___: Batch, right: Plan, ____: Mapping[str, Any]) -> Plan:
    """Current page i in row i."""
    return _staged(right, lambda row: row - 1)


def skips_zero(_: Fault, __: Link, peers: Peers, ___: Plan) -> Peers:
    """A gather that fills zeros where the row is 0."""

    def gather(table: Sequence[Tensor], reads: Sequence[Read], out: Tensor) -> None:
        peers.gather(table, reads, out)
        for read in reads:
            out.index_fill_(0, read.slots[read.rows == 0], 0)

    return replace(peers, gather=gather)


def offset_wrap(fault: Fault, _: Link, peers: Peers, plan: Plan) -> Peers:
    """Offsets into pools are signed numbers of few bits; what is below zero reads as zeros."""
    pools = {pool.data_ptr() for part in peers.regions.values() for p in part.pools for pool in p}
    furthest = max((int(read.rows.max()) for read in plan.prefix), default=0)

    def gather(table: Sequence[Tensor], reads: Sequence[Read], out: Tensor) -> None:
        peers.gather(table, reads, out)
        for read in reads:
            source, size = table[read.source], out.shape[-1]
            if source.data_ptr() not in pools:
                continue
            bits = fault.wrap_bits or max((furthest * size).bit_length(), 1)
            flat = source.reshape(-1)
            byte = torch.arange(size, device=source.device)
            for slot, row in zip(read.slots.tolist(), read.rows.tolist(), strict=True):
                half = 1 << (bits - 1)
                offset = (row * size + half) % (2 * half) - half
                out[slot] = flat[offset + byte] if offset >= 0 else 0

    return replace(peers, gather=gather)


def added_twice(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """A rank's part counts double."""

    def all_reduce(tensor: Tensor) -> None:
        tensor += tensor.clone()
        peers.all_reduce(tensor)

    return replace(peers, all_reduce=all_reduce) if link.rank == fault.rank else peers


def added_by_value(_: Fault, __: Link, peers: Peers, ___: Plan) -> Peers:
    """0.0 + -0.0 is 0.0, and a sum has one NaN."""

    def all_reduce(tensor: Tensor) -> None:
        peers.all_reduce(tensor)
        tensor[tensor == 0x80] = 0x00  # noqa: PLR2004 - e4m3 -0.0
        tensor[tensor == 0xFF] = 0x7F  # noqa: PLR2004 - e4m3 NaN with a sign

    return replace(peers, all_reduce=all_reduce)


def no_zero_fill(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """Memory for a sum as another use left it."""

    def dirty(like: Tensor, rows: int) -> Tensor:
        return peers.zeroed(like, rows).fill_(_LEFT)

    return replace(peers, zeroed=dirty) if link.rank == fault.rank else peers


def another_size(fault: Fault, link: Link, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Pools with a page more."""
    if link.rank != fault.rank:
        return tensors
    return {
        name: torch.cat([tensor, tensor[:, :, :1]], 2) if name.endswith("_pools") else tensor
        for name, tensor in tensors.items()
    }


def _staged(right: Plan, change: Callable[[Tensor], Tensor]) -> Plan:
    """Other staging rows."""
    size, old = right.page_size, right.staging
    staging = Places(
        pages=change(old.pages),
        tokens=change(old.tokens // size) * size + old.tokens % size,
        carried=change(old.carried),
        held=old.held,
    )
    staged = tuple(replace(read, rows=change(read.rows)) for read in right.staged)
    table = tuple(
        replace(read, rows=change(read.rows)) if read.source >= right.ranks else read
        for read in right.table
    )
    return replace(right, staging=staging, staged=staged, table=table)
