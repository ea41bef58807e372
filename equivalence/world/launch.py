"""The launcher of a pool: it starts ranks, runs functions on them, and notices how they end."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import control as cells
from equivalence.world import naming, parcel, reports, segment, silence, wire
from equivalence.world.control import Control
from equivalence.world.side import Place

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from equivalence.world.serve import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
_GRACE = 0.3
_ENDING = 5.0
_STARTING = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Host:
    """The process that forks ranks, and the connection to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket


@dataclass(frozen=True, kw_only=True, eq=False)
class Living:
    """Ranks that live: who they are, their control memory, and the connections to them.

    What they have `ran` before, by address, needs no import any more.
    """

    place: Place
    control: Control
    links: tuple[socket.socket, ...]
    ran: set[str] = field(default_factory=set)


@dataclass(kw_only=True, eq=False)
class Launcher:
    """A pool's processes, which come and go.

    Attributes:
        ranks: how many.
        transport: by name.
        timeout: seconds that a rank may be silent, unless a run says otherwise.
        device: as the user named it, or None.
        host: None until it is needed.
        living: None until ranks are needed, and after a failure.
        closed: whether nothing may run any more.
        turn: held by the thread whose function runs; others wait for it.
    """

    ranks: int
    transport: str
    timeout: float
    device: str | None
    host: Host | None = None
    living: Living | None = None
    closed: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)


def start(launcher: Launcher) -> None:
    """Start the host process, without waiting for it."""
    ours, theirs = socket.socketpair()
    with theirs:
        handle = theirs.fileno()
        paths = json.dumps(_paths())
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-P", "-c", _PROGRAM, paths, str(handle), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[handle],
            env=os.environ | _ONE_THREAD,
            # Control-C is for the launcher, which then ends the ranks.
            start_new_session=True,
        )
    launcher.host = Host(process=process, link=ours)


def run(
    launcher: Launcher,
    function: Callable[..., Any],
    *,
    inputs: Mapping[str, Tensor],
    timeout: float,
    settings: Mapping[str, Any],
) -> list[Outcome]:
    """Run a function on every rank.

    Args:
        launcher: not closed.
        function: importable; takes link, inputs and settings.
        inputs: what every rank gets, as memory of its own.
        timeout: seconds that a rank may be silent.
        settings: JSON values.

    Returns:
        one outcome a rank.

    Raises:
        UsageError: a rank cannot be given this.
    """
    where = naming.address(function)
    told = naming.settings(settings, inputs)
    with launcher.turn:
        return _run(launcher, where, told, inputs=inputs, timeout=timeout)


def end(launcher: Launcher, *, grace: float = _GRACE) -> dict[int, int] | None:
    """End all ranks; the next run has fresh ones.

    Returns:
        how each rank ended, nothing of those that did not in time; None where the host had died.
    """
    living, launcher.living = launcher.living, None
    if living is None:
        return {}
    died = _died(launcher)
    cells.end(living.control)
    for link in living.links:
        link.close()
    answer = _ask(launcher, {"end": grace}, limit=grace + _ENDING)
    told = answer.get("statuses", {})
    return None if died else {int(rank): status for rank, status in told.items()}


def close(launcher: Launcher) -> None:
    """End the ranks and their host."""
    launcher.closed = True
    end(launcher, grace=_ENDING)
    _dismiss(launcher)


def _run(
    launcher: Launcher,
    where: dict[str, str],
    settings: dict[str, Any],
    *,
    inputs: Mapping[str, Tensor],
    timeout: float,
) -> list[Outcome]:
    """Run a function that ranks can find, with settings that they can be told."""
    if launcher.closed:
        raise UsageError("this pool of ranks is closed: run functions inside its with block")
    try:
        living = _ready(launcher, preload=where["module"])
        layout, handle = parcel.pack(inputs)
    except MemoryError as error:
        failed = Outcome(rule="out-of-memory", message=str(error))
        return [failed] * launcher.ranks
    except OSError as error:
        raise UsageError(f"{launcher.ranks} ranks cannot be started: {error.strerror}") from None
    message = {"function": where, "settings": settings, "inputs": layout, "path": _paths()}
    try:
        for rank in range(launcher.ranks):
            cells.begin(living.control, rank)
        for link in living.links:
            with suppress(OSError):  # a dead rank is found below
                wire.send(link, message, [] if handle is None else [handle])
        start = timeout if str(where) in living.ran else silence.START
        found = reports.collect(living.links, living.control, timeout=timeout, start=start)
    except BaseException:
        end(launcher)
        raise
    finally:
        if handle is not None:
            os.close(handle)
    living.ran.add(str(where))
    statuses = end(launcher) if found.failed else {}
    if found.refused:
        reports.discard(found)
        raise UsageError(found.refused)
    return reports.outcomes(found, statuses, launcher.ranks)


def _ready(launcher: Launcher, *, preload: str) -> Living:
    """Ranks that can run a function: those of the last run, or fresh ones."""
    living = launcher.living
    # Idle ranks say nothing: one of which something is heard has died since.
    if living is not None and (_died(launcher) or wire.anything(living.links, within=0)):
        end(launcher)
    if launcher.living is None:
        launcher.living = _fork(launcher, preload)
    return launcher.living


def _fork(launcher: Launcher, preload: str) -> Living:
    """Fork fresh ranks."""
    if _died(launcher):
        _dismiss(launcher)
        start(launcher)
    size = cells.size(launcher.ranks)
    # What is closed where this fails, and what is closed in any case.
    with ExitStack() as kept, ExitStack() as passed:
        handles = [segment.create(size)]
        passed.callback(os.close, handles[0])
        handles.append(segment.empty())
        passed.callback(os.close, handles[1])
        control = cells.over(memoryview(segment.memory(os.dup(handles[0]), size)), launcher.ranks)
        links = []
        for _ in range(launcher.ranks):
            ours, theirs = socket.socketpair()
            links.append(kept.enter_context(ours))
            handles.append(passed.enter_context(theirs).fileno())
        place = Place(
            rank=0,
            ranks=launcher.ranks,
            transport=launcher.transport,
            device=launcher.device,
            timeout=launcher.timeout,
        )
        answer = _ask(launcher, {"fork": asdict(place), "preload": preload}, handles)
        if "forked" not in answer:
            raise UsageError("the process that starts ranks did not answer: see what it printed")
        kept.pop_all()
    for link in links:
        link.settimeout(max(launcher.timeout, _ENDING))
    return Living(place=place, control=control, links=tuple(links))


def _ask(
    launcher: Launcher,
    message: Mapping[str, Any],
    handles: Sequence[int] = (),
    *,
    limit: float = _STARTING,
) -> dict[str, Any]:
    """What the host answers; nothing where it has died, or does not answer in time."""
    if launcher.host is None:
        return {}
    try:
        launcher.host.link.settimeout(limit)
        wire.send(launcher.host.link, message, handles)
        found = wire.receive(launcher.host.link)
    except OSError:
        found = None
    if found is None:
        _dismiss(launcher)
        return {}
    return found[0]


def _died(launcher: Launcher) -> bool:
    """Whether there is no host, or none that lives."""
    return launcher.host is None or launcher.host.process.poll() is not None


def _dismiss(launcher: Launcher) -> None:
    """End the host, whose ranks end with it."""
    host, launcher.host = launcher.host, None
    if host is None:
        return
    host.link.close()
    try:
        host.process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        host.process.kill()
        host.process.wait()


def _paths() -> list[str]:
    """Where modules are found, whatever folder a rank is in."""
    return [path or str(Path.cwd()) for path in sys.path]
