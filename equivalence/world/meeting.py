"""Where ranks that others started find each other: the store of their environment."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import control as cells
from equivalence.world import segment, side, silence, transport
from equivalence.world.control import Control
from equivalence.world.link import Link
from equivalence.world.side import Place
from equivalence.world.transport import Silent

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PAUSE = 0.002


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A world that lasts until a rank fails.

    Attributes:
        store: of this world alone.
        control: its control memory.
        place: who this rank is there.
        link: its side.
        share: every rank's payload.
        close: ends it.
    """

    store: Store
    control: Control
    place: Place
    link: Link
    share: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
    close: Callable[[], None]


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
    here = environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
    if here != environment["WORLD_SIZE"]:
        raise UsageError(
            f"{here} of {environment['WORLD_SIZE']} ranks are on this machine: "
            "all are on one, since they share memory"
        )
    try:
        found, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except (ValueError, RuntimeError) as error:
        told = str(error).splitlines()[0]
        raise UsageError(
            f"no store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {told}"
        ) from None
    return found, rank, ranks


def world(member: Member) -> Shared:
    """A world of all ranks, over memory that rank 0 makes.

    Raises:
        Silent: a rank does not come.
    """
    own = PrefixStore(f"equivalence/world/{next(member.serial)}", member.store)
    size, path = cells.size(member.ranks), None
    try:
        if not member.rank:
            tag = segment.fresh_tag()
            path, handle = segment.create(size, tag=tag)
            own.set("control", str(path))
        else:
            wait_for(member, own, {0: "control"})
            found = Path(own.get("control").decode())
            tag = found.name.rpartition("-")[0]
            handle = segment.attach(found, size)
        control = cells.over(memoryview(segment.memory(handle, size)), member.ranks)
        own.set(f"mapped/{member.rank}", "")
        wait_for(member, own, {rank: f"mapped/{rank}" for rank in range(member.ranks)})
    finally:
        if path is not None:
            segment.release(path)
    place = Place(
        rank=member.rank,
        ranks=member.ranks,
        transport=member.transport,
        device=member.device,
        timeout=member.timeout,
        tag=tag,
    )

    def share(name: str, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _share(member, own, control, name, payload)

    world, end = side.over(
        place,
        control,
        share=share,
        store=lambda: PrefixStore("gloo", own),
        limit=lambda: member.timeout,
        accuse=lambda: _accused(member, control),
    )
    link = transport.link(member.transport, world)
    return Shared(store=own, control=control, place=place, link=link, share=share, close=end)


def wait_for(member: Member, store: Store, keys: Mapping[int, str]) -> None:
    """Wait until ranks have set their keys.

    Raises:
        Silent: they do not within the time limit.
    """
    deadline = time.monotonic() + member.timeout
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if time.monotonic() > deadline:
            raise Silent(f"{silence.named(missing)} did not join within {member.timeout:g} s")
        time.sleep(_PAUSE)


def _share(
    member: Member, store: Store, control: Control, name: str, payload: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's payload, through the store.

    Raises:
        UsageError: ranks share different things.
    """
    rank = member.rank
    number = cells.arrived(control, cells.EXCHANGE, rank, rank) + 1
    store.set(f"share/{number}/{rank}", json.dumps({"name": name, "payload": payload}))
    cells.arrive(control, rank, cells.EXCHANGE)
    cells.wait(
        control,
        timeout=member.timeout,
        ready=cells.everybody(control, rank, cells.EXCHANGE, number),
        accuse=lambda: _accused(member, control),
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


def _accused(member: Member, control: Control) -> str:
    """The sentence about whoever keeps this rank waiting."""
    found = silence.found(control, timeout=member.timeout, ended=False)
    return found[1] if found else f"ranks did not come within {member.timeout:g} s"
