"""Faults of time and order: who waits for whom, who reads too late, who is gone.

Where a rank must read after others have written, it waits for them by a barrier of its own; one
that is killed inside a round has `_MOMENT_S` to come to wait there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from equivalence.paths.ipc.peers import Regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from equivalence.paths.ipc.faulty import Fault
    from equivalence.paths.ipc.peers import Peers
    from equivalence.paths.ipc.plan import Plan
    from equivalence.world.link import Link

_Do: TypeAlias = "Callable[[Callable[[], None], int], None]"
_MOMENT_S = 0.2


class Killed(BaseException):
    """Stands for SIGKILL where a rank is a thread."""


def producer_delay(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """Round k waits for rank k % cp."""

    def late(call: Callable[[], None], turn: int) -> None:
        if turn % link.ranks == link.rank:
            time.sleep(fault.delay)
        call()

    return _rounds(peers, late)


def slow_reader(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """One rank sleeps after each round."""

    def slow(call: Callable[[], None], _: int) -> None:
        call()
        time.sleep(fault.delay)

    return _rounds(peers, slow) if link.rank == fault.rank else peers


def late_reader(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """One rank reads a round when the others are about to enter the next."""
    return _late(fault, link, peers, waits=1)


def half_reused(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """From one round on each half is the other one, and a late reader sits in the round before."""
    rounds, writes = count(), count()

    def half(turn: int) -> int:
        return peers.half(turn - (next(rounds) > fault.turn))

    def after(write: Callable[..., None]) -> Callable[..., None]:
        def wait(*args: Any, **call: Any) -> None:  # noqa: ANN401 - as the write
            # The other readers are done: what they see must not depend on who is first.
            if next(writes) == fault.turn + 1:
                link.barrier()
            write(*args, **call)

        return wait

    late = replace(_late(fault, link, peers, waits=2), half=half)
    if link.rank == fault.rank:
        return late
    return replace(late, write=after(late.write), put=after(late.put))


def killed_before(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """The rank ends before it tells anybody of a round."""

    def end(call: Callable[[], None], turn: int) -> None:
        if turn == fault.turn:
            _kill(link)
        call()

    return _rounds(peers, end) if link.rank == fault.rank else peers


def killed_inside(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """The rank has come to a round and waits for the others, which come later than its end."""
    mine = link.rank == fault.rank

    def end(call: Callable[[], None], turn: int) -> None:
        if turn != fault.turn:
            call()
        elif not mine:
            time.sleep(3 * _MOMENT_S)
            call()
        elif link.transport == "threads":
            _kill(link)
        else:
            threading.Timer(_MOMENT_S, _kill, [link]).start()
            call()

    return _rounds(peers, end)


def killed_after(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """The rank ends when a round is over."""

    def end(call: Callable[[], None], turn: int) -> None:
        call()
        if turn == fault.turn:
            _kill(link)

    return _rounds(peers, end) if link.rank == fault.rank else peers


def skipped_round(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """The rank goes on without one barrier."""

    def skip(call: Callable[[], None], turn: int) -> None:
        if turn != fault.turn:
            call()

    return _rounds(peers, skip) if link.rank == fault.rank else peers


def no_release(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """What a rank writes in a round arrives when the round after it has begun."""
    pending: list[tuple[int, Callable[[], None]]] = []
    rounds = [0]

    def later(write: Callable[..., None]) -> Callable[..., None]:
        def wait(*args: Any, **call: Any) -> None:  # noqa: ANN401 - as the write
            pending.append((rounds[0], lambda: write(*args, **call)))

        return wait

    def barrier() -> None:
        peers.barrier()
        # All have entered this round, so none reads the one before any more.
        for turn, write in list(pending):
            if turn < rounds[0]:
                write()
                pending.remove((turn, write))
        rounds[0] += 1

    if link.rank != fault.rank:
        return peers
    return replace(peers, barrier=barrier, write=later(peers.write), put=later(peers.put))


def own_capability(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """One rank alone says no."""
    return replace(peers, peer_memory=False) if link.rank == fault.rank else peers


def stale_pointers(fault: Fault, link: Link, peers: Peers, _: Plan) -> Peers:
    """The others' memory as it was before this step, where nobody writes any more."""

    def old(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(p if rank == link.rank else p.clone() for rank, p in enumerate(parts))

    link.barrier()
    regions = {
        kind: Regions(pools=part.pools, staging=old(part.staging), dense=old(part.dense))
        for kind, part in peers.regions.items()
    }
    link.barrier()
    return replace(peers, regions=regions) if link.rank == fault.rank else peers


def _late(fault: Fault, link: Link, peers: Peers, *, waits: int) -> Peers:
    """One rank waits that often after a round, the others once before the next one."""
    slow = link.rank == fault.rank

    def late(call: Callable[[], None], turn: int) -> None:
        if not slow and turn == fault.turn + 1:
            link.barrier()
        call()
        if slow and turn == fault.turn:
            for _ in range(waits):
                link.barrier()

    return _rounds(peers, late)


def _rounds(peers: Peers, do: _Do) -> Peers:
    """Each round of a step goes through `do(call, round)`."""
    turn = [0]

    def go(call: Callable[[], None]) -> None:
        now = turn[0]
        turn[0] += 1
        do(call, now)

    return replace(
        peers,
        barrier=lambda: go(peers.barrier),
        all_reduce=lambda tensor: go(lambda: peers.all_reduce(tensor)),
    )


def _kill(link: Link) -> None:
    """End this rank without a word."""
    if link.transport == "threads":
        raise Killed(f"rank {link.rank} is killed")
    os.kill(os.getpid(), signal.SIGKILL)
