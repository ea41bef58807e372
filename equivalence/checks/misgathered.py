"""Gathers of planar key pages with one fault each."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from equivalence.checks.e4m3 import WRITES, Write
from equivalence.checks.fault import Asked, Fault, Outputs
from refimpl import bits, pages

Layout = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(token in its page int64 [n], page_size, D) -> first bytes of its values and of its scale."""


def _page_size(asked: Asked) -> int:
    return int(asked.params.get("page_size", 64))


def _head_dim(asked: Asked) -> int:
    return asked.inputs["kv_cache"].flatten(1).shape[1] // _page_size(asked) - bits.SCALE_BYTES


def _places(asked: Asked) -> tuple[Tensor, Tensor]:
    """The request of each row and the position there."""
    request, position = pages.batch_positions(asked.inputs["seq_lens"])
    return request[asked.rows], position[asked.rows]


def _token(asked: Asked) -> Tensor:
    return _places(asked)[1] % _page_size(asked)


def _bytes(asked: Asked) -> Tensor:
    """The pages of the rows, uint8 [n, page bytes]."""
    request, position = _places(asked)
    page = asked.inputs["block_table"][request, position // _page_size(asked)]
    return asked.inputs["kv_cache"].flatten(1)[page.long()]


def _cut(held: Tensor, values: Tensor, scale: Tensor) -> Outputs:
    """Bytes of pages [n, bytes] at places [n, D] and [n, 4]."""
    return {
        "values": held.gather(1, values).view(bits.E4M3),
        "k_scale": held.gather(1, scale).view(torch.float32)[:, 0],
    }


def _spread(first: Tensor, size: int) -> Tensor:
    return first[:, None] + torch.arange(size, device=first.device)


def _laid_out(asked: Asked, layout: Layout) -> Outputs:
    """The right pages read by another layout."""
    dim = _head_dim(asked)
    values, scale = layout(_token(asked), _page_size(asked), dim)
    return _cut(_bytes(asked), _spread(values, dim), _spread(scale, bits.SCALE_BYTES))


def _planar(token: Tensor, page_size: int, dim: int) -> tuple[Tensor, Tensor]:
    return token * dim, page_size * dim + token * bits.SCALE_BYTES


def _interleaved(token: Tensor, _: int, dim: int) -> tuple[Tensor, Tensor]:
    first = token * (dim + bits.SCALE_BYTES)
    return first, first + dim


def _scales_first(token: Tensor, page_size: int, dim: int) -> tuple[Tensor, Tensor]:
    return page_size * bits.SCALE_BYTES + token * dim, token * bits.SCALE_BYTES


def _written_interleaved(asked: Asked) -> Outputs:
    """Planar places of pages whose keys stand one after the other, each with its scale."""
    size, dim, token = _page_size(asked), _head_dim(asked), _token(asked)
    values, scale = _planar(token, size, dim)

    def source(first: Tensor, many: int) -> Tensor:
        place = _spread(first, many)
        key, rest = place // (dim + bits.SCALE_BYTES), place % (dim + bits.SCALE_BYTES)
        return torch.where(
            rest < dim, key * dim + rest, size * dim + key * bits.SCALE_BYTES + rest - dim
        )

    return _cut(_bytes(asked), source(values, dim), source(scale, bits.SCALE_BYTES))


def _drift(asked: Asked) -> str:
    drift = ": from token 1 of each page on, 4 bytes of drift a token"
    return drift if asked.stage == "values" else ""


def _elsewhere(asked: Asked, place: Callable[[Asked], tuple[Tensor, Tensor]]) -> Outputs:
    """The right layout of other pages and positions; nothing where there is no such page."""
    page, position = place(asked)
    cache = asked.inputs["kv_cache"].flatten(1)
    if not len(page) or not 0 <= int(page.min()) <= int(page.max()) < len(cache):
        return {}
    size, dim = _page_size(asked), _head_dim(asked)
    values, scale = _planar(position % size, size, dim)
    return _cut(cache[page.long()], _spread(values, dim), _spread(scale, bits.SCALE_BYTES))


def _logical(asked: Asked) -> tuple[Tensor, Tensor]:
    position = _places(asked)[1]
    return position // _page_size(asked), position


def _first_request(asked: Asked) -> tuple[Tensor, Tensor]:
    position = _places(asked)[1]
    return asked.inputs["block_table"][0, position // _page_size(asked)], position


def _whole_pages(asked: Asked) -> tuple[Tensor, Tensor]:
    size, lens = _page_size(asked), asked.inputs["seq_lens"].clamp(min=0)
    every = pages.batch_positions((lens + size - 1) // size * size)
    request, position = (each[asked.rows] for each in every)
    return asked.inputs["block_table"][request, position // size], position


def _inverted(asked: Asked) -> Outputs:
    right = _laid_out(asked, _planar)
    return {**right, "k_scale": 1 / right["k_scale"]}


def _rewritten(asked: Asked, write: Write) -> Outputs:
    right = _laid_out(asked, _planar)
    return {**right, "values": write(right["values"].float())}


FAULTS: Mapping[str, Fault] = {
    "interleaved": Fault(
        cause="a planar page is read as interleaved",
        outputs=partial(_laid_out, layout=_interleaved),
        note=_drift,
    ),
    "written-interleaved": Fault(
        cause="an interleaved page is read as planar",
        outputs=_written_interleaved,
        note=_drift,
    ),
    "scales-first": Fault(
        cause="the scales of a page are read before its values",
        outputs=partial(_laid_out, layout=_scales_first),
    ),
    "logical-pages": Fault(
        cause="pages are read by their logical numbers, without block_table",
        outputs=partial(_elsewhere, place=_logical),
    ),
    "first-request": Fault(
        cause="every request reads the pages of request 0",
        outputs=partial(_elsewhere, place=_first_request),
    ),
    "whole-pages": Fault(
        cause="whole pages are gathered and the requests not cut to their lengths",
        outputs=partial(_elsewhere, place=_whole_pages),
    ),
    "inverted": Fault(cause="1 / scale is given", outputs=_inverted),
    **{
        name: Fault(cause=cause, outputs=partial(_rewritten, write=write))
        for name, (cause, write) in WRITES.items()
        if "fnuz" in name
    },
}
"""Faults of a gather by name; a reading tries them in this order."""
