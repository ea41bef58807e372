"""Budgets of a recorder: how many files and bytes, what is held of them, what was left out."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from equivalence.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the calls so far.

    Attributes:
        calls: all of them; each that is over was written or left out.
        written: cases written.
        bytes: what their files hold.
        left_out: calls by reason: "every", "limit", "max_bytes", "raised", "capturing" (a CUDA
            graph), "interrupted", and "unreadable: ..." or "write: ..." with the sentence of the
            first such failure.
    """

    calls: int = 0
    written: int = 0
    bytes: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Budget:
    """The limits, what is used of them, and what is held for calls under way.

    Attributes:
        every: one call in so many is due, the first one first.
        limit: files at most.
        max_bytes: their bytes at most.
    """

    every: int = 1
    limit: int = 100
    max_bytes: int = 1 << 30
    _lock: Any = field(default_factory=threading.RLock, init=False)
    _calls: int = field(default=0, init=False)
    _written: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _files_held: int = field(default=0, init=False)
    _bytes_held: int = field(default=0, init=False)
    _left_out: Counter[str] = field(default_factory=Counter, init=False)
    _why: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Raise UsageError for a limit that is none."""
        for name, least in (("every", 1), ("limit", 0), ("max_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} is {value!r}; it is a whole number, {least} or more")

    def begin(self) -> tuple[int, str]:
        """Count a call: its number, and why it is left out where that is known at once."""
        with self._lock:
            number = self._calls
            self._calls += 1
            if number % self.every:
                return number, "every"
            return number, "limit" if self._written >= self.limit else ""

    def hold(self, size: int, held: int = 0) -> str:
        """Hold a file of `size` bytes in place of one of `held`, or say which limit forbids it."""
        with self._lock:
            if not held and self._written + self._files_held >= self.limit:
                return "limit"
            if self._bytes + self._bytes_held - held + size > self.max_bytes:
                return "max_bytes"
            self._files_held += not held
            self._bytes_held += size - held
            return ""

    def settle(self, held: int, *, size: int = 0, left_out: str = "") -> None:
        """Free what was held for a call, and count its file's size or why there is none."""
        with self._lock:
            self._files_held -= bool(held)
            self._bytes_held -= held
            if left_out:
                kind = left_out.partition(":")[0]
                self._left_out[kind] += 1
                self._why.setdefault(kind, left_out)
            else:
                self._written += 1
                self._bytes += size

    @property
    def counts(self) -> Counts:
        """What became of the calls so far."""
        with self._lock:
            return Counts(
                calls=self._calls,
                written=self._written,
                bytes=self._bytes,
                left_out={self._why[kind]: n for kind, n in self._left_out.items()},
            )
