"""One call of a function on one rank, and what is told of it: a report of JSON and its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from equivalence import plain, receipt
from equivalence.replay import plain_of
from equivalence.world import parcel
from equivalence.world.link import Link
from equivalence.world.transport import Released, Silent

ONLY = "result"
"""The name of a tensor that is returned by itself."""


def run(
    function: Callable[..., Any],
    link: Link,
    *,
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    tag: str,
    named: bool = False,
) -> tuple[dict[str, Any], int | None]:
    """Call a function as a rank; never raises.

    Args:
        function: takes link, inputs and settings.
        link: of this rank.
        inputs: by name.
        settings: JSON values by name.
        tag: of the world.
        named: whether the outputs' memory keeps its name, as `parcel.pack` says.

    Returns:
        a report: `layout` of outputs and `paths`, else `rule` and `message`, and `released` where
        others failed.
        And the descriptor of the outputs' memory.
    """
    try:
        with receipt.collected() as left, torch.no_grad():
            result = function(link, **inputs, **settings)
        outputs = _named(result)
        if isinstance(outputs, str):
            return {"rule": "not-compared", "message": outputs}, None
        layout, handle = parcel.pack(outputs, tag=tag, named=named)
    # Whatever a function raises is its outcome: sys.exit(0) too, or the rank would end well.
    except BaseException as error:  # noqa: BLE001 - for that reason
        return failure(error), None
    return {"layout": layout, "paths": [asdict(each) for each in left]}, handle


def failure(error: BaseException) -> dict[str, Any]:
    """The report of what was raised on a rank."""
    for each in _chain(error):
        if isinstance(each, Released):
            return {"released": True, "rule": "crash", "message": ""}
        if isinstance(each, Silent):
            return {"rule": "timeout", "message": str(each)}
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return {"rule": "out-of-memory", "message": _first_line(error)}
    message = f"{type(error).__name__}: {_first_line(error)}{_where(error)}"
    return {"rule": "crash", "message": message}


def _named(result: object) -> dict[str, Tensor] | str:
    """The result by output name, or the sentence why it is none."""
    if result is None:
        return {}
    if isinstance(result, Tensor):
        result = {ONLY: result}
    if not isinstance(result, Mapping):
        return f"the function returned {type(result).__name__}: it returns tensors by name"
    for name, tensor in result.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            return plain.line(f"the function returned {name!r} ({what}): it returns tensors")
    try:
        return {name: plain_of(tensor) for name, tensor in result.items()}
    except TypeError as error:
        return f"the function's result cannot be read: {error}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those it was raised after."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _where(error: BaseException) -> str:
    """The innermost line of the traceback that is not of torch or of this package."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return plain.line(f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})") if frames else ""


def _first_line(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - the function's own exception may do anything
        text = ""
    return plain.line((text.splitlines() or ["no message"])[0])
