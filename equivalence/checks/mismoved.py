"""Moves of tokens in planar key pages with one fault each."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from equivalence.checks.fault import Asked, Fault, Outputs
from refimpl import bits, pages

Bytes = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(locations int64 [n], page_size, page bytes) -> pages [n, 1] and bytes [n, *] that are moved."""


def _page_size(asked: Asked) -> int:
    return int(asked.params.get("page_size", 64))


def _moves(asked: Asked) -> tuple[Tensor, Tensor]:
    """Sources and destinations of what is moved, int64."""
    source, destination = (asked.inputs[name].long() for name in ("source", "destination"))
    held = source != int(asked.params.get("pad", 0))
    return source[held], destination[held]


def _planar(location: Tensor, page_size: int, width: int) -> tuple[Tensor, Tensor]:
    return pages.token_bytes(location, page_size=page_size, width=width)


def _keys(location: Tensor, page_size: int, width: int) -> tuple[Tensor, Tensor]:
    page, byte = _planar(location, page_size, width)
    return page, byte[:, : -bits.SCALE_BYTES]


def _scales(location: Tensor, page_size: int, width: int) -> tuple[Tensor, Tensor]:
    page, byte = _planar(location, page_size, width)
    return page, byte[:, -bits.SCALE_BYTES :]


def _interleaved(location: Tensor, page_size: int, width: int) -> tuple[Tensor, Tensor]:
    page, many = location[:, None] // page_size, width // page_size
    return page, location[:, None] % page_size * many + torch.arange(many, device=page.device)


def _pages(location: Tensor, _: int, width: int) -> tuple[Tensor, Tensor]:
    every = torch.arange(width, device=location.device)
    return location[:, None], every.expand(len(location), -1)


def _copied(asked: Asked, source: Tensor, destination: Tensor, what: Bytes = _planar) -> Outputs:
    """The pages asked for after these moves, all read before; nothing where a page is none."""
    cache, n = asked.inputs["kv_cache"], len(asked.rows)
    (page, read), (at, write) = (
        what(each, _page_size(asked), cache.shape[1]) for each in (source, destination)
    )
    both = torch.cat([page, at])
    if len(both) and not 0 <= int(both.min()) <= int(both.max()) < len(cache):
        return {}
    place = torch.full((len(cache),), -1, device=cache.device)
    place[asked.rows] = torch.arange(n, device=cache.device)
    some = place[at[:, 0]] >= 0
    out = cache[asked.rows]
    out[place[at[some]], write[some]] = cache[page[some], read[some]]
    return {"moved": out}


def _by(what: Bytes) -> Callable[[Asked], Outputs]:
    """The right moves of other bytes."""
    return lambda asked: _copied(asked, *_moves(asked), what)


def _one_by_one(asked: Asked) -> Outputs:
    source, destination = _moves(asked)
    first: dict[int, int] = {}
    for one, two in zip(source.tolist(), destination.tolist(), strict=True):
        first[two] = first.get(one, one)
    return _copied(asked, source.new_tensor(list(first.values())), destination)


def _exchanged(asked: Asked) -> Outputs:
    source, destination = _moves(asked)
    once = len(set(source.tolist())) == len(source)
    return _copied(asked, destination, source) if once else {}


def _padded(asked: Asked) -> Outputs:
    """Padding as kernels have it that load zeros for it and store them all the same."""
    pad, cache = int(asked.params.get("pad", 0)), asked.inputs["kv_cache"]
    if not bool((asked.inputs["source"] == pad).any()):
        return {}
    location = asked.rows.new_tensor([pad % (len(cache) * _page_size(asked))])
    page, byte = _planar(location, _page_size(asked), cache.shape[1])
    made = _copied(asked, *_moves(asked))
    for out in made.values():
        out[(asked.rows == page[0]).nonzero(), byte] = 0
    return made


def _page_note(asked: Asked) -> str:
    source, destination = _moves(asked)
    for move in (destination == asked.rows[0]).nonzero()[:, 0].tolist():
        return f": page {int(source[move])} onto page {int(asked.rows[0])}"
    return ""


FAULTS: Mapping[str, Fault] = {
    "pages": Fault(
        cause="locations of tokens are taken for pages, and whole pages are copied",
        outputs=_by(_pages),
        note=_page_note,
    ),
    "unmoved": Fault(
        cause="nothing is moved",
        outputs=lambda asked: {"moved": asked.inputs["kv_cache"][asked.rows]},
    ),
    "keys": Fault(cause="keys are moved and their scales stay", outputs=_by(_keys)),
    "scales": Fault(cause="scales are moved and their keys stay", outputs=_by(_scales)),
    "one-by-one": Fault(
        cause="a token is written before another move has read what stood there",
        outputs=_one_by_one,
    ),
    "exchanged": Fault(cause="destinations are read and sources are written", outputs=_exchanged),
    "padding": Fault(cause="padding is moved: zeros are stored for it", outputs=_padded),
    "interleaved": Fault(cause="a planar page is moved as interleaved", outputs=_by(_interleaved)),
}
"""Faults of a move by name; a reading tries them in this order."""
