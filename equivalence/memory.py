"""What a call holds beyond its inputs and outputs: the CUDA allocator's count, or tracked tensors.

Peak bytes are live bytes: what tensors hold, rounded as the allocator rounds.
On a CPU there is no such count, so every storage that a torch operation hands out is followed
until it is gone; scratch inside one operation, and what other threads do, is not seen.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from equivalence import layout
from equivalence.verdict import Memory


@dataclass(kw_only=True)
class Meter:
    """What was measured once the block has ended.

    Attributes:
        peak: most bytes alive at once beyond those alive before.
        live: bytes alive at the end beyond those alive before.
        reserved: most bytes the caching allocator took from the device beyond those before;
            None where there is no such allocator.
        how: what counted.
        seen: ids of the storages that came in the block and are alive at the end; None where the
            count does not tell them apart.
    """

    peak: int = 0
    live: int = 0
    reserved: int | None = None
    how: str = "tracked tensors"
    seen: frozenset[int] | None = None

    def fresh(self, outputs: Iterable[Tensor]) -> int | None:
        """Bytes that outputs reach of storages of the block; None where nobody knows."""
        if self.seen is None:
            return None
        return sum(size for key, size in _reached(outputs).items() if key in self.seen)

    def of(self, outputs: int, fresh: int | None = None) -> Memory:
        """The figures of a call whose results hold `outputs` bytes, `fresh` of them new.

        Where that is not known, as many are taken to be new as are alive.
        """
        new = min(outputs if fresh is None else fresh, self.live)
        return Memory(
            transient=self.peak - new,
            retained=self.live - new,
            outputs=outputs,
            reserved=self.reserved,
            how=self.how,
        )


class _Tracked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch asks for a subclass
    """Follows every storage that operations hand out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.sizes: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.live = self.peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile a candidate under this mode, as it would without it."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's hook
        types: Any,  # noqa: ANN401 - torch's hook
        args: Any = (),  # noqa: ANN401 - torch's hook
        kwargs: Any = None,  # noqa: ANN401 - torch's hook
    ) -> Any:  # noqa: ANN401 - torch's hook
        del types
        before = {id(s): s.nbytes() for s in map(_storage, _tensors((args, kwargs)))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._see(tensor.untyped_storage(), before)
        return out

    def _see(self, storage: torch.UntypedStorage, before: dict[int, int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self.sizes:
            if before.get(key, -1) >= size:  # an argument's, which the caller holds
                return
            weakref.finalize(storage, self._gone, key)
            self.before[key] = before.get(key, 0)
        known = self.sizes.get(key, 0)
        self.sizes[key] = size - self.before[key]
        self.live += self.sizes[key] - known
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)
        self.before.pop(key, None)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and _is_plain(leaf))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


@contextmanager
def measured(device: torch.device | None) -> Iterator[Meter]:
    """Measure what the block allocates on `device`; the CUDA peak counter starts again at it."""
    meter = Meter()
    if device is None or device.type != "cuda":
        mode = _Tracked()
        try:
            with mode:
                yield meter
        finally:
            meter.peak, meter.live = mode.peak, mode.live
            meter.seen = frozenset(k for k in mode.sizes if not mode.before[k])
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    live, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    meter.how = "cuda allocator"
    try:
        yield meter
    finally:
        meter.peak = torch.cuda.max_memory_allocated(device) - live
        meter.live = torch.cuda.memory_allocated(device) - live
        meter.reserved = torch.cuda.max_memory_reserved(device) - reserved


def bytes_of(outputs: Iterable[Tensor], *, given: Iterable[Tensor]) -> int:
    """Bytes that outputs reach of storages that are not those of tensors the call was given.

    A small view of a large workspace is a small output.
    """
    known = {id(tensor.untyped_storage()) for tensor in given}
    return sum(size for key, size in _reached(outputs).items() if key not in known)


def _reached(outputs: Iterable[Tensor]) -> dict[int, int]:
    """By storage, the bytes from the first to the last that each tensor reaches."""
    reached: dict[int, int] = {}
    for tensor in outputs:
        storage = tensor.untyped_storage()
        own = layout.extent(tensor.shape, tensor.stride()) * tensor.element_size()
        reached[id(storage)] = min(storage.nbytes(), reached.get(id(storage), 0) + own)
    return reached
