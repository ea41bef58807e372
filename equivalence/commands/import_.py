"""`equivalence import`: plain recordings become cases."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import click

from equivalence.commands.common import EQUAL, PATHS, show
from equivalence.errors import UsageError
from equivalence.units import many


@click.command("import")
@PATHS
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
        show(f"{target}   {case.op}   {many(len(case.recorded), 'launch chain')}")
    return EQUAL


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: it is KEY=VALUE")
    return key, int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value
