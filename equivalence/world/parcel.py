"""Tensors handed to another process: their bytes in one segment, their layout as JSON."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world import segment

ALIGNED = 256
"""Each tensor begins at a multiple of so many bytes, as a device's allocator would have it."""


def pack(
    tensors: Mapping[str, Tensor], *, tag: str, named: bool = False
) -> tuple[dict[str, Any], int | None]:
    """Copy tensors into a segment.

    Args:
        tensors: by name, of any strides and device.
        tag: of the world.
        named: whether the segment keeps its name, which is told as "path", for `discard`.

    Returns:
        what `unpack` needs, as JSON, and a file descriptor; None where there is no byte.

    Raises:
        MemoryError: shared memory has no room for them.
    """
    parts, end = [], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "at": end})
        end += -(-size // ALIGNED) * ALIGNED
    layout: dict[str, Any] = {"parts": parts, "size": end}
    if not end:
        return layout, None
    path, handle = segment.create(end, tag=tag)
    if named:
        layout["path"] = str(path)
    else:
        segment.release(path)
    # A second descriptor is mapped here, so that the first can be handed over.
    room = segment.mapped(os.dup(handle), end)
    for part, tensor in zip(parts, tensors.values(), strict=True):
        _place(room, part).copy_(tensor)
    return layout, handle


def unpack(
    layout: Mapping[str, Any], handle: int | None, *, private: bool = False
) -> dict[str, Tensor]:
    """The tensors of a parcel, contiguous, in the memory of its segment.

    Args:
        layout: as `pack` said.
        handle: as `pack` gave; closed here. None where the segment has a name or no byte.
        private: whether what is written into them stays in this process.

    Raises:
        UsageError: the memory is missing.
    """
    if handle is None and "path" in layout:
        handle = segment.attach(Path(layout["path"]), layout["size"])
    if layout["size"] and handle is None:
        raise UsageError(f"a parcel of {layout['size']} bytes came without its memory")
    if handle is None:
        room = torch.empty(0, dtype=torch.uint8)
    else:
        room = segment.mapped(handle, layout["size"], private=private)
    return {part["name"]: _place(room, part) for part in layout["parts"]}


def discard(layout: Mapping[str, Any]) -> None:
    """Take away the name of a parcel's segment, if it has one."""
    if "path" in layout:
        segment.release(Path(layout["path"]))


def _place(room: Tensor, part: Mapping[str, Any]) -> Tensor:
    """Where a tensor stands in its segment."""
    dtype, shape = getattr(torch, part["dtype"]), part["shape"]
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return room[part["at"] : part["at"] + size].view(dtype).view(shape)
