"""Copies of tensors: strides kept, what shared memory shares it again, on the host in pieces."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivalence import layout
from equivalence.errors import InvalidCase

_ALIGN = 512
"""A copied stretch of memory begins at a multiple of so many bytes, as CUDA's allocator's do."""

_PIECE = 64 << 20
"""Bytes copied to the host at a time: a piece that is not packed is packed on its device first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stretch:
    """Bytes [start, end) of one storage, and the tensors that lie in them."""

    storage: tuple[str, int]
    start: int
    end: int
    tensors: tuple[Tensor, ...]


def cloned(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose tensors, lists and dicts are new, in tuples and dataclasses too.

    Strides are kept, and tensors whose bytes overlap or interleave share memory again.
    Anything else is the caller's own object.
    """
    copies: dict[int, Tensor] = {}
    for stretch in _stretches(tensors_in(args, kwargs)):
        copies |= _copied(stretch)

    def new(tensor: Tensor) -> Tensor:
        return copies[id(tensor)]

    memo: dict[int, Any] = {}
    fresh = [_mapped(each, new, memo) for each in args]
    return tuple(fresh), {name: _mapped(each, new, memo) for name, each in kwargs.items()}


def bytes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of memory that the tensors among the arguments reach; shared memory counts once."""
    return sum(stretch.end - stretch.start for stretch in _stretches(tensors_in(args, kwargs)))


@torch.no_grad()
def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, with its strides where a file can hold them."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if _keeps(tensor, 0):
        copied = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
    row = tensor[:1].numel() * tensor.element_size()
    step = max(1, _PIECE // max(1, row))
    cells, into = layout.as_bytes(tensor), layout.as_bytes(copied)
    for i in range(0, len(tensor), step):
        into[i : i + step].copy_(cells[i : i + step])
    return copied


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor the values of its copy by `cloned`, where cells share memory too."""
    if layout.overlaps(tensor.shape, tensor.stride()):
        reach = layout.extent(tensor.shape, tensor.stride())
        tensor, values = (each.as_strided((reach,), (1,)) for each in (tensor, values))
    layout.as_bytes(tensor).copy_(layout.as_bytes(values))


def storable(tensor: Tensor) -> Tensor:
    """The tensor, packed where its strides reach further than a file may say."""
    if _keeps(tensor, int(tensor.storage_offset())):
        return tensor
    return layout.as_bytes(tensor).contiguous().view(tensor.dtype)


def _keeps(tensor: Tensor, offset: int) -> bool:
    """Whether a file can hold the strides of a tensor."""
    try:
        layout.check({"stride": [*tensor.stride()], "offset": offset}, tensor.shape, tensor.dtype)
    except InvalidCase:
        return False
    return True


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor among the arguments, in lists, tuples, dicts and dataclasses too, once."""
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor)

    _mapped([*args, *kwargs.values()], keep, {})
    return list(found.values())


def _mapped(value: Any, change: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:  # noqa: ANN401 - any argument
    """The value with its tensors changed; a list, dict or dataclass met twice stays one."""
    if isinstance(value, Tensor):
        return change(value)
    if id(value) in memo:
        return memo[id(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return _refilled(value, change, memo)
    if isinstance(value, list | dict):
        fresh = memo[id(value)] = copy(value)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            fresh[key] = _mapped(each, change, memo)
        return fresh
    if isinstance(value, tuple):
        items = [_mapped(each, change, memo) for each in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else getattr(value, "_make", type(value))(items)
    return value


def _refilled(value: Any, change: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:  # noqa: ANN401 - any dataclass
    """A dataclass with the tensors of its fields changed, frozen or not."""
    fresh = memo[id(value)] = copy(value)
    held = {each.name: getattr(value, each.name, None) for each in fields(value)}
    new = {name: _mapped(old, change, memo) for name, old in held.items()}
    changed = {name: each for name, each in new.items() if each is not held[name]}
    for name, each in changed.items():
        object.__setattr__(fresh, name, each)
    memo[id(value)] = fresh if changed else value
    return memo[id(value)]


def _stretches(tensors: Sequence[Tensor]) -> list[_Stretch]:
    """The memory that tensors reach; those whose bytes overlap or interleave stand together."""
    found: list[_Stretch] = []
    alone = [_stretch(tensor, i) for i, tensor in enumerate(tensors)]
    for each in sorted(alone, key=lambda one: (one.storage, one.start)):
        last = found[-1] if found else None
        if last is None or each.storage != last.storage or each.start >= last.end:
            found.append(each)
        else:
            both = (*last.tensors, *each.tensors)
            found[-1] = replace(last, end=max(last.end, each.end), tensors=both)
    return found


def _stretch(tensor: Tensor, number: int) -> _Stretch:
    """The memory of one tensor; one that holds none or no plain one stands for itself."""
    size, device = tensor.element_size(), str(tensor.device)
    if tensor.layout is not torch.strided or not tensor.numel():
        end = tensor.numel() * size
        return _Stretch(storage=(device, -1 - number), start=0, end=end, tensors=(tensor,))
    first = tensor.storage_offset()
    return _Stretch(
        storage=(device, tensor.untyped_storage().data_ptr()),
        start=int(first) * size,
        end=layout.extent(tensor.shape, tensor.stride(), int(first)) * size,
        tensors=(tensor,),
    )


@torch.no_grad()
def _copied(stretch: _Stretch) -> dict[int, Tensor]:
    """A copy of each tensor of a stretch, by the id of the tensor."""
    first, *others = stretch.tensors
    if first.layout is not torch.strided:
        return {id(first): first.clone()}
    if not others and not layout.overlaps(first.shape, first.stride()):
        return {id(first): layout.clone(first)}
    start = stretch.start // _ALIGN * _ALIGN
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    whole.set_(first.untyped_storage(), start, (stretch.end - start,), (1,))
    memory = whole.clone().untyped_storage()
    copies = {}
    for tensor in stretch.tensors:
        offset = tensor.storage_offset() - start // tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies[id(tensor)] = view.set_(memory, offset, tensor.shape, tensor.stride())
    return copies
