"""Path receipts: which kernel really ran, so that a silent fallback shows; no torch here."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Argument: TypeAlias = "str | int | float | bool | None"

_MOST = 16
_Key: TypeAlias = "tuple[str, str, str, tuple[tuple[str, Argument], ...]]"
_OPEN: ContextVar[MutableMapping[_Key, "Receipt"] | None] = ContextVar("receipts", default=None)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One way into a kernel, and how often it was taken.

    Attributes:
        kernel: its importable name, as in "deep_gemm.fp8_mqa_logits".
        version: of its distribution, or "".
        arch: "sm90", "cpu", or "" where it does not matter.
        arguments: what chose the way: flags and sizes that stay the same from call to call.
        rows: the different row counts it was called with, the first 16 in order.
        calls: how often it was called.
    """

    kernel: str
    version: str = ""
    arch: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    calls: int = 1

    def of(self, name: str) -> bool:
        """Whether this is the kernel of that name, or one of the module of that name."""
        return self.kernel == name or self.kernel.startswith(f"{name}.")


def leave(
    kernel: str, *, rows: int, version: str = "", arch: str = "", **arguments: Argument
) -> None:
    """Say that a kernel is called now; nothing happens where nobody collects.

    Args:
        kernel: its importable name.
        rows: query rows of this call.
        version: of its distribution.
        arch: of the device it runs on.
        arguments: flags and sizes worth telling.
    """
    held = _OPEN.get()
    if held is None:
        return
    key = (kernel, version, arch, tuple(sorted(arguments.items())))
    known = held.get(key)
    if known is None:
        held[key] = Receipt(
            kernel=kernel, version=version, arch=arch, arguments=arguments, rows=(rows,)
        )
        return
    seen = known.rows
    if rows not in seen and len(seen) < _MOST:
        seen = (*seen, rows)
    held[key] = replace(known, rows=seen, calls=known.calls + 1)


@contextmanager
def collected() -> Iterator[list[Receipt]]:
    """Collect what is left inside; the list is filled when the block ends, however it ends."""
    held: dict[_Key, Receipt] = {}
    told: list[Receipt] = []
    token = _OPEN.set(held)
    try:
        yield told
    finally:
        _OPEN.reset(token)
        told.extend(held.values())
