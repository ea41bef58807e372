"""`equivalence compose`: every way to compose pages, over real ranks, against one process."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

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

if TYPE_CHECKING:
    from equivalence.compose.asked import Asked
    from equivalence.compose.matrix import Cell
    from equivalence.paths.ipc.candidate import Pool


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


_DEFAULT = ParameterSource.DEFAULT
_option = partial(click.option, show_default=True)


@click.command("compose")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH...]")
@_option("--ranks", default=8, type=click.IntRange(1), help="How many; with cases, as they have.")
@_option("--ways", default="all", metavar="NAME,...", help="How pages are composed.")
@_option("--scenarios", default="all", metavar="NAME,...", help="Steps to make without a case.")
@_option("--layers", default=8, type=click.IntRange(1, 1024), help="Of every kind.")
@_option("--kinds", default="token,index", metavar="all|NAME,...", help="Of pages.")
@_option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), help="Of the scenarios.")
@_option("--scale", default=1, type=click.IntRange(1), help="Divide their lengths by this.")
@_option("--transport", default="shm", metavar="NAME", help="shm, cuda, symmetric or threads.")
@click.option(
    "--device", help="Where ranks export memory; the transport's own choice if not named."
)
@_option(
    "--timeout",
    default=30.0,
    type=click.FloatRange(0, 86400, min_open=True),
    help="Seconds of silence.",
)
@click.option("--fault", metavar="NAME[,KEY=VALUE,...]", help="Do this wrong, on purpose.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the results as JSON.")
@click.pass_context
def compose_(
    context: click.Context,
    /,
    paths: tuple[Path, ...],
    json_to: str | None,
    **options: Any,  # noqa: ANN401 - as `Options`
) -> int:
    """Compose pages on ranks in every way: does each of them hold the reference's bytes?

    Steps are made from a seed, or read from case files. Under torchrun its ranks are taken.
    """
    if sys.stdout is None:  # a shell's `>&-`
        say("stdout is closed: there is nowhere to print results")
        return FAILED
    from equivalence.compose import asked as asking  # noqa: PLC0415 - torch is imported when needed
    from equivalence.compose import running  # noqa: PLC0415 - likewise
    from equivalence.compose.matrix import Matrix  # noqa: PLC0415 - likewise
    from equivalence.report import as_compose  # noqa: PLC0415 - likewise

    check_target("--json", json_to)
    named = (name for name in options if context.get_parameter_source(name) is not _DEFAULT)
    typed = {name: options[name] for name in named}
    asked = asking.read(paths, asking.Options(**options), typed)
    cells: list[Cell] = []
    with _world(asked) as world:
        quiet = json_to == "-" or not world.speaks
        with progress(quiet=quiet) as tell:
            width = max(map(len, asked.scenarios))
            for cell in _cells(asked, world, tell):
                cells.append(cell)
                if not quiet:
                    show(as_compose.line(cell, width=width))
        matrix = Matrix(
            ranks=asked.ranks,
            transport=asked.options.transport,
            settings=asked.settings,
            fault=str(asked.typed.get("fault", "")),
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


@contextmanager
def _world(asked: "Asked") -> Iterator[_World]:
    """Ranks for the time of a run."""
    from equivalence import ranks  # noqa: PLC0415 - torch is imported when needed
    from equivalence.compose.asked import THREADS  # noqa: PLC0415 - likewise
    from equivalence.world import threads  # noqa: PLC0415 - likewise

    options = asked.options
    settings: dict[str, Any] = {
        "transport": options.transport,
        "timeout": options.timeout,
        "device": options.device,
    }
    if asked.joined:
        with ranks.joined(**settings) as pool:
            yield _World(pool=pool, speaks=not pool.rank, tell=pool.tell)
    elif options.transport == THREADS:
        yield _World(pool=threads.Threads(asked.ranks, timeout=options.timeout))
    else:
        with ranks.start(asked.ranks, **settings) as pool:
            yield _World(pool=pool)


def _cells(asked: "Asked", world: _World, tell: Tell) -> Iterator["Cell"]:
    """Every way over every scenario or case."""
    from equivalence.compose import running  # noqa: PLC0415 - torch is imported when needed

    common: dict[str, Any] = {"fault": asked.fault, "judged": world.speaks}
    if not asked.cases:
        yield from running.over(
            world.pool,
            asked.ways,
            asked.scenarios,
            layers=asked.options.layers,
            kinds=asked.kinds,
            seed=asked.options.seed,
            scale=asked.options.scale,
            progress=tell,
            **common,
        )
    pairs = list(product(asked.cases, asked.ways))
    for done, (case, way) in enumerate(pairs):
        tell(f"{case.name} {way}", done, len(pairs))
        name, path = case.name, case.path
        yield running.played(world.pool, way, [case], scenario=name, path=path, **common)


def _again(asked: "Asked", cell: "Cell") -> str:
    """The command that runs one way over one scenario or case again, on as many ranks."""
    from equivalence import saved  # noqa: PLC0415 - torch is imported when needed

    words = ["equivalence", "compose", *([saved.here(cell.path)] if cell.path else [])]
    options = {**asked.typed, "ways": cell.way}
    if not cell.path:
        options["scenarios"] = cell.scenario
    if asked.joined:
        options["ranks"] = asked.ranks
    for name, value in options.items():
        words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
