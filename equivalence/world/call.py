"""One call of a function on one rank, and what is told of it: a report of JSON and its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence import plain, receipt
from equivalence.replay import first_line, plain_of, where
from equivalence.world import parcel
from equivalence.world.link import Link
from equivalence.world.transport import Gone, Released, Silent

ONLY = "result"
"""The name of a tensor that is returned by itself."""


class NoOutputs(TypeError):  # noqa: N818 - what a function returned
    """A function returned something else than tensors."""


def run(
    function: Callable[..., Any],
    link: Link,
    *,
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], int | None]:
    """Call a function as a rank; never raises.

    Args:
        function: takes link, inputs and settings.
        link: of this rank.
        inputs: by name.
        settings: JSON values by name.

    Returns:
        a report: `layout` of outputs and `paths`, else `rule` and `message`, and `released` where
        others failed.
        And the descriptor of the outputs' memory.
    """
    try:
        made, left = outputs(function, link, inputs=inputs, settings=settings)
        layout, handle = parcel.pack(made)
    # Whatever a function raises is its outcome: sys.exit(0) too, or the rank would end well.
    except BaseException as error:  # noqa: BLE001 - for that reason
        return failure(error), None
    return {"layout": layout, "paths": [asdict(each) for each in left]}, handle


def outputs(
    function: Callable[..., Any],
    link: Link,
    *,
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> tuple[dict[str, Tensor], list[receipt.Receipt]]:
    """What a function returns, by name, and the receipts that it left.

    Raises:
        NoOutputs: it returns something else than tensors.
    """
    with receipt.collected() as left, torch.no_grad():
        result = function(link, **inputs, **settings)
    return _named(result), list(left)


def failure(error: BaseException, *, place: bool = True) -> dict[str, Any]:
    """The report of what was raised on a rank.

    Args:
        error: as it was raised.
        place: whether the message says in which line.
    """
    for each in _chain(error):
        if isinstance(each, Released):
            return {"released": True, "rule": "crash", "message": ""}
        if isinstance(each, Silent):
            return {"rule": "timeout", "message": str(each), "rank": each.rank}
        if isinstance(each, Gone):
            return {"rule": "crash", "message": str(each), "rank": each.rank}
    if isinstance(error, NoOutputs):
        return {"rule": "not-compared", "message": str(error)}
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return {"rule": "out-of-memory", "message": first_line(error)}
    line = where(error, within=Path(__file__).parent) if place else ""
    message = f"{type(error).__name__}: {first_line(error)}{line}"
    return {"rule": "crash", "message": message}


def _named(result: object) -> dict[str, Tensor]:
    """The result by output name.

    Raises:
        NoOutputs: it is none.
    """
    if result is None:
        return {}
    if isinstance(result, Tensor):
        result = {ONLY: result}
    if not isinstance(result, Mapping):
        what = type(result).__name__
        raise NoOutputs(f"the function returned {what}: it returns tensors by name")
    for name, tensor in result.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            message = f"the function returned {name!r} ({what}): it returns tensors"
            raise NoOutputs(plain.line(message))
    try:
        return {name: plain_of(tensor) for name, tensor in result.items()}
    except TypeError as error:
        raise NoOutputs(f"the function's result cannot be read: {error}") from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those it was raised after."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
