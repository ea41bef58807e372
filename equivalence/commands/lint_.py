"""`equivalence lint`: everything that is wrong with case files."""

from pathlib import Path

import click

from equivalence.commands.common import DIFFERENT, EQUAL, PATHS, show
from equivalence.errors import UsageError
from equivalence.units import many


@click.command("lint")
@PATHS
def lint_(paths: tuple[Path, ...]) -> int:
    """Find everything that is wrong with case files; 1 where something is."""
    from equivalence import lint as linter  # noqa: PLC0415 - torch is imported when needed
    from equivalence import store  # noqa: PLC0415 - likewise

    files = len(store.find_cases(paths))
    if not files:
        raise UsageError(f"no case in {', '.join(map(str, paths))}")
    count = 0
    for problem in linter.problems(paths):
        count += 1
        show(problem)
    click.echo(f"{many(files, 'file')}: {many(count, 'problem') if count else 'no problems'}")
    return DIFFERENT if count else EQUAL
