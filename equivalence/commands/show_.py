"""`equivalence show`: what cases hold."""

from pathlib import Path

import click

from equivalence.commands.common import EQUAL, PATHS, show


@click.command("show")
@PATHS
@click.option("--readme", is_flag=True, help="Print the README of a folder of fixtures.")
def show_(paths: tuple[Path, ...], *, readme: bool) -> int:
    """Say what cases hold: tensors, windows, what they hunt, where they come from."""
    from equivalence import show as words  # noqa: PLC0415 - torch is imported when needed
    from equivalence.report import tables  # noqa: PLC0415 - likewise
    from equivalence.store import load_cases  # noqa: PLC0415 - likewise

    cases = load_cases(*paths)
    if readme:
        show(tables.fixtures_readme(paths[0], cases).removesuffix("\n"))
        return EQUAL
    for case in cases:
        show("\n".join(words.lines(case)))
    return EQUAL
