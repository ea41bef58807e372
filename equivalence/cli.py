"""The command line: what to judge, how to say it, and the exit code."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from equivalence import plain
from equivalence.candidate import load as load_candidate
from equivalence.errors import InvalidCase, UsageError
from equivalence.report.as_text import many

EQUAL, DIFFERENT, USAGE, UNDECIDED, FAILED = range(5)
_AGAIN = 8

_PATHS = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 equal, 1 different, 2 usage, 3 undecided, 4 our failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command.main(args=arguments, prog_name="equivalence", standalone_mode=False)
    except click.ClickException as error:
        _say(error.format_message())
        code = USAGE
    except click.exceptions.Abort:
        _say("stopped")
        code = USAGE
    except (UsageError, InvalidCase) as error:
        _say(str(error))
        code = USAGE
    except SystemExit:
        # Whoever read the output has gone, and click ends such a run with what means DIFFERENT.
        code = FAILED
    except Exception as error:  # the last line of defence: a user sees one sentence
        if "--debug" in arguments:
            raise
        kind = type(error).__name__
        _say(f"internal error: {kind}: {error}; this is a bug here, `--debug` prints where")
        code = FAILED
    sys.exit(code)


def _say(sentence: str) -> None:
    click.echo(plain.block(f"equivalence: {sentence}"), err=True)


def _print(text: str) -> None:
    """Print lines; what a file or a candidate wrote into them cannot steer the terminal."""
    click.echo(plain.block(text))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="indexer-equivalence")
@click.option("--debug", is_flag=True, help="Print where an internal error happened.")
def command(*, debug: bool) -> None:
    """Are the picks of a sparse-attention indexer the same, only tied, or wrong?"""
    del debug


@command.command("import")
@_PATHS
@click.option("--to", "folder", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--op", help="The op, where it should not be told from the tensors.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A param to set.")
def import_(
    paths: tuple[Path, ...], folder: Path, op: str | None, settings: tuple[str, ...]
) -> int:
    """Turn plain recordings into cases, one file each."""
    from equivalence import store  # noqa: PLC0415 - torch is imported when a command needs it
    from equivalence.importers import recorded_layer  # noqa: PLC0415 - likewise

    chosen = dict(_setting(text) for text in settings)
    recordings = store.find(paths)
    if not recordings:
        raise UsageError(f"no *{store.SUFFIX} in {', '.join(map(str, paths))}")
    names = Counter(path.name for path in recordings)
    for name, count in names.items():
        if count > 1:
            raise UsageError(f"{count} recordings are named {name}: import them one by one")
    for path in recordings:
        case = recorded_layer.read(path, op=op, settings=chosen)
        target = folder / path.name
        try:
            store.save(case, target)
        except OSError as error:
            raise UsageError(
                f"--to {folder}: cannot be written: {error.strerror or error}"
            ) from error
        _print(f"{target}   {case.op}   {many(len(case.recorded), 'launch chain')}")
    return EQUAL


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: it is KEY=VALUE")
    return key, int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value


@command.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--shipped", is_flag=True, help="Replay the cases that ship with this package.")
@click.option("--candidate", metavar="MODULE:FUNCTION", help="Judge this instead of the record.")
@click.option("--contract", help="What may differ: a documented name, or key=value,...")
@click.option("--device", help="Where the inputs go and the reference runs.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--op", help="Only cases of this op.")
@click.option("--rows", metavar="N,N,...", help="Only these rows.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the verdicts as JSON.")
@click.option("--allow-structural", is_flag=True, help="A run may hold no row that selects.")
def replay(  # noqa: PLR0917 - click hands options over by name
    paths: tuple[Path, ...],
    candidate: str | None,
    contract: str | None,
    device: str | None,
    repeats: int,
    op: str | None,
    rows: str | None,
    json_to: str | None,
    *,
    shipped: bool,
    allow_structural: bool,
) -> int:
    """Judge the recorded runs of cases, or a candidate on their inputs."""
    from equivalence import flags, run, saved  # noqa: PLC0415 - torch is imported when a command needs it
    from equivalence.report import as_json, as_text  # noqa: PLC0415 - likewise
    from equivalence.verdict import Status, run_status  # noqa: PLC0415 - likewise

    if shipped:
        paths = (*paths, flags.fixtures_dir() / "cases")
    if not paths:
        raise UsageError("replay what? name case files or folders, or give --shipped")
    _check_options(candidate, contract, repeats, json_to)
    chosen = _numbers(rows)
    quiet = json_to == "-"
    verdicts = []
    # What a candidate prints is no JSON.
    redirect = redirect_stdout(sys.stderr if quiet else sys.stdout)
    with redirect, _progress(quiet=quiet) as tell:
        options = run.Options(
            candidate=None if candidate is None else load_candidate(candidate),
            contract=contract,
            device=device,
            repeats=repeats,
            rows=chosen,
            op=op,
        )
        for verdict in run.over(paths, options, progress=tell):
            verdicts.append(verdict)
            if not quiet:
                _print(as_text.case_lines(verdict, width=16))
    if not quiet:
        for verdict in verdicts:
            if verdict.status is not Status.EQUAL and not verdict.expected:
                again = saved.again(
                    verdict.path,
                    candidate=candidate or "",
                    contract=contract or "",
                    device=device or "",
                    repeats=repeats,
                    rows=verdict.failing[:_AGAIN] or chosen or (),
                )
                _print("\n" + as_text.failure(verdict, again=again))
        _print("\n" + as_text.summary(verdicts))
    status = run_status(verdicts, allow_structural=allow_structural)
    if json_to:
        text = as_json.render(verdicts, allow_structural=allow_structural)
        _write(text, json_to)
    if status is Status.UNDECIDED and all(v.status is not Status.UNDECIDED for v in verdicts):
        _say("no row of any case selects: every window fits into k (--allow-structural accepts it)")
    return {Status.EQUAL: EQUAL, Status.DIFFERENT: DIFFERENT, Status.UNDECIDED: UNDECIDED}[status]


def _check_options(
    candidate: str | None, contract: str | None, repeats: int, target: str | None
) -> None:
    """Refuse what cannot be, before anything is judged."""
    from equivalence.contract import Contract  # noqa: PLC0415 - imported when a command needs it

    if contract is not None:
        Contract.parse(contract)
    if repeats > 1 and candidate is None:
        raise UsageError("--repeats calls a candidate again: name one with --candidate")
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UsageError(f"--json {target}: {what}")
    except OSError as error:
        raise UsageError(f"--json {plain.line(target)}: {error.strerror}") from error
    if path.suffix == ".safetensors":
        raise UsageError(f"--json {target}: that name is a case's")


def _write(text: str, target: str) -> None:
    if target == "-":
        click.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {target}: {error.strerror}") from error


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,18}", part.strip()) for part in parts):
        raise UsageError(f"--rows {text}: it is row numbers with commas, as in --rows 3,17")
    return tuple(sorted({int(part) for part in parts}))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
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


@command.command()
@_PATHS
@click.option("--readme", is_flag=True, help="Print the README of a folder of fixtures.")
def show(paths: tuple[Path, ...], *, readme: bool) -> int:
    """Say what cases hold: tensors, windows, what they hunt, where they come from."""
    from equivalence import show as words  # noqa: PLC0415 - torch is imported when needed
    from equivalence import tables  # noqa: PLC0415 - likewise
    from equivalence.store import load_cases  # noqa: PLC0415 - likewise

    cases = load_cases(*paths)
    if readme:
        _print(tables.fixtures_readme(paths[0], cases).removesuffix("\n"))
        return EQUAL
    for case in cases:
        _print("\n".join(words.lines(case)))
    return EQUAL


@command.command()
@_PATHS
def lint(paths: tuple[Path, ...]) -> int:
    """Find everything that is wrong with case files; 1 where something is."""
    from equivalence import lint as linter  # noqa: PLC0415 - torch is imported when needed
    from equivalence import store  # noqa: PLC0415 - likewise

    files = len(store.find_cases(paths))
    if not files:
        raise UsageError(f"no case in {', '.join(map(str, paths))}")
    count = 0
    for problem in linter.problems(paths):
        count += 1
        _print(problem)
    click.echo(f"{many(files, 'file')}: {many(count, 'problem') if count else 'no problems'}")
    return DIFFERENT if count else EQUAL
