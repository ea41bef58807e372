"""What `equivalence compose` is asked for, checked before any rank is started."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence import ranks as pools
from equivalence import store
from equivalence.case import Case
from equivalence.compose import requests, running
from equivalence.errors import UsageError
from equivalence.paths.ipc import faulty
from equivalence.paths.ipc.faulty import Fault
from equivalence.paths.ipc.ways import WAYS
from equivalence.world import meeting
from equivalence.world import transport as transports
from refimpl.compose import KINDS

THREADS = "threads"
"""The name of ranks that are threads of this process, beside those of transports."""
_ALL = "all"


_MAKING = ("scenarios", "layers", "kinds", "seed", "scale")
"""The options that make steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, by name, as its help tells them."""

    ranks: int
    ways: str
    scenarios: str
    layers: int
    kinds: str
    seed: int
    scale: int
    transport: str
    device: str | None
    timeout: float
    fault: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a command line comes to.

    Attributes:
        options: all of them.
        typed: those that were named, with their values.
        ways: that run.
        cases: from files; none where steps are made.
        scenarios: names of what runs.
        kinds: of pages, where steps are made.
        ranks: how many.
        fault: that ranks have, or None.
        joined: whether they are those that torchrun started.
    """

    options: Options
    typed: Mapping[str, Any]
    ways: tuple[str, ...]
    cases: tuple[Case, ...]
    scenarios: tuple[str, ...]
    kinds: tuple[str, ...]
    ranks: int
    fault: Fault | None
    joined: bool

    @property
    def settings(self) -> dict[str, str]:
        """What steps are made from, by option; nothing where they are read."""
        made = {name: str(getattr(self.options, name)) for name in _MAKING}
        return {} if self.cases else made


def read(paths: tuple[Path, ...], options: Options, typed: Mapping[str, Any]) -> Asked:
    """A command line, checked.

    Args:
        paths: of case files and of folders.
        options: all of them.
        typed: those that were named, with their values.

    Raises:
        UsageError: they do not go together, or a name does not exist.
    """
    making = [f"--{name}" for name in _MAKING if name in typed]
    if paths and making:
        raise UsageError(f"{' and '.join(making)}: these make steps, and case files have theirs")
    fault = None if options.fault is None else faulty.parse(options.fault)
    named = _names("way", options.ways, tuple(WAYS))
    ways = running.known("way", named, tuple(WAYS))
    if fault is not None and named is None:
        ways = faulty.FAULTS[fault.name].ways
    cases = tuple(store.load_cases(*paths, op="compose_pages")) if paths else ()
    sizes = sorted({int(str(case.params["cp"])) for case in cases})
    if len(sizes) > 1:
        listed = " and ".join(map(str, sizes))
        raise UsageError(f"the cases are of {listed} ranks: name those of one number at a time")
    joined = _joined()
    ranks = options.ranks
    if "ranks" not in typed:
        ranks = joined or (sizes[0] if sizes else ranks)
    for what, other in (
        ("the cases are of", sizes[0] if sizes else None),
        ("torchrun has", joined),
    ):
        if other not in (None, ranks):
            raise UsageError(f"{what} {other} ranks; --ranks is {ranks}")
    timeout = pools.seconds(options.timeout)
    if fault is not None:
        faulty.check(fault, ways=ways, ranks=ranks, timeout=timeout)
    _check_transport(options, joined=joined is not None)
    return Asked(
        options=options,
        typed=typed,
        ways=ways,
        cases=cases,
        scenarios=tuple(case.name for case in cases)
        or running.known(
            "scenario", _names("scenario", options.scenarios, requests.NAMES), requests.NAMES
        ),
        kinds=running.known("kind", _names("kind", options.kinds, KINDS), KINDS),
        ranks=ranks,
        fault=fault,
        joined=joined is not None,
    )


def _names(what: str, text: str, known: Sequence[str]) -> tuple[str, ...] | None:
    """Names with commas, each of them known; None for all.

    Raises:
        UsageError: one does not exist, or none is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if _ALL not in names:
        return running.known(what, names, known)
    running.known(what, [*known, *(name for name in names if name != _ALL)], known)
    return None


def _check_transport(options: Options, *, joined: bool) -> None:
    """Refuse a transport and a device that these ranks cannot have.

    Raises:
        UsageError: in one sentence.
    """
    if options.transport not in (*transports.NAMES, THREADS):
        names = f"{', '.join(transports.NAMES)} or {THREADS}"
        raise UsageError(f"transport is {options.transport!r}: it is {names}")
    if joined and options.transport == THREADS:
        raise UsageError(f"transport {THREADS}: they are of one process, not under torchrun")
    if options.device == "":
        raise UsageError("device is '': it is cpu, cuda, or one as in cuda:0")
    transports.check_device(options.transport, options.device)


def _joined() -> int | None:
    """How many ranks torchrun started, where this process is one of them.

    Raises:
        UsageError: the environment says no number.
    """
    if not set(meeting.NEEDED) <= set(os.environ):
        return None
    told = os.environ["WORLD_SIZE"]
    if not told.isascii() or not told.isdigit() or not int(told):
        raise UsageError(f"WORLD_SIZE is {told!r}: it is the number of ranks, as torchrun sets it")
    return int(told)
