"""One rank's process: it waits for a function, runs it, and tells what came of it."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from equivalence.errors import UsageError
from equivalence.world import call, collectives, naming, parcel, side, silence, transport, wire
from equivalence.world import control as cells
from equivalence.world.control import Control
from equivalence.world.link import Link
from equivalence.world.side import Place
from equivalence.world.transport import Released

VARIABLE = "EQUIVALENCE_RANK"
"""Set in the environment of every rank: it starts no ranks itself."""

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def die_with(parent: int) -> None:
    """End this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def live(place: Place, control: Control, launcher: socket.socket, store: int) -> None:
    """Run functions until the launcher closes the connection.

    Args:
        place: who this rank is.
        control: of the world.
        launcher: the connection to it.
        store: the descriptor of an empty file by which process groups find each other.
    """
    # A file without a name is opened through the descriptor.
    file = f"/proc/self/fd/{store}"
    os.environ[VARIABLE] = str(place.rank)
    # What users gave for the network is for other worlds: ranks of one machine use its loopback.
    os.environ[collectives.INTERFACE] = "lo"
    torch.set_num_threads(1)
    world, _ = side.over(
        place,
        control,
        share=partial(_share, launcher, control, place.rank),
        store=lambda name: PrefixStore(name, FileStore(file, place.ranks)),
    )
    made = cache(lambda: transport.link(place.transport, world))
    try:
        while (found := wire.receive(launcher)) is not None:
            report, outputs = _run(found, place, control, launcher, made)
            if "rule" in report:
                report["where"] = silence.where(control, place.rank)
                # Before it has ended, so that nobody takes a failure for silence.
                cells.end(control)
            cells.finished(control, place.rank)
            wire.send(launcher, {"report": report}, [] if outputs is None else [outputs])
            if outputs is not None:
                os.close(outputs)
    except OSError:
        # The launcher has gone, or ended this world: nobody is left to be told.
        return


def _run(
    found: tuple[dict[str, Any], list[int]],
    place: Place,
    control: Control,
    launcher: socket.socket,
    made: Callable[[], Link],
) -> tuple[dict[str, Any], int | None]:
    """Run the function of a message."""
    message, handles = found
    sys.path[:] = message["path"]
    handle = handles[0] if handles else None
    try:
        inputs = parcel.unpack(message["inputs"], handle, private=True)
        function = naming.find(message["function"])
    except UsageError as error:
        return {"usage": True, "rule": "crash", "message": str(error)}, None
    try:
        # Time limits begin with the call: modules, and then links, take each rank as long as
        # they take.
        _together(launcher, control, place.rank)
        link = made()
        _together(launcher, control, place.rank)
    except BaseException as error:  # noqa: BLE001 - a transport that cannot be made is an outcome
        return call.failure(error), None
    return call.run(function, link, inputs=inputs, settings=message["settings"])


def _together(launcher: socket.socket, control: Control, rank: int) -> None:
    """Wait until every rank has come as far as this one.

    Raises:
        Released: another has failed before.
    """
    cells.ready(control, rank)
    wire.send(launcher, {"ready": rank})
    found = wire.receive(launcher)
    if found is None or "released" in found[0]:
        raise Released


def _share(
    launcher: socket.socket, control: Control, rank: int, name: str, payload: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's payload, through the launcher."""
    cells.arrive(control, rank, cells.EXCHANGE)
    wire.send(launcher, {"share": name, "payload": payload})
    found = wire.receive(launcher)
    if found is None or "released" in found[0]:
        raise Released
    cells.running(control, rank)
    if "why" in found[0]:
        raise UsageError(found[0]["why"])
    payloads: list[dict[str, Any]] = found[0]["payloads"]
    return payloads
