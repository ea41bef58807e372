"""A recorder: calls that were read, written as cases of a folder within a budget."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from equivalence import plain, store
from equivalence.case import JSON, Case
from equivalence.errors import InvalidCase, UsageError
from equivalence.live import call, clones
from equivalence.live.budget import Budget, Counts
from equivalence.live.call import Reading

_HEADER = 8192
"""Bytes of a file beside its tensors and its provenance, at most."""

_ESCAPED = 8
"""Bytes that a character of the provenance takes in a header, at most."""

_MOST_NAME = 80
_NUMBERS = count()


@dataclass(kw_only=True, eq=False)
class Call:
    """One call under way.

    Attributes:
        number: how many came before it.
        left_out: why it is left out, or "".
        held: bytes of the budget held for it.
        case: what is written of it.
        arguments: by name, where outputs are read from them.
    """

    number: int
    left_out: str
    held: int = 0
    case: Case | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorder:
    """Writes calls as cases and counts what it leaves out; threads may share it.

    None of its functions raises anything but an interrupt.

    Attributes:
        reading: how calls are read.
        to: the folder; it is made when the first case is written.
        name: how its files begin; characters that could steer a path are replaced.
        budget: what it may write, in this process.
        provenance: said in every case.
    """

    reading: Reading
    to: Path
    name: str
    budget: Budget = field(default_factory=Budget)
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """What became of the calls so far."""
        return self.budget.counts

    def save(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, JSON],
        recorded: Sequence[Mapping[str, Tensor]],
        **about: str,
    ) -> Path | None:
        """Write a call whose tensors are there already.

        Args:
            inputs: as they were before the call, by their names in the op.
            params: by their names in the op.
            recorded: the outputs of one run an entry.
            about: said in the case's provenance.

        Returns:
            The file; None where the call was left out.
        """
        one = self._begin()
        with self._ours(one, "unreadable"):
            if not one.left_out:
                self._read(one, inputs, params, recorded, about)
        return self._write(one)

    def before(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """Copy the inputs of a call to the host's memory, where it is to be written.

        Args:
            function: what is called next.
            args: its positional arguments.
            kwargs: its keywords.

        Returns:
            What `after` or `raised` is to be told.
        """
        one = self._begin()
        if one.left_out:
            return one
        with self._ours(one, "unreadable"):
            # To wait for the device would break the capture of a graph.
            if _capturing():
                one.left_out = "capturing"
                return one
            inputs, params = call.inputs_of(self.reading, function, args, kwargs)
            case = self._read(one, inputs, params)
            if self.reading.inplace or self.reading.give:
                one.arguments = call.arguments_of(function, args, kwargs)
            if self._hold(one, case):
                copies = {name: clones.on_host(tensor) for name, tensor in case.inputs.items()}
                one.case = replace(case, inputs=copies)
        return one

    def after(self, one: Call, result: object) -> Path | None:
        """Write a call that returned; the file, or None where it is left out."""
        if one.left_out:
            self._settle(one)
            return None
        with self._ours(one, "unreadable"):
            if one.case is not None:
                outputs = call.outputs_of(self.reading, result, one.arguments)
                self._read(one, one.case.inputs, one.case.params, [outputs])
        return self._write(one)

    def raised(self, one: Call) -> None:
        """Count a call that raised."""
        one.left_out = "raised"
        self._settle(one)

    def _begin(self) -> Call:
        number, left_out = self.budget.begin()
        return Call(number=number, left_out=left_out)

    def _read(
        self,
        one: Call,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, JSON],
        recorded: Sequence[Mapping[str, Tensor]] = (),
        about: Mapping[str, str] | None = None,
    ) -> Case:
        """The case of a call, with where it came from: nothing that names the machine."""
        rank = os.environ.get("RANK")
        words = {"call": str(one.number), "torch": str(torch.__version__)}
        words |= {} if rank is None else {"rank": plain.line(rank, most=_MOST_NAME)}
        words |= {**self.provenance, **(about or {})}
        one.case = call.case_of(self.reading, inputs, params, recorded=recorded, provenance=words)
        return one.case

    def _hold(self, one: Call, case: Case) -> bool:
        """Hold the bytes of a case's file; False where the budget forbids it."""
        size = _size(case)
        one.left_out = self.budget.hold(size, one.held)
        one.held = one.held if one.left_out else size
        return not one.left_out

    def _write(self, one: Call) -> Path | None:
        """Write a call's case unless it is left out; either way the call is over."""
        path, size = None, 0
        with self._ours(one, "write"), torch.no_grad():
            if one.case is not None and not one.left_out and self._hold(one, one.case):
                path, size = _put(one.case, self.to, self.name)
        self._settle(one, size)
        return path

    def _settle(self, one: Call, size: int = 0) -> None:
        self.budget.settle(one.held, size=size, left_out=one.left_out)

    @contextmanager
    def _ours(self, one: Call, kind: str) -> Iterator[None]:
        """Keep a failure of ours from the caller; an interrupt passes, and is counted."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the engine's call goes on whatever we meet
            one.left_out = f"{kind}: {_reason(error)}"
        except BaseException:
            one.left_out = "interrupted"
            self._settle(one)
            raise


def _capturing() -> bool:
    """Whether a CUDA graph is being captured on this stream."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    return bool(started) and torch.cuda.is_current_stream_capturing()


def _size(case: Case) -> int:
    """Bytes that the case's file takes at most."""
    tensors = [t for entry in (case.inputs, *case.recorded) for t in entry.values()]
    letters = sum(len(key) + len(word) for key, word in case.provenance.items())
    values = sum(prod(t.shape) * t.element_size() for t in tensors)
    return _HEADER + _ESCAPED * letters + values


def _put(case: Case, folder: Path, name: str) -> tuple[Path, int]:
    """Write the case to a file of its own that only its owner may read; the file and its bytes."""
    case = replace(
        case,
        inputs={one: clones.storable(t) for one, t in case.inputs.items()},
        recorded=tuple(
            {one: clones.storable(t) for one, t in entry.items()} for entry in case.recorded
        ),
    )
    words = (_word(name) or case.op, _word(os.environ.get("RANK", "")), str(os.getpid()))
    stem = "-".join(word for word in words if word)
    folder.mkdir(parents=True, exist_ok=True)
    # A file is open to others while it is written; this folder is not.
    with TemporaryDirectory(dir=folder, prefix=".", ignore_cleanup_errors=True) as place:
        part = Path(place, "case")
        store.save(case, part)
        part.chmod(0o600)
        size = part.stat().st_size
        # An earlier process may have had this number.
        paths = (folder / f"{stem}-{number:06d}{store.SUFFIX}" for number in _NUMBERS)
        path = next(path for path in paths if not path.exists())
        part.replace(path)
    return path, size


def _word(text: str) -> str:
    """The text without what could steer a path."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text)[:_MOST_NAME].strip("._")


def _reason(error: Exception) -> str:
    """One line on a failure of ours."""
    if isinstance(error, OSError) and error.strerror:
        return plain.line(error.strerror)
    known = isinstance(error, UsageError | InvalidCase)
    return plain.line(error) if known else call.said(error)
