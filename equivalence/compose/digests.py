"""Digests of pages by where they stand in a request, whatever pool and place they are in.

Two pools of other layouts compare equal, and ranks compare what they hold without moving it: each
digests its own pages, and only the digests travel. The bytes of a page are digested as they are,
those past the last token of a request too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from refimpl.batch import NOTHING, Batch, slot_counts
from refimpl.bits import as_int

Key: TypeAlias = tuple[int, int]
"""A request, and the position of one of its pages in it."""
Digests: TypeAlias = Mapping[Key, str]
"""XXH3-64 in hex by key."""

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A page that two sides do not hold alike.

    Attributes:
        request: whose.
        position: its place there, from 0 on.
        one: digest of the first side, or None where it has no such page.
        two: of the second.
    """

    request: int
    position: int
    one: str | None
    two: str | None


def of_dense(pages: Tensor, batch: Batch) -> dict[Key, str]:
    """Digests of a dense buffer.

    Args:
        pages: one byte a value, [S, page_bytes] of one layer, or [layers, S, page_bytes]: then the
            bytes of a page are those of all layers, one after another.
        batch: whose slots they are; padding has no digest.

    Raises:
        ValueError: the buffer has not a page for each slot, requests have more pages than there are
            slots, a slot of a request names no page, or a page has no layer or no byte.
    """
    layers = _layers(pages, dims=2)
    if layers.shape[1] != len(batch.slot_pages):
        raise ValueError(f"{layers.shape[1]} pages are not {len(batch.slot_pages)} slots")
    slots, keys = _keys(batch)
    return dict(zip(keys, _digests(layers, slots), strict=True))


def of_pools(pools: Tensor, batch: Batch, *, ranks: Iterable[int] | None = None) -> dict[Key, str]:
    """Digests of the pages of requests as their owners' pools have them.

    Args:
        pools: one byte a value, [cp, pool pages, page_bytes] or [layers, cp, pool pages,
            page_bytes].
        batch: which pages, and where they are.
        ranks: only pages that these own; all where None.

    Raises:
        ValueError: a page has no place in these pools (local page 0 is a dummy), requests have more
            pages than there are slots, a slot of a request names no page, a page has no layer or no
            byte, or there is no such rank.
    """
    layers = _layers(pools, dims=3)
    cp, many = layers.shape[1:3]
    some = set(range(cp)) if ranks is None else set(ranks)
    if strange := sorted(some - set(range(cp))):
        raise ValueError(f"ranks are {strange}: these pools are of ranks 0 to {cp - 1}")
    slots, keys = _keys(batch)
    pages, owner, local = (t.tolist() for t in (batch.slot_pages, batch.owner, batch.local_page))
    places: list[int] = []
    mine: list[Key] = []
    for slot, key in zip(slots, keys, strict=True):
        page = pages[slot]
        rank, at = (owner[page], local[page]) if page < len(owner) else (-1, -1)
        if not (0 <= rank < cp and NOTHING < at < many):
            raise ValueError(f"page {page} is local page {at} of rank {rank}: no such place")
        if rank in some:
            places.append(rank * many + at)
            mine.append(key)
    return dict(zip(mine, _digests(layers.flatten(1, 2), places), strict=True))


def compare(one: Digests, two: Digests) -> tuple[Difference, ...]:
    """Every page that one side lacks or both hold with other bytes, by request and position.

    Raises:
        ValueError: neither side has a page: nothing was compared.
    """
    if not one and not two:
        raise ValueError("neither side has a page: nothing was compared")
    return tuple(
        Difference(request=key[0], position=key[1], one=one.get(key), two=two.get(key))
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    )


def _layers(pages: Tensor, *, dims: int) -> Tensor:
    """Bytes with a dimension of layers in front."""
    cells = as_int(pages)
    if cells.dtype is not torch.uint8 or cells.dim() not in (dims, dims + 1):
        raise ValueError(
            f"pages are {pages.dtype} {list(pages.shape)}: one byte a value, "
            f"{dims} dimensions, or one more for layers"
        )
    layers = cells[None] if cells.dim() == dims else cells
    if not len(layers) or not layers.shape[-1]:
        raise ValueError(f"pages are {list(pages.shape)}: layers and bytes of a page are 1 or more")
    return layers


def _keys(batch: Batch) -> tuple[list[int], list[Key]]:
    """The slots that hold pages of requests, and their keys."""
    before, now = (counts.cpu().numpy() for counts in slot_counts(batch))
    count, pages = before + now, batch.slot_pages.cpu().numpy()
    request = np.arange(len(count)).repeat(count)
    position = np.arange(len(request)) - (count.cumsum() - count).repeat(count)
    if len(request) > len(pages):
        raise ValueError(f"requests have {len(request)} pages; there are {len(pages)} slots")
    for slot in (pages[: len(request)] <= NOTHING).nonzero()[0][:1].tolist():
        raise ValueError(f"slot {slot} of request {request[slot]} is page {pages[slot]}: no page")
    keys = zip(request.tolist(), position.tolist(), strict=True)
    return list(range(len(request))), list(keys)


def _digests(layers: Tensor, places: Sequence[int]) -> Iterable[str]:
    """The digests of some rows of [layers, n, page_bytes], read where they are."""
    if len(layers) == 1:
        return map(xxhash.xxh3_64_hexdigest, _rows(layers[0], places))
    states = [xxhash.xxh3_64() for _ in places]
    for layer in layers:
        for state, row in zip(states, _rows(layer, places), strict=True):
            state.update(row)
    return [state.hexdigest() for state in states]


def _rows(pages: Tensor, places: Sequence[int]) -> Iterable[Any]:
    """Some rows: on a host without a copy, from a device some at a time."""
    if not pages.is_cpu or pages.stride(1) != 1:
        return _fetched(pages, places)
    cells = pages.numpy()
    if list(places) == list(range(len(places))):
        return iter(cells[: len(places)])
    return map(cells.__getitem__, places)


def _fetched(pages: Tensor, places: Sequence[int]) -> Iterator[Any]:
    step = max(1, _PIECE_BYTES // pages.shape[1])
    for first in range(0, len(places), step):
        some = torch.tensor(places[first : first + step], device=pages.device)
        yield from pages[some].cpu().contiguous().numpy()
