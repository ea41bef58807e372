"""Strides of tensors that are not packed: as data, as a check, and as a copy that keeps them."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import InvalidCase
from refimpl.bits import as_int

_PIECE_BYTES = 16 << 20

_SLACK = 1 << 20
"""Bytes a strided tensor may take beyond sixteen times its packed size."""


def of(tensor: Tensor) -> dict[str, Any] | None:
    """Stride and offset; None where packed, or where cells share memory and no file can say so."""
    if tensor.is_contiguous() or overlaps(tensor.shape, tensor.stride()):
        return None
    return {"stride": list(tensor.stride()), "offset": tensor.storage_offset()}


def check(fields: Any, shape: Sequence[int], dtype: torch.dtype) -> None:  # noqa: ANN401 - untrusted
    """Refuse strides that do not fit, overlap, or reach further than a padded tensor would.

    Raises:
        InvalidCase: without the tensor's name.
    """
    try:
        stride, offset = fields["stride"], fields["offset"]
        fit = all(type(n) is int and 0 <= n < 1 << 40 for n in [*stride, offset])
        fit = fit and len(stride) == len(shape) and len(fields) == 2  # noqa: PLR2004 - those two
    except (TypeError, KeyError):
        fit = False
    if not fit:
        raise InvalidCase(f"does not describe a tensor of {len(shape)} dimensions")
    if overlaps(shape, stride):
        raise InvalidCase(f"strides {stride} put two cells of {list(shape)} into one place")
    packed = prod(shape) * dtype.itemsize
    if extent(shape, stride, offset) * dtype.itemsize > 16 * packed + _SLACK:
        raise InvalidCase(f"strides {stride} reach far beyond the tensor's {packed:,} bytes")


def extent(shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Elements of storage a strided tensor reaches."""
    return offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether some stride is no larger than all that the smaller ones reach: cells may coincide."""
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return 0 not in shape
        reach += step * (size - 1)
    return False


def copied(tensor: Tensor) -> Tensor:
    """A copy; torch copies a bool that is neither 0 nor 1 as 1, this keeps its byte."""
    return as_bytes(tensor).clone().view(tensor.dtype)


def taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows (int64) of a tensor, every byte of a bool as it is."""
    return as_bytes(tensor)[rows].view(tensor.dtype)


def packed(tensor: Tensor) -> Tensor:
    """A copy in the host's memory without strides, every byte of a bool as it is."""
    return as_bytes(tensor.detach()).cpu().contiguous().clone().view(tensor.dtype)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device, every byte of a bool as it is."""
    return as_bytes(tensor).to(device).view(tensor.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """A bool or fp8 tensor as its bytes, any other as it is.

    A bool may be other than 0 and 1, and fp8 cannot be indexed on every device.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in a row, without a copy where they lie so."""
    flat = as_bytes(tensor.detach()).contiguous().flatten()
    # One cell is contiguous whatever its stride says.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, or packed where the tensor's own cells overlap."""
    cells = as_bytes(tensor)
    if overlaps(tensor.shape, tensor.stride()):
        return cells.contiguous().clone().view(tensor.dtype)
    out = torch.empty_strided(cells.shape, cells.stride(), dtype=cells.dtype, device=cells.device)
    return out.copy_(cells).view(tensor.dtype)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as integers, so many of its first dimension at a time that copies stay small."""
    whole = as_int(tensor) if tensor.dim() else as_int(tensor)[None]
    step = max(1, _PIECE_BYTES // max(1, whole[:1].numel() * whole.element_size()))
    for i in range(0, len(whole), step):
        yield whole[i : i + step]
