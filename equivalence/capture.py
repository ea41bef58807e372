"""Record: a live function wrapped so that its calls are written as cases, unseen by its caller."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch

from equivalence import plain
from equivalence.candidate import name_of
from equivalence.case import JSON
from equivalence.errors import UsageError
from equivalence.live.budget import Budget, Counts
from equivalence.live.call import Reading
from equivalence.live.recorder import Recorder

__all__ = ("Counts", "Recorded", "Recorder", "record")


class Recorded:
    """A function whose calls are recorded; as a method it binds like the function it wraps."""

    def __init__(self, function: Callable[..., Any], recorder: Recorder) -> None:
        """Look like the function."""
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.recorder = recorder

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        """Call the function; its result and its exceptions are the caller's, untouched."""
        function, recorder = self.__wrapped__, self.recorder
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        one = recorder.before(function, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            recorder.raised(one)
            raise
        recorder.after(one, result)
        return result

    def __get__(self, owner: object, kind: type | None = None) -> Self | MethodType:
        """Bind as a function does."""
        return self if owner is None else MethodType(self, owner)

    @property
    def counts(self) -> Counts:
        """What became of the calls so far."""
        return self.recorder.counts


def record(
    fn: Callable[..., Any],
    *,
    op: str,
    to: Path | str,
    every: int = 1,
    limit: int = 100,
    max_bytes: int = 1 << 30,
    name: str | None = None,
    read: Callable[..., Mapping[str, Any]] | None = None,
    give: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
    names: Mapping[str, str] | None = None,
    inplace: Mapping[str, str] | None = None,
    params: Mapping[str, JSON] | None = None,
    arithmetic: str | None = None,
    contract: str | None = None,
) -> Recorded:
    """Wrap a function so that its calls are written as cases, one file a call.

    Inputs are copied before the call and outputs after it.
    The caller gets the function's own result and exceptions; what goes wrong here is counted.
    Calls inside a compiled function and while a CUDA graph is captured are not recorded.

    Args:
        fn: any callable, a method too.
        op: what it is called as.
        to: the folder of the files.
        every: record one call in so many.
        limit: files at most, by each process.
        max_bytes: their bytes at most, likewise.
        name: how the files begin; the function's name unless given.
        read: as in `Reading`, and so are the others.
        give: likewise.
        names: likewise.
        inplace: likewise.
        params: likewise.
        arithmetic: likewise.
        contract: likewise.

    Returns:
        The wrapped function; its `.counts` says what was written and what left out.

    Raises:
        UsageError: for an argument that is wrong whatever is called.
    """
    if not callable(fn):
        raise UsageError(f"record wraps a callable, not {type(fn).__name__}")
    reading = Reading(
        op=op,
        read=read,
        give=give,
        names=names or {},
        inplace=inplace or {},
        params=params or {},
        arithmetic=arithmetic,
        contract=contract,
    )
    own = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    recorder = Recorder(
        reading=reading,
        to=Path(to),
        name=own.rpartition(".")[2] if name is None else name,
        budget=Budget(every=every, limit=limit, max_bytes=max_bytes),
        provenance={"callable": plain.line(name_of(fn) or own)},
    )
    return Recorded(fn, recorder)
