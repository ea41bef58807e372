"""The tensors of every op as data: dtypes and dimensions by name, and whether they fit together.

A dimension is a number, a symbol bound by the first tensor that has it, or a product "B*n".
Rows are T, or B*n where requests of n query tokens each stand together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from equivalence.errors import InvalidCase

Dim: TypeAlias = int | str

DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Every dtype a case may hold, by its name in a safetensors header."""

_MAY_BE_EMPTY = frozenset(
    (
        *("T", "L", "B", "R", "P", "B*n", "R+1", "pages", "slots", "width"),
        *("blocks", "lc", "cells", "ids", "rows", "m", "S"),
    )
)
"""Dimensions that may be 0; others say how a value is made and cannot be."""


class Shaped(Protocol):
    """A tensor, or what a file's header says of one."""

    @property
    def shape(self) -> tuple[int, ...] | torch.Size: ...  # noqa: D102 - a tensor's

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102 - likewise


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like.

    Attributes:
        dtypes: names out of DTYPES.
        dims: its dimensions.
        optional: whether a case may leave it out.
    """

    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The tensors and parameters of one op.

    Attributes:
        inputs: by keyword.
        outputs: the stages that can be judged.
        params: required parameters, by keyword.
        defaults: optional ones and what they are when absent.
        rows: the symbol of the row dimension; "rows" is the parameter of that name.
        whole: whether a call cannot be cut into calls of fewer rows.
        caches: inputs that a call may change and hand back, by the output that they are then.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    params: Mapping[str, type] = field(default_factory=dict)
    defaults: Mapping[str, int | str | None] = field(default_factory=dict)
    rows: Dim = "T"
    whole: bool = False
    caches: Mapping[str, str] = field(default_factory=dict)


def bind(
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Shaped],
    sizes: Mapping[str, int] | None = None,
    *,
    where: str = "inputs",
) -> dict[str, int]:
    """The size of every symbol, where all tensors fit their specs and each other.

    Raises:
        InvalidCase: in one sentence that names the tensor, what it is and what would fit.
    """
    names = DTYPES
    # Tensors still in a file are known by their header.
    tensors = getattr(tensors, "stubs", tensors)
    bound = dict(sizes or {})
    for name in tensors:
        if name not in specs:
            raise InvalidCase(f"{where}.{name} is not one of the op's tensors: {', '.join(specs)}")
    for name, spec in specs.items():
        if name not in tensors:
            if spec.optional:
                continue
            raise InvalidCase(f"{where}.{name} is missing")
        tensor = tensors[name]
        if not isinstance(getattr(tensor, "dtype", None), torch.dtype):
            raise InvalidCase(f"{where}.{name} is a {type(tensor).__name__}, not a torch tensor")
        if isinstance(tensor, Tensor) and (tensor.is_meta or tensor.layout is not torch.strided):
            what = f"a {tensor.layout} tensor on {tensor.device}"
            raise InvalidCase(f"{where}.{name} is {what}: it holds no plain values")
        if tensor.dtype not in [names[dtype] for dtype in spec.dtypes]:
            dtype = str(tensor.dtype).removeprefix("torch.")
            fit = " or ".join(str(names[d]).removeprefix("torch.") for d in spec.dtypes)
            raise InvalidCase(f"{where}.{name} is {dtype}; the op wants {fit}")
        _bind_shape(f"{where}.{name}", tuple(tensor.shape), spec.dims, bound)
    return bound


def _bind_shape(
    name: str, shape: tuple[int, ...], dims: tuple[Dim, ...], bound: dict[str, int]
) -> None:
    """Bind the symbols of one tensor, or say which of its dimensions does not fit."""
    want = ", ".join(map(str, dims))
    if len(shape) != len(dims):
        raise InvalidCase(f"{name} has shape {list(shape)}; the op wants [{want}]")
    for axis, (size, dim) in enumerate(zip(shape, dims, strict=True)):
        if size == 0 and dim not in _MAY_BE_EMPTY:
            raise InvalidCase(f"{name} has shape {list(shape)}; {dim} in [{want}] cannot be 0")
        known = _size(dim, bound)
        if known is None and isinstance(dim, str) and dim.isidentifier():
            bound[dim] = size
        elif known is not None and known != size:
            raise InvalidCase(
                f"{name} has shape {list(shape)}; the op wants [{want}]"
                f" with {dim} = {known}, not {size}, in dimension {axis}"
            )


def _size(dim: Dim, bound: Mapping[str, int]) -> int | None:
    """A dimension's size where its symbols are known."""
    if isinstance(dim, int):
        return dim
    if "*" in dim:
        factors = [bound[symbol] for symbol in dim.split("*") if symbol in bound]
        return prod(factors) if len(factors) == dim.count("*") + 1 else None
    if dim.endswith("+1"):
        base = bound.get(dim[:-2])
        return None if base is None else base + 1
    return bound.get(dim)


def whole_requests(rows: Tensor, *, next_n: int) -> Tensor:
    """The rows, completed to all next_n rows of every request they touch."""
    if next_n == 1:
        return rows
    touched = rows // next_n
    every = torch.unique(touched)
    # Each request where it is first touched: in the order asked for.
    first = torch.full_like(every, len(touched))
    place = torch.searchsorted(every, touched)
    first.scatter_reduce_(0, place, torch.arange(len(touched), device=rows.device), "amin")
    requests: Tensor = every[first.argsort()]
    return (requests[:, None] * next_n + torch.arange(next_n, device=rows.device)).reshape(-1)
