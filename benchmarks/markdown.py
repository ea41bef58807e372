"""Tables of a page of results."""

from collections.abc import Iterable, Sequence


def line(cells: Iterable[str]) -> str:
    """One row."""
    return "| " + " | ".join(cells) + " |\n"


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A head and its rows."""
    return line(head) + line(["---"] * len(head)) + "".join(map(line, rows))
