"""`equivalence compose`: every way to compose pages, over real ranks, against one process."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivalence.commands.common import (
    CODES,
    FAILED,
    Tell,
    check_target,
    progress,
    say,
    show,
    write,
)
from equivalence.errors import UsageError

if TYPE_CHECKING:
    from equivalence.case import Case
    from equivalence.compose.matrix import Cell
    from equivalence.paths.ipc.candidate import Pool
    from equivalence.paths.ipc.faulty import Fault

_ALL = "all"
_THREADS = "threads"
_RANKS, _TRANSPORT = 8, "shm"
_STEPS = {"scenarios": _ALL, "layers": 8, "kinds": "token,index", "seed": 0, "scale": 1}
"""What makes steps, with what it is unless asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """What a command line asks for.

    Attributes:
        given: options that were named, by name.
        ways: that run.
        cases: from files; none where steps are made.
        ranks: how many.
        fault: that ranks have, or None.
        joined: whether they are those that torchrun started.
    """

    given: Mapping[str, Any]
    ways: tuple[str, ...]
    cases: tuple["Case", ...]
    ranks: int
    fault: "Fault | None"
    joined: bool = False

    def option(self, name: str, default: Any) -> Any:  # noqa: ANN401 - of any option
        """An option, or what it is unless named."""
        return self.given.get(name, default)

    @property
    def transport(self) -> str:
        """Between ranks."""
        return str(self.option("transport", _TRANSPORT))

    @property
    def steps(self) -> dict[str, Any]:
        """What steps are made from; nothing where they are read."""
        made = {name: self.option(name, default) for name, default in _STEPS.items()}
        return {} if self.cases else made


@dataclass(frozen=True, kw_only=True, eq=False)
class _World:
    """Ranks that run, seen from this process.

    Attributes:
        pool: runs functions on them.
        speaks: whether this process judges and prints; of joined ranks, the first does.
        tell: (exit code) -> that of the first.
    """

    pool: "Pool"
    speaks: bool = True
    tell: Any = field(default=int)


@click.command("compose")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH...]")
@click.option("--ranks", type=click.IntRange(1), help="How many: 8, or as many as the cases have.")
@click.option("--ways", metavar="all|NAME,...", help="How pages are composed.")
@click.option("--scenarios", metavar="all|NAME,...", help="Steps to make, where no case is named.")
@click.option("--layers", type=click.IntRange(1), help="Of every kind: 8.")
@click.option("--kinds", metavar="all|NAME,...", help="token, index or both.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of the scenarios: 0.")
@click.option("--scale", type=click.IntRange(1), help="Divide their lengths by this.")
@click.option("--transport", metavar="NAME", help="shm (default), cuda, symmetric or threads.")
@click.option(
    "--device", help="Where ranks export memory; the transport's own choice if not named."
)
@click.option(
    "--timeout", type=click.FloatRange(0, 86400, min_open=True), help="Seconds of silence: 30."
)
@click.option("--fault", metavar="NAME[,KEY=VALUE,...]", help="Do this wrong, on purpose.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the results as JSON.")
def compose_(paths: tuple[Path, ...], json_to: str | None, **options: Any) -> int:  # noqa: ANN401 - by name
    """Compose pages on ranks in every way: does each of them hold the reference's bytes?

    Steps are made from a seed, or read from case files. Under torchrun its ranks are taken.
    """
    if sys.stdout is None:  # a shell's `>&-`
        say("stdout is closed: there is nowhere to print results")
        return FAILED
    from equivalence.compose import running  # noqa: PLC0415 - torch is imported when needed
    from equivalence.compose.matrix import Matrix  # noqa: PLC0415 - likewise
    from equivalence.report import as_compose  # noqa: PLC0415 - likewise

    check_target("--json", json_to)
    asked = _asked(paths, {name: value for name, value in options.items() if value is not None})
    cells: list[Cell] = []
    with _world(asked) as world:
        quiet = json_to == "-" or not world.speaks
        with progress(quiet=quiet) as tell:
            for cell, width in _cells(asked, world, tell):
                cells.append(cell)
                if not quiet:
                    show(as_compose.line(cell, width=width))
        matrix = Matrix(
            ranks=asked.ranks,
            transport=asked.transport,
            settings={name: str(value) for name, value in asked.steps.items()},
            fault=str(asked.option("fault", "")),
            cells=tuple(cells),
            note=running.unseen(asked.fault, cells),
        )
        if not quiet:
            for cell in cells:
                if as_compose.wrong(cell):
                    show("\n" + as_compose.failure(cell, again=_again(asked, cell)))
            show("\n" + as_compose.summary(matrix))
        if json_to and world.speaks:
            write("--json", as_compose.render(matrix), json_to)
        # A launcher may end all ranks when one of them ends: everything is said by then.
        code: int = world.tell(CODES[matrix.status])
    return code


def _asked(paths: tuple[Path, ...], given: Mapping[str, Any]) -> _Asked:
    """The options checked, before any rank is started.

    Raises:
        UsageError: they do not go together, or a name does not exist.
    """
    from equivalence import ranks as pools  # noqa: PLC0415 - torch is imported when needed
    from equivalence import store  # noqa: PLC0415 - likewise
    from equivalence.compose import running  # noqa: PLC0415 - likewise
    from equivalence.paths.ipc import faulty  # noqa: PLC0415 - likewise
    from equivalence.paths.ipc.ways import WAYS  # noqa: PLC0415 - likewise
    from equivalence.world import transport as transports  # noqa: PLC0415 - likewise

    making = [f"--{name}" for name in _STEPS if name in given]
    if paths and making:
        raise UsageError(f"{' and '.join(making)}: these make steps, and case files have theirs")
    fault = faulty.parse(given["fault"]) if "fault" in given else None
    named = _names(given.get("ways", _ALL))
    ways = running.known("way", named, tuple(WAYS))
    if fault is not None and named is None:
        ways = faulty.FAULTS[fault.name].ways
    if fault is not None:
        faulty.check(fault, ways=ways)
    cases = tuple(store.load_cases(*paths, op="compose_pages")) if paths else ()
    sizes = sorted({int(str(case.params["cp"])) for case in cases})
    if len(sizes) > 1:
        listed = " and ".join(map(str, sizes))
        raise UsageError(f"the cases are of {listed} ranks: name those of one number at a time")
    joined = _joined()
    ranks = given.get("ranks", joined or (sizes[0] if sizes else _RANKS))
    for what, other in (
        ("the cases are of", sizes[0] if sizes else None),
        ("torchrun has", joined),
    ):
        if other not in (None, ranks):
            raise UsageError(f"{what} {other} ranks; --ranks is {ranks}")
    timeout = pools.seconds(given.get("timeout", pools.TIMEOUT))
    if fault is not None:
        faulty.check(fault, ranks=ranks, timeout=timeout)
    transport = given.get("transport", _TRANSPORT)
    transports.check_device(
        transport if transport == _THREADS else transports.known(transport), given.get("device")
    )
    asked = _Asked(
        given=given,
        ways=ways,
        cases=cases,
        ranks=ranks,
        fault=fault,
        joined=joined is not None,
    )
    if not cases:
        _scenarios(asked)
    return asked


def _scenarios(asked: _Asked) -> dict[str, int]:
    """The scenarios asked for, with their numbers of steps.

    Raises:
        UsageError: one does not exist, or cannot be made.
    """
    from equivalence.compose import running, steps  # noqa: PLC0415 - torch is imported when needed

    named = running.known("scenario", _names(asked.steps["scenarios"]), steps.NAMES)
    _kinds(asked)
    return {name: len(steps.plan(name)) for name in named}


def _kinds(asked: _Asked) -> tuple[str, ...]:
    """The kinds asked for.

    Raises:
        UsageError: one does not exist.
    """
    from equivalence.compose import running, steps  # noqa: PLC0415 - torch is imported when needed

    return running.known("kind", _names(asked.steps["kinds"]), tuple(steps.TOKEN_BYTES))


def _names(text: str) -> list[str] | None:
    """Names with commas; None for all."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return None if _ALL in names else names


def _joined() -> int | None:
    """How many ranks torchrun started, where this process is one of them.

    Raises:
        UsageError: the environment says no number.
    """
    from equivalence.world import meeting  # noqa: PLC0415 - torch is imported when needed

    if not set(meeting.NEEDED) <= set(os.environ):
        return None
    told = os.environ["WORLD_SIZE"]
    if not told.isascii() or not told.isdigit() or not int(told):
        raise UsageError(f"WORLD_SIZE is {told!r}: it is the number of ranks, as torchrun sets it")
    return int(told)


@contextmanager
def _world(asked: _Asked) -> Iterator[_World]:
    """Ranks for the time of a run."""
    from equivalence import ranks  # noqa: PLC0415 - torch is imported when needed
    from equivalence.world import threads  # noqa: PLC0415 - likewise

    timeout = asked.option("timeout", ranks.TIMEOUT)
    settings = {
        "transport": asked.transport,
        "timeout": timeout,
        "device": asked.option("device", None),
    }
    if asked.joined:
        with ranks.joined(**settings) as pool:
            yield _World(pool=pool, speaks=not pool.rank, tell=pool.tell)
    elif asked.transport == _THREADS:
        yield _World(pool=threads.Threads(asked.ranks, timeout=timeout))
    else:
        with ranks.start(asked.ranks, **settings) as pool:
            yield _World(pool=pool)


def _cells(asked: _Asked, world: _World, tell: Tell) -> Iterator[tuple["Cell", int]]:
    """Every way over every scenario or case, and the width of their names."""
    from equivalence.compose import running  # noqa: PLC0415 - torch is imported when needed

    common: dict[str, Any] = {"fault": asked.fault, "judged": world.speaks}
    if asked.cases:
        width = max(len(case.name) for case in asked.cases)
        total = len(asked.cases) * len(asked.ways)
        pairs = ((case, way) for case in asked.cases for way in asked.ways)
        for done, (case, way) in enumerate(pairs):
            tell(f"{case.name} {way}", done, total)
            name, path = case.name, case.path
            yield (
                running.played(world.pool, way, [case], scenario=name, path=path, **common),
                width,
            )
        return
    names = _scenarios(asked)
    made = {name: asked.steps[name] for name in ("layers", "seed", "scale")}
    for cell in running.over(
        world.pool,
        asked.ways,
        tuple(names),
        kinds=_kinds(asked),
        progress=tell,
        **made,
        **common,
    ):
        yield cell, max(map(len, names))


def _again(asked: _Asked, cell: "Cell") -> str:
    """The command that runs one way over one scenario or case again."""
    from equivalence import saved  # noqa: PLC0415 - torch is imported when needed

    words = ["equivalence", "compose", *([saved.here(cell.path)] if cell.path else [])]
    options = {**asked.given, "ways": cell.way}
    if not cell.path:
        options["scenarios"] = cell.scenario
    for name, value in options.items():
        words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
