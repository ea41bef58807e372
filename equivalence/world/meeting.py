"""Where ranks that others started find each other: the store of their environment."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from equivalence import plain, wording
from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import control as cells
from equivalence.world import processes, segment, side, silence, transport
from equivalence.world.control import Control
from equivalence.world.exports import Share
from equivalence.world.link import Link
from equivalence.world.side import Place
from equivalence.world.transport import Gone, Silent

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 1800.0
"""Seconds that ranks wait for one which does something alone between two runs."""
_PAUSE = 0.002
_PORTS = 65535


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A world that lasts until a rank fails.

    Attributes:
        store: of this world alone.
        control: its control memory.
        place: who this rank is there.
        link: its side.
        share: every rank's payload.
        close: ends its process groups, given whether ranks failed.
    """

    store: Store
    control: Control
    place: Place
    link: Link
    share: Share
    close: Callable[[bool], None]


@dataclass(kw_only=True, eq=False)
class Member:
    """This process among the ranks.

    Attributes:
        rank: its number.
        ranks: how many there are.
        transport: by name.
        device: as the user named it, or None.
        timeout: seconds that a rank may be silent, in this run.
        store: of the environment.
        serial: numbers what is told through it; the same on every rank.
        shared: None until it is needed, and after a failure.
        lost: the outcome of everything once a rank has gone, or None.
        watched: a descriptor of each other rank's process, once they have met.
    """

    rank: int
    ranks: int
    transport: str
    device: str | None
    timeout: float
    store: Store
    serial: Iterator[int]
    shared: Shared | None = None
    lost: Outcome | None = None
    watched: dict[int, int] = field(default_factory=dict)


def store(environment: Mapping[str, str], *, timeout: float) -> tuple[Store, int, int]:
    """The store of the environment, this rank and the number of ranks.

    Raises:
        UsageError: the environment is not that of a rank, or ranks are on several machines.
    """
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise UsageError(
            f"{missing[0]} is not set: ranks that join are started by torchrun "
            "(--standalone --nproc-per-node N), others by ranks.start"
        )
    ranks = _number(environment, "WORLD_SIZE", 1, transport.MOST)
    rank = _number(environment, "RANK", 0, ranks - 1)
    _number(environment, "MASTER_PORT", 1, _PORTS)
    here = environment.get("LOCAL_WORLD_SIZE", str(ranks))
    if here != environment["WORLD_SIZE"]:
        raise UsageError(
            f"{here} of {ranks} ranks are on this machine: all are on one, since they share memory"
        )
    try:
        found, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        processes.tell(found, rank)
    except (ValueError, RuntimeError) as error:
        told = str(error).splitlines()[0]
        raise UsageError(
            f"no store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {told}"
        ) from None
    return found, rank, ranks


@contextmanager
def answered() -> Iterator[None]:
    """A store that cannot be asked any more as one sentence.

    Raises:
        Gone: its process has ended.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        told = (str(error).splitlines() or ["no message"])[0]
        raise Gone(f"the store through which ranks meet does not answer any more: {told}") from None


def world(member: Member) -> Shared:
    """A world of all ranks, over memory that rank 0 makes.

    Raises:
        Silent: a rank does not come.
        Gone: a rank's process has ended.
    """
    # Who has met before may come from what it did alone.
    limit = PATIENCE if member.watched else member.timeout
    own = PrefixStore(f"equivalence/world/{next(member.serial)}", member.store)
    size = cells.size(member.ranks)
    if not member.rank:
        handle = segment.create(size)
        own.set("control", json.dumps(segment.place(handle)))
    else:
        wait_for(member, own, {0: "control"}, limit=limit)
        handle = segment.attach(json.loads(own.get("control")), size)
    try:
        control = cells.over(memoryview(segment.memory(os.dup(handle), size)), member.ranks)
        own.set(f"mapped/{member.rank}", "")
        mapped = {rank: f"mapped/{rank}" for rank in range(member.ranks)}
        wait_for(member, own, mapped, limit=limit)
    finally:
        os.close(handle)
    place = Place(
        rank=member.rank,
        ranks=member.ranks,
        transport=member.transport,
        device=member.device,
        timeout=member.timeout,
    )

    if not member.watched:
        others = (rank for rank in range(member.ranks) if rank != member.rank)
        member.watched = processes.watch(member.store, others)

    def share(name: str, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _share(member, own, control, name, payload)

    world, end = side.over(
        place,
        control,
        share=share,
        store=lambda name: PrefixStore(name, own),
        limit=lambda: member.timeout,
        accuse=lambda: silence.accused(control, timeout=member.timeout),
        doubt=lambda: doubt(member),
    )
    try:
        link = transport.link(member.transport, world)
    except BaseException:
        cells.end(control)
        end(True)  # noqa: FBT003 - ranks failed
        raise
    return Shared(store=own, control=control, place=place, link=link, share=share, close=end)


def wait_for(
    member: Member, store: Store, keys: Mapping[int, str], *, limit: float | None = None
) -> None:
    """Wait until ranks have set their keys.

    Args:
        member: this one.
        store: where.
        keys: by rank.
        limit: seconds; the member's own time limit when None.

    Raises:
        Silent: they do not within the time limit.
        Gone: they never will.
    """
    limit = member.timeout if limit is None else limit
    deadline = time.monotonic() + limit
    while True:
        # Asked first: who is gone by then has set all that it ever sets.
        gone = processes.ended(member.watched)
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if not missing:
            return
        absent(rank for rank in missing if rank in gone)
        if time.monotonic() > deadline:
            said = f"{wording.ranks(missing)} did not join within {limit:g} s"
            raise Silent(said, rank=missing[0])
        time.sleep(_PAUSE)


def absent(gone: Iterable[int]) -> None:
    """Complain about ranks that are needed and whose process has ended.

    Raises:
        Gone: there is one.
    """
    if ranks := sorted(gone):
        raise _ended(ranks)


def doubt(member: Member) -> Gone | None:
    """What to raise in a wait for every rank, where one has ended."""
    gone = processes.ended(member.watched)
    return _ended(gone) if gone else None


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    """A variable of the environment as a number.

    Raises:
        UsageError: it is none, or out of bounds.
    """
    said = environment[name]
    if not said.isdecimal() or not least <= int(said) <= most:
        what = plain.line(repr(said))
        raise UsageError(f"{name} is {what}: it is a number from {least} to {most}")
    return int(said)


def _share(
    member: Member, store: Store, control: Control, name: str, payload: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's payload, through the store.

    Raises:
        UsageError: ranks share different things.
        Silent: a rank does not come within the time limit.
        Gone: a rank's process has ended.
    """
    rank = member.rank
    number = cells.arrived(control, cells.EXCHANGE, rank, rank) + 1
    store.set(f"share/{number}/{rank}", json.dumps({"name": name, "payload": payload}))
    cells.arrive(control, rank, cells.EXCHANGE)
    cells.wait(
        control,
        timeout=member.timeout,
        ready=cells.everybody(control, rank, cells.EXCHANGE, number),
        accuse=lambda: silence.accused(control, timeout=member.timeout),
        doubt=lambda: doubt(member),
    )
    cells.running(control, rank)
    said = [json.loads(store.get(f"share/{number}/{each}")) for each in range(member.ranks)]
    for each, other in enumerate(said):
        if other["name"] != name:
            raise UsageError(
                f"ranks exchange different things: rank {rank} {name!r}, rank {each} "
                f"{other['name']!r}"
            )
    return [other["payload"] for other in said]


def _ended(ranks: Sequence[int]) -> Gone:
    has = "has" if len(ranks) == 1 else "have"
    said = f"{wording.ranks(ranks)} {has} ended while others waited"
    return Gone(said, rank=ranks[0])
