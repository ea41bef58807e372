"""Tensors handed to another process: their bytes in one segment, their layout as JSON."""

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from equivalence import layout as layouts
from equivalence.errors import UsageError
from equivalence.world import segment

ALIGNED = 256
"""Each tensor begins at a multiple of so many bytes, as a device's allocator would have it."""

_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _NAMES if hasattr(torch, n)}


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], int | None]:
    """Copy tensors into a segment.

    Args:
        tensors: by name, of any strides and device.

    Returns:
        what `unpack` needs, as JSON, and a file descriptor; None where there is no byte.

    Raises:
        UsageError: one has a dtype that is not handed over.
        MemoryError: shared memory has no room for them.
    """
    parts, end = [], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        _known(name, dtype)
        parts.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": end})
        end += -(-size // ALIGNED) * ALIGNED
    layout: dict[str, Any] = {"parts": parts, "size": end}
    if not end:
        return layout, None
    handle = segment.create(end)
    with ExitStack() as stack:
        stack.callback(os.close, handle)
        # A second descriptor is mapped here, so that the first can be handed over.
        room = segment.mapped(os.dup(handle), end)
        for part, tensor in zip(parts, tensors.values(), strict=True):
            # Torch copies any true bool as byte 1.
            layouts.as_bytes(_place(room, part)).copy_(layouts.as_bytes(tensor))
        stack.pop_all()
    return layout, handle


def unpack(
    layout: Mapping[str, Any], handle: int | None, *, private: bool = False
) -> dict[str, Tensor]:
    """The tensors of a parcel, contiguous, in the memory of its segment.

    Args:
        layout: as `pack` said.
        handle: as `pack` gave; closed here. None where there is no byte, or the layout says under
            "place" where the segment is.
        private: whether what is written into them stays in this process.

    Raises:
        UsageError: the memory is missing, or what is said of it cannot be.
    """
    if handle is None and "place" in layout:
        handle = segment.attach(layout["place"], layout["size"])
    if layout["size"] and handle is None:
        raise UsageError(f"a parcel of {layout['size']} bytes came without its memory")
    if handle is None:
        room = torch.empty(0, dtype=torch.uint8)
    else:
        room = segment.mapped(handle, layout["size"], private=private)
    return {part["name"]: _place(room, part) for part in layout["parts"]}


def _place(room: Tensor, part: Mapping[str, Any]) -> Tensor:
    """Where a tensor stands in its segment.

    Raises:
        UsageError: it stands outside, or has no such dtype or shape.
    """
    dtype, shape, at = _known(part["name"], part["dtype"]), part["shape"], part["at"]
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or at < 0 or at % ALIGNED or at + size > len(room):
        raise UsageError(
            f"{part['name']!r} is {part['dtype']} {shape} at byte {at}: it does not fit into "
            f"{len(room)} bytes"
        )
    if not size:
        return torch.empty(shape, dtype=dtype)
    return room[at : at + size].view(dtype).view(shape)


def _known(name: str, dtype: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        UsageError: tensors of that name are not handed over.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"{name!r} is {dtype}: ranks hand over {', '.join(_DTYPES)}")
    return _DTYPES[dtype]
