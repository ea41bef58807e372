"""What one rank runs to compose a batch: agree, load, compose, and look for stray writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from equivalence import receipt
from equivalence.checks.composed.strayed import REGIONS
from equivalence.errors import UsageError
from equivalence.paths.ipc import exported, faulty, given, ways
from equivalence.paths.ipc.peers import HALVES, Peers, Regions, parity
from equivalence.paths.ipc.plan import room
from refimpl.batch import NOTHING, Limits
from refimpl.compose import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from equivalence.paths.ipc.exported import Exported
    from equivalence.paths.ipc.given import Given
    from equivalence.paths.ipc.plan import Plan
    from equivalence.world.link import Link

HITS = ((False, True, True), (True, True, False), (True, False, True))
"""[rank % 3][layer % 3], whether prefetch gathers a prefix early unless told: ranks differ."""
_POOL, _DENSE = REGIONS.index("pool"), REGIONS.index("dense")


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A step that can be composed, as often as wanted.

    Attributes:
        way: the one that is gone, see `ways.taken`.
        peers: this rank's side.
        plan: of the batch.
        rows: by kind, u8 [layers, m, token_bytes], own tokens.
        given: the inputs.
        memory: exported regions, kind by kind.
    """

    way: str
    peers: Peers
    plan: Plan
    rows: Mapping[str, Tensor]
    given: Given
    memory: tuple[Exported, ...]


def compose(link: Link, *, turn: int = 0, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as `prepare`
    """Compose a batch on this rank; every rank calls it with the same arguments.

    Args:
        link: of this rank.
        turn: layers that this world has composed before.
        call: as `prepare`.

    Returns:
        token_pages and index_pages [layers, S, page_bytes] as far as the inputs have these kinds,
        row_locations int32 [T], and strays int32 [n, 6]: writes to this rank's memory outside the
        allowed set, see `checks.composed.strayed.COLUMNS`.

    Raises:
        UsageError: as `prepare`.
        ValueError: as `prepare`.
    """
    ready = prepare(link, turn=turn, **call)
    may = [_allowed(ready, part, turn) for part in ready.memory]
    before = [
        ready.given.pools[KINDS[part.kind]][:, link.rank].to(link.device).flatten(0, 1)
        if allowed is None
        else exported.watched(part, allowed)
        for part, allowed in zip(ready.memory, may, strict=True)
    ]
    link.barrier()
    outputs = {
        f"{kind}_pages": torch.empty(
            ready.given.layers,
            ready.plan.slots,
            pools.shape[-1],
            dtype=torch.uint8,
            device=link.device,
        )
        for kind, pools in ready.given.pools.items()
    }
    receipt.leave(
        f"equivalence.paths.ipc.ways.{ready.way}",
        rows=ready.plan.slots,
        asked=str(call.get("way")),
        transport=link.transport,
        peer_memory=ready.peers.peer_memory,
    )
    run = ways.WAYS[ready.way].run(ready.peers, ready.plan, ready.rows, turn=turn)
    for layer, kind, dense in run:
        outputs[f"{kind}_pages"][layer].copy_(dense)
    ready.peers.barrier()
    rows: list[tuple[int, ...]] = []
    for part, allowed, held in zip(ready.memory, may, before, strict=True):
        rows += [*exported.changes(part, allowed, held), *exported.guards(part)]
    kinds = {f"{kind}_pages": ready.given.dtypes[kind] for kind in ready.given.kinds}
    typed = {name: pages.view(kinds[name]) for name, pages in outputs.items()}
    return typed | {
        "row_locations": ready.plan.locations,
        "strays": exported.strays(rows, link.device),
    }


def prepare(
    link: Link,
    *,
    way: str,
    cp: int,
    page_size: int = 64,
    pool_group: int = 1,
    staging_pages: int | None = None,
    max_tokens: int | None = None,
    max_requests: int | None = None,
    turn: int = 0,
    fault: Mapping[str, Any] | None = None,
    hits: Sequence[Sequence[bool]] | None = None,
    **inputs: Tensor | None,
) -> Prepared:
    """Everything of a step but composing: nobody has read or written another's memory yet.

    A rank takes what is its own alone: its part of the pools, and the rows that it writes.

    Args:
        link: of this rank.
        way: a name in `ways.WAYS`.
        cp: as in the op, and the next ones.
        page_size: tokens a page.
        pool_group: pages that a row of the index pool stands for.
        staging_pages: current pages that may be staged.
        max_tokens: new tokens that are admitted.
        max_requests: requests likewise.
        turn: as in `compose`.
        fault: a `faulty.Fault` as data, or None.
        hits: [rank][layer], whether prefetch gathers that prefix early; HITS when None.
        inputs: the tensors of compose_pages.

    Raises:
        UsageError: there is no such way, or an input is missing or unknown.
        ValueError: ranks were given different sizes, or the batch may not be composed; on every
            rank alike, before a byte is moved.
    """
    if way not in ways.WAYS:
        raise UsageError(f"no way named {way!r}: one of {', '.join(ways.WAYS)}")
    seams = faulty.seams(fault, link=link, way=way)
    tensors = seams.inputs({name: part for name, part in inputs.items() if part is not None})
    limits = Limits(staging_pages=staging_pages, max_tokens=max_tokens, max_requests=max_requests)
    sizes = {"cp": cp, "page_size": page_size, "pool_group": pool_group}
    given.agree(link, tensors, {"way": way, "turn": turn, **sizes, **asdict(limits)})
    taken = given.read(tensors, ranks=link.ranks, **sizes)
    plan = seams.plan(
        taken.batch,
        rank=link.rank,
        device=link.device,
        pool_pages=taken.pool_pages,
        limits=limits,
        hits=_row(hits or HITS, link.rank, taken.layers),
    )
    peer_memory = bool(link.agree(int(link.peer_memory)))
    memory, regions = _export(link, taken, plan, way=ways.taken(way, peer_memory=peer_memory))
    side = Peers(
        rank=link.rank,
        ranks=link.ranks,
        regions=regions,
        barrier=link.barrier,
        all_reduce=link.all_reduce,
        peer_memory=peer_memory,
    )
    peers = seams.peers(side, plan)
    return Prepared(
        way=ways.taken(way, peer_memory=peers.peer_memory),
        peers=peers,
        plan=plan,
        rows=_own_rows(link, taken, plan),
        given=taken,
        memory=memory,
    )


def _export(
    link: Link, taken: Given, plan: Plan, *, way: str
) -> tuple[tuple[Exported, ...], dict[str, Regions]]:
    """The regions that a way needs, with one's own part of the pools in them."""
    memory: list[Exported] = []
    regions = {}
    shared = ways.WAYS[way].exports
    staged = 1 + plan.capacity if "staging" in shared else 0
    dense = room(plan.slots) if "dense" in shared else plan.slots
    for kind in taken.kinds:
        pools = taken.pools[kind]
        size = pools.shape[-1]
        shapes = {
            "pool": (len(pools), pools.shape[2], size),
            "staging": (HALVES, staged, size),
            "dense": (HALVES, dense, size),
        }
        parts = [
            exported.export(
                link,
                region=REGIONS.index(region),
                kind=KINDS.index(kind),
                name=f"{kind}.{region}",
                shape=shape,
                shared=region in shared,
            )
            for region, shape in shapes.items()
        ]
        parts[_POOL].own.copy_(pools[:, link.rank])
        regions[kind] = Regions(pools=parts[0].views, staging=parts[1].views, dense=parts[2].views)
        memory += parts
    return tuple(memory), regions


def _allowed(ready: Prepared, part: Exported, turn: int) -> Tensor | None:
    """Bool [halves, rows] of one's own part, what this step may write; None for a pool."""
    if part.region == _POOL:
        return None
    allowed = torch.zeros(part.shape[:2], dtype=torch.bool, device=part.own.device)
    halves = sorted({parity(turn + layer) for layer in range(min(ready.given.layers, HALVES))})
    if part.region == _DENSE:
        allowed[halves, : ready.plan.slots] = True
        return allowed
    rows = ready.plan.staging.pages
    for half in halves:
        allowed[half, rows[(rows > NOTHING) & (rows < part.shape[1])]] = True
    return allowed


def _own_rows(link: Link, taken: Given, plan: Plan) -> dict[str, Tensor]:
    """By kind u8 [layers, m, token_bytes], the tokens that this rank computes."""
    return {
        kind: rows.index_select(1, plan.own.to(rows.device)).to(link.device)
        for kind, rows in taken.rows.items()
    }


def _row(hits: Sequence[Sequence[bool]], rank: int, layers: int) -> tuple[bool, ...]:
    """One's own row of a pattern, which begins anew where it ends, a layer each."""
    own = hits[rank % len(hits)]
    return tuple(bool(own[layer % len(own)]) for layer in range(layers))
