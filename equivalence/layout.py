"""Strides of tensors that are not packed: as data, as a check, and as a copy that keeps them."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import InvalidCase

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


def clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, or packed where the tensor's own cells overlap."""
    if overlaps(tensor.shape, tensor.stride()):
        return tensor.contiguous().clone()
    out = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return out.copy_(tensor)
