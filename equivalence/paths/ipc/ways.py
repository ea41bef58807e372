"""Every way that engines compose the pages of a batch, each to the same bytes on every rank.

A way runs as `run(peers, plan, rows, *, turn)`. It yields (layer, kind, dense u8 [S, page_bytes]),
layer by layer and in it kind by kind; a dense buffer is valid until the next one is asked for.
`rows` has by kind u8 [layers, m, token_bytes] of this rank's own tokens, as the plan lists them.
`turn` is how many layers this world has composed before.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from equivalence.paths.ipc import moves
from equivalence.paths.ipc.peers import Peers, Regions, parity
from equivalence.paths.ipc.plan import Plan

Composed: TypeAlias = "Iterator[tuple[int, str, Tensor]]"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way, and what it takes.

    Attributes:
        run: composes, as this module says.
        exports: the regions that other ranks read, of `checks.composed.strayed.REGIONS`; without
            peer memory a way that has some is `fallback`, on every rank alike.
        sums: whether it adds up bytes over ranks.
    """

    run: Callable[..., Composed]
    exports: tuple[Literal["pool", "staging", "dense"], ...] = ()
    sums: bool = False

    @property
    def fenced(self) -> bool:
        """Whether it has a barrier a round: others read what it writes."""
        return bool({"staging", "dense"} & set(self.exports))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    """One layer of one kind.

    Attributes:
        layer: its number.
        kind: "token" or "index".
        rank: one's own.
        regions: of this kind.
        half: of stagings and of dense buffers that others read.
        dense: u8 [S, page_bytes], one's own.
        rows: u8 [m, token_bytes].
    """

    layer: int
    kind: str
    rank: int
    regions: Regions
    half: int
    dense: Tensor
    rows: Tensor

    @property
    def pool(self) -> Tensor:
        """One's own pool of this layer."""
        return self.regions.pools[self.rank][self.layer]

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """Every rank's pool of this layer."""
        return tuple(pool[self.layer] for pool in self.regions.pools)

    @property
    def stagings(self) -> tuple[Tensor, ...]:
        """Every rank's staging of this turn."""
        return tuple(staging[self.half] for staging in self.regions.staging)

    @property
    def done(self) -> tuple[int, str, Tensor]:
        """What a way yields."""
        return self.layer, self.kind, self.dense


def legacy(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """Request by request: a buffer of zeros, own pages into it, and a sum over ranks."""
    for at in _rounds(peers, plan, rows, turn):
        at.dense.index_fill_(0, plan.padding, 0)
        for span in plan.spans:
            part = peers.zeroed(at.dense, span.slots.stop - span.slots.start)
            moves.put(part, span.prefix.slots, at.pool.index_select(0, span.prefix.rows))
            _write(plan, at, part, span.places, tokens=span.tokens)
            peers.all_reduce(part)
            at.dense[span.slots] = part
        yield at.done


def fused(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """Prefixes through peer memory, zeros elsewhere, and one sum of the current pages alone."""
    for at in _rounds(peers, plan, rows, turn):
        peers.gather(at.pools, plan.prefix, at.dense)
        at.dense.index_fill_(0, plan.unread, 0)
        current = peers.zeroed(at.dense, len(plan.current))
        _write(plan, at, current, plan.compact)
        peers.all_reduce(current)
        moves.put(at.dense, plan.current, current)
        yield at.done


def fallback(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """No peer memory: own pages into a buffer of zeros, and one sum of all of it."""
    for at in _rounds(peers, plan, rows, turn):
        whole = peers.zeroed(at.dense, plan.slots)
        moves.gather((at.pool,), plan.prefix_here, whole)
        _write(plan, at, whole, plan.dense)
        peers.all_reduce(whole)
        at.dense.copy_(whole)
        yield at.done


def dense(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """Current pages in one's exported dense buffer; a barrier; the others' out of theirs."""
    for at in _rounds(peers, plan, rows, turn):
        buffers = tuple(every[at.half] for every in at.regions.dense)
        own = buffers[plan.rank][: plan.slots]
        _publish(peers, plan, at, own, plan.dense)
        peers.barrier()
        peers.gather(at.pools, plan.prefix, own)
        peers.gather(buffers, plan.written_elsewhere, own)
        own.index_fill_(0, plan.padding, 0)
        yield at.layer, at.kind, own


def staging(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """Current page i copied to row i + 1 of one's staging; a barrier; the others' out of theirs."""
    for at in _rounds(peers, plan, rows, turn):
        _write(plan, at, at.dense, plan.dense)
        pages = at.dense.index_select(0, plan.dense.pages)
        peers.put(at.stagings[plan.rank], plan.staging.pages, pages)
        peers.barrier()
        peers.gather(at.pools, plan.prefix, at.dense)
        peers.gather(at.stagings, plan.staged_elsewhere, at.dense)
        at.dense.index_fill_(0, plan.padding, 0)
        yield at.done


def direct(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """Current rows straight into one's staging; a barrier; one gather through 2 * cp pointers."""
    for at in _rounds(peers, plan, rows, turn):
        _publish(peers, plan, at, at.stagings[plan.rank], plan.staging)
        peers.barrier()
        peers.gather((*at.pools, *at.stagings), plan.table, at.dense)
        at.dense.index_fill_(0, plan.padding, 0)
        yield at.done


def prefetch(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], *, turn: int) -> Composed:
    """As direct, but a layer's prefix is gathered before the barrier of the layer before it.

    Which layers that is may differ by rank; a round has one barrier on every rank all the same.
    """
    ahead: dict[str, _Round] = {}
    every = list(_rounds(peers, plan, rows, turn))
    later = {(at.layer, at.kind): at for at in every}
    for at in every:
        _publish(peers, plan, at, at.stagings[plan.rank], plan.staging)
        early = ahead.pop(at.kind, None) is at
        soon = later.get((at.layer + 1, at.kind))
        if soon is not None and plan.hits[soon.layer]:
            peers.gather(soon.pools, plan.prefix, soon.dense)
            ahead[at.kind] = soon
        peers.barrier()
        reads = plan.table_current if early else plan.table
        peers.gather((*at.pools, *at.stagings), reads, at.dense)
        at.dense.index_fill_(0, plan.padding, 0)
        yield at.done


WAYS: Mapping[str, Way] = {
    "legacy": Way(run=legacy, sums=True),
    "fused": Way(run=fused, exports=("pool",), sums=True),
    "fallback": Way(run=fallback, sums=True),
    "dense": Way(run=dense, exports=("pool", "dense")),
    "staging": Way(run=staging, exports=("pool", "staging")),
    "direct": Way(run=direct, exports=("pool", "staging")),
    "prefetch": Way(run=prefetch, exports=("pool", "staging")),
}
"""By name."""


def taken(way: str, *, peer_memory: bool) -> str:
    """The way that is gone."""
    return way if peer_memory or not WAYS[way].exports else "fallback"


def _rounds(peers: Peers, plan: Plan, rows: Mapping[str, Tensor], turn: int) -> Iterator[_Round]:
    """Layers in order, kind by kind."""
    layers = max(len(part) for part in rows.values())
    for layer in range(layers):
        for kind, part in rows.items():
            regions = peers.regions[kind]
            own = regions.dense[plan.rank][parity(turn + layer)]
            yield _Round(
                layer=layer,
                kind=kind,
                rank=plan.rank,
                regions=regions,
                half=peers.half(turn + layer),
                dense=own[: plan.slots],
                rows=part[layer],
            )


def _write(
    plan: Plan, at: _Round, into: Tensor, places: moves.Places, tokens: slice | None = None
) -> None:
    """Own current pages into memory that is one's own."""
    rows = at.rows if tokens is None else at.rows[tokens]
    moves.write(into, places, pool=at.pool, rows=rows, kind=at.kind, page_size=plan.page_size)


def _publish(peers: Peers, plan: Plan, at: _Round, into: Tensor, places: moves.Places) -> None:
    """Own current pages into memory that others read after the barrier."""
    peers.write(into, places, pool=at.pool, rows=at.rows, kind=at.kind, page_size=plan.page_size)
