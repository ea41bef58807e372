"""How bytes get into pages: gathers through a table of pointers, and rows into current pages.

Everything is u8: an fp8 tensor has no copy by index, and a sum of bytes keeps every NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from refimpl.compose import write_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """What is read through one pointer.

    Attributes:
        source: which of the table.
        slots: int64 [n], where the pages go.
        rows: int64 [n], where they stand behind the pointer.
    """

    source: int
    slots: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where a rank's own current pages go in one buffer.

    Attributes:
        pages: int64 [n], their rows there.
        tokens: int64 [m], row * page_size + offset of each own token.
        carried: int64 [0 or 1], the row of the page that starts from the pool's.
        held: int64 [0 or 1], its local page in the own pool.
    """

    pages: Tensor
    tokens: Tensor
    carried: Tensor
    held: Tensor


def gather(table: Sequence[Tensor], reads: Sequence[Read], out: Tensor) -> None:
    """Fetch pages through a table of pointers.

    Args:
        table: u8 [rows, page_bytes] each.
        reads: what to fetch, one for each pointer that is used.
        out: u8 [at least S, page_bytes].
    """
    for read in reads:
        source = table[read.source]
        pages = source.index_select(0, read.rows.to(source.device))
        out.index_copy_(0, read.slots, pages.to(out.device))


def put(into: Tensor, rows: Tensor, pages: Tensor) -> None:
    """Copy whole pages u8 [n, page_bytes] to those rows."""
    into.index_copy_(0, rows, pages)


def write(
    into: Tensor, places: Places, *, pool: Tensor, rows: Tensor, kind: str, page_size: int
) -> None:
    """Fill own current pages: zeros, then the page that is carried, then the tokens.

    Args:
        into: u8 [rows, page_bytes].
        places: where.
        pool: u8 [pool pages, page_bytes], one's own.
        rows: u8 [m, token_bytes], own tokens.
        kind: "token" or "index".
        page_size: tokens a page.
    """
    into.index_fill_(0, places.pages, 0)
    into.index_copy_(0, places.carried, pool.index_select(0, places.held))
    write_rows(into, rows=rows, locations=places.tokens, kind=kind, page_size=page_size)


def elsewhere(reads: Sequence[Read], source: int) -> tuple[Read, ...]:
    """What is read through the others."""
    return tuple(read for read in reads if read.source != source)


def moved(reads: Sequence[Read], by: int) -> tuple[Read, ...]:
    """The same through pointers that stand elsewhere in the table."""
    return tuple(replace(read, source=read.source + by) for read in reads)
