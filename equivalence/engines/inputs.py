"""What a kernel takes: its tensors are looked at before the call, for it may not look itself."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from equivalence import schema
from equivalence.errors import InvalidCase, UsageError
from equivalence.schema import TensorSpec

_ALIGNMENT = 16
"""Bytes; what a bulk copy of Hopper wants of an address."""


def expect(
    kernel: str,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    *,
    sizes: Mapping[str, int] | None = None,
    strided: Collection[str] = (),
    aligned: Collection[str] = (),
) -> dict[str, int]:
    """Refuse tensors that a kernel does not take, and tell the sizes of those it does.

    Args:
        kernel: its name, for the sentence.
        specs: dtypes and dimensions by name.
        tensors: by the same names; all but the strided ones are contiguous.
        sizes: of dimensions that are known before.
        strided: names whose rows may lie apart.
        aligned: names whose address is a multiple of 16 bytes.

    Returns:
        The size of every symbol in the specs.

    Raises:
        UsageError: with what a tensor is and what would fit.
    """
    try:
        bound = schema.bind(specs, tensors, sizes, where=kernel)
    except InvalidCase as error:
        raise UsageError(str(error)) from error
    for name, tensor in tensors.items():
        _expect_layout(f"{kernel}.{name}", tensor, strided=name in strided)
        past = tensor.data_ptr() % _ALIGNMENT if name in aligned and tensor.numel() else 0
        if past:
            raise UsageError(
                f"{kernel}.{name} begins {past} bytes past a multiple of {_ALIGNMENT};"
                " the kernel wants it aligned"
            )
    _expect_device(kernel, tensors)
    return bound


def _expect_layout(name: str, tensor: Tensor, *, strided: bool) -> None:
    packed = tensor[:1].is_contiguous() if strided else tensor.is_contiguous()
    if not packed:
        want = "columns at stride 1" if strided else "it contiguous"
        raise UsageError(
            f"{name} {list(tensor.shape)} has strides {list(tensor.stride())};"
            f" the kernel wants {want}"
        )


def _expect_device(kernel: str, tensors: Mapping[str, Tensor]) -> None:
    (first, one), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != one.device:
            raise UsageError(f"{kernel}.{name} is on {tensor.device} and {first} on {one.device}")
    # Some kernels take any address for one of the device and end the process.
    if not one.is_cuda and torch.cuda.is_available():
        raise UsageError(f"{kernel}.{first} is on {one.device}; the kernel wants a CUDA device")
