"""Candidates that are wrong in one way each, named on command lines of tests."""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from equivalence.paths.chunked import original
from refimpl.topk import ragged_topk

_MASKS = ("mask", "block_ids")
_BUFFER = torch.zeros(4, 8, dtype=torch.int32)
_CALLS: list[int] = []


def right(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """The reference itself."""
    return ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)


def without_mask(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a layer's keywords
    """A consumer that picks outside its mask too."""
    return original(**{name: value for name, value in call.items() if name not in _MASKS})


def prints(**call: Any) -> Tensor:  # noqa: ANN401 - a candidate's keywords
    """Right, and talkative."""
    print("{ no JSON }")  # noqa: T201 - that is the point
    return right(**call)


def same_buffer(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Right at its first call; its second overwrites what the first handed out."""
    _CALLS.append(1)
    _BUFFER.copy_(right(**call) if len(_CALLS) % 2 else torch.full_like(_BUFFER, 3))
    return _BUFFER


def raises(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """Raise with a text that would clear the screen and add a line."""
    raise RuntimeError("lost\x1b[2J\x07 it\nEQUAL")


def exits(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """End the process as if all were well."""
    sys.exit(0)


def cancelled(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """Raise what is no Exception."""
    raise asyncio.CancelledError


def unspeakable(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """Raise what cannot be turned into text."""

    class Mute(Exception):  # noqa: N818 - a name for one test
        def __str__(self) -> str:
            raise ValueError

    raise Mute


def starves(**_: Any) -> NoReturn:  # noqa: ANN401 - likewise
    """Run out of memory."""
    raise MemoryError


def nothing(**_: Any) -> None:  # noqa: ANN401 - likewise
    """Return nothing."""


def empty(**_: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
    """Return no output."""
    return {}


def generator(**call: Any) -> Iterator[Tensor]:  # noqa: ANN401 - likewise
    """Yield instead of returning."""
    yield right(**call)


def misnamed(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - likewise
    """Name an output that the op has not."""
    return {"picks\x1b[31m": right(**call)}


def no_tensor(**call: Any) -> dict[str, object]:  # noqa: ANN401 - likewise
    """Return lists."""
    return {"raw_indices": right(**call).tolist()}


class _Broken(Mapping[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(["raw_indices"])

    def __len__(self) -> int:
        return 1


def broken_mapping(**_: Any) -> Mapping[str, Tensor]:  # noqa: ANN401 - likewise
    """Return a mapping that raises."""
    return _Broken()


def on_meta(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return a tensor without values."""
    return right(**call).to("meta")


def sparse(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return a sparse tensor."""
    return right(**call).to_sparse()


def hides(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return a tensor that only looks as if it had values."""
    from torch._subclasses.fake_tensor import (  # noqa: PLC0415 - slow to import
        FakeTensorMode,
    )

    picks = right(**call)
    return FakeTensorMode().from_tensor(picks)


class _Agreeable(Tensor):
    """Says that it equals everything."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - torch's hook
        types: Any,  # noqa: ANN401 - torch's hook
        args: Any = (),  # noqa: ANN401 - torch's hook
        kwargs: Any = None,  # noqa: ANN401 - torch's hook
    ) -> Any:  # noqa: ANN401 - torch's hook
        if getattr(func, "__name__", "") in {"equal", "eq", "__eq__", "ne", "__ne__"}:
            return True
        return super().__torch_function__(func, (), args, kwargs or {})  # type: ignore[no-untyped-call]  # torch has no type for it


def agreeable(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return wrong picks in a tensor that claims to equal everything."""
    return right(**call).flip(1).as_subclass(_Agreeable)


def wide_integers(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return int64."""
    return right(**call).long()


def too_narrow(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return half of the slots."""
    return right(**call)[:, :4]


def scalar(**_: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return one number."""
    return torch.tensor(1, dtype=torch.int32)


def of_nan(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return NaN."""
    return torch.full_like(right(**call), 0, dtype=torch.float32) / 0


def view_of_input(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return a part of its input."""
    values: Tensor = call["scores"]
    return values[:, :8].view(torch.int32)


def writes(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Right, and its input is changed."""
    picks = right(**call)
    call["scores"][0, 5] = 0.25
    return picks


def resizes(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Right, and its input has another shape."""
    picks = right(**call)
    call["scores"].resize_(2)
    return picks


def unwritten(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Leave its last row as the memory came."""
    picks = right(**call)
    out = torch.empty_like(picks)
    out[:-1] = picks[:-1]
    return out
