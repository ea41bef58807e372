"""What commands share: exit codes, printing, progress, options that several take."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from equivalence import plain
from equivalence.errors import UsageError
from equivalence.verdict import Status

EQUAL, DIFFERENT, USAGE, UNDECIDED, FAILED = range(5)
STOPPED, UNREAD = 130, 141
"""As shells tell Ctrl-C, and a pipe that nobody reads any more."""
CODES = {Status.EQUAL: EQUAL, Status.DIFFERENT: DIFFERENT, Status.UNDECIDED: UNDECIDED}

Tell = Callable[[str, int, int], None]

PATHS = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)


def say(sentence: str) -> None:
    """One sentence about the run itself, apart from its results."""
    with suppress(OSError):  # a stderr that takes nothing changes no result
        click.echo(plain.block(f"equivalence: {sentence}"), err=True)


def show(text: str) -> None:
    """Print lines; what a file or a candidate wrote into them cannot steer the terminal."""
    click.echo(plain.block(text))


def check_target(option: str, target: str | None) -> None:
    """Refuse a file that cannot be written, before anything is judged.

    Raises:
        UsageError: it is a folder, its folder is missing, or it has a case's name.
    """
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UsageError(f"{option} {target}: {what}")
    except OSError as error:
        raise UsageError(f"{option} {plain.line(target)}: {error.strerror}") from error
    if path.suffix == ".safetensors":
        raise UsageError(f"{option} {target}: that name is a case's")


def write(option: str, text: str, target: str) -> None:
    """Write a report to a file, or print it for "-".

    Raises:
        UsageError: the file cannot be written.
    """
    if target == "-":
        click.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {target}: {error.strerror}") from error


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas, ascending.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,18}", part.strip()) for part in parts):
        raise UsageError(f"{option} {text}: it is whole numbers with commas, as in {option} 3,17")
    return tuple(sorted({int(part) for part in parts}))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Tell]:
    """A bar on a terminal, for work over two seconds; silence elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _name, _done, _rows: None
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)

        def tell(name: str, done: int, rows: int) -> None:
            slow = (bar.tasks[0].elapsed or 0) > 2  # noqa: PLR2004 - seconds
            bar.update(task, description=name, completed=done, total=rows, visible=slow)

        yield tell
