"""The host process of a pool: it has torch loaded and forks ranks, so that they start at once.

It is a fresh interpreter that never runs the user's script, has no thread and no device, and is
the parent of all ranks: they die with it, and it ends them when the launcher is gone.
"""

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from equivalence.world import control as cells
from equivalence.world import forked, segment, wire
from equivalence.world.side import Place

_OWN = ("equivalence.", "refimpl.")
_LOOK = 1.0
_PAUSE = 0.002


def main(handle: int, launcher: int) -> None:
    """Serve one launcher until it is gone.

    Args:
        handle: the descriptor of the connection to it.
        launcher: its process id.
    """
    link = socket.socket(fileno=handle)
    ranks: dict[int, int] = {}
    while _alive(link, launcher):
        found = wire.receive(link)
        if found is None:
            break
        message, handles = found
        if "fork" in message:
            mine = _fork(message, handles, ranks, link)
            if mine is not None:
                _become(mine, message["fork"], handles)
            _tell(link, {"forked": list(ranks.values())})
        else:
            _tell(link, {"statuses": _ended(ranks, message["end"])})
    _ended(ranks, 0.0)
    _leave()


def _tell(link: socket.socket, answer: Mapping[str, Any]) -> None:
    """Answer the launcher; that it is gone is noticed when nothing more is heard from it."""
    with suppress(OSError):
        wire.send(link, answer)


def _alive(link: socket.socket, launcher: int) -> bool:
    """Wait for a message; whether the launcher still lives."""
    while not wire.anything([link], within=_LOOK):
        if os.getppid() != launcher:
            return False
    return True


def _fork(
    message: Mapping[str, Any], handles: Sequence[int], ranks: dict[int, int], link: socket.socket
) -> int | None:
    """Fork the ranks of a world; in one of them its number is returned, here None."""
    own = message["preload"]
    if own.startswith(_OWN):
        # Only this package's modules are known to start nothing when they are imported.
        with suppress(ImportError):
            import_module(own)
    host = os.getpid()
    for rank in range(message["fork"]["ranks"]):
        child = os.fork()
        if not child:
            forked.die_with(host)
            link.close()
            return rank
        ranks[rank] = child
    for handle in handles:
        os.close(handle)
    return None


def _become(rank: int, asked: Mapping[str, Any], handles: Sequence[int]) -> None:
    """Live as a rank, then end this process."""
    place = Place(**{**asked, "rank": rank})
    memory, store, *connections = handles
    for other, handle in enumerate(connections):
        if other != rank:
            os.close(handle)
    size = cells.size(place.ranks)
    control = cells.over(memoryview(segment.memory(memory, size)), place.ranks)
    with socket.socket(fileno=connections[rank]) as launcher:
        forked.live(place, control, launcher, store)
    _leave()


def _leave() -> None:
    """End this process at once: no thread of gloo or of a function holds it up."""
    atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing ends its processes
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _ended(ranks: dict[int, int], grace: float) -> dict[int, int]:
    """Wait for ranks for so many seconds, kill the rest, and say how each one ended."""
    deadline = time.monotonic() + grace
    statuses: dict[int, int] = {}
    while ranks:
        for rank, child in list(ranks.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                statuses[rank] = os.waitstatus_to_exitcode(status)
                del ranks[rank]
        if ranks and time.monotonic() > deadline:
            for child in ranks.values():
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        elif ranks:
            time.sleep(_PAUSE)
    return statuses
