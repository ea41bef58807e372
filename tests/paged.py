"""Batches for tests whose pages are in order, each whole and at its owner."""

from tiny import ints

from refimpl.batch import Batch, split_writers


def made(
    requests: list[tuple[int, int]], *, cp: int = 2, page_size: int = 4, padding: int = 1
) -> Batch:
    """Page n has number n + 1, is local page n + 1 of rank n % cp, and splits are page aligned."""
    prefix, extend = [p for p, _ in requests], [e for _, e in requests]
    slots = sum(-(-(p + e) // page_size) for p, e in requests)
    pages = range(1, slots + 1)
    writer = split_writers(prefix_lens=prefix, extend_lens=extend, cp=cp, page_size=page_size)
    return Batch(
        slot_pages=ints(*pages, *[0] * padding),
        owner=ints(-1, *(page % cp for page in range(slots))),
        local_page=ints(0, *pages),
        writer=writer,
        prefix_lens=ints(*prefix),
        extend_lens=ints(*extend),
        cp=cp,
        page_size=page_size,
    )
