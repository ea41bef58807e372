"""One gather over a table of addresses, in Triton: what a direct fill reads with on a GPU."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from equivalence.engines import found
from equivalence.errors import UsageError

KERNEL = "equivalence.engines.pointer_kernel"
_BLOCK = 1024
_KEPT = 256
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def available(device: torch.device) -> bool:
    """Whether `gather` runs on this device."""
    if device.type != "cuda":
        return False
    try:
        found.module(KERNEL, how="it is a part of this package")
    except UsageError:
        return False
    return True


def addresses(parts: Sequence[Tensor]) -> Tensor:
    """The table of these tensors, int64 [n], where the first one is."""
    return _table(tuple(part.data_ptr() for part in parts), parts[0].device)


def gather(
    *, table: Tensor, source: Tensor, row: Tensor, out: Tensor, slots: Tensor | None = None
) -> None:
    """Copy a page for each read: page row[i] at the address table[source[i]] to out[slots[i]].

    Args:
        table: int64 [n], addresses of pages that lie one after another, each a multiple of 16.
        source: int64 [m], a place in `table`; -1 gives zeros.
        row: int64 [m].
        out: u8 [S, page_bytes], contiguous.
        slots: int64 [m], where pages go; None for 0 to m - 1.

    Raises:
        UsageError: tensors are of other dtypes or shapes, or triton is not here.
    """
    if slots is None:
        slots = torch.arange(len(source), device=source.device)
    for name, tensor in (("table", table), ("source", source), ("row", row), ("slots", slots)):
        if tensor.dtype is not torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            told = f"{tensor.dtype} {list(tensor.shape)}"
            raise UsageError(f"{name} is {told}: it is contiguous int64 of one dimension")
    if out.dtype is not torch.uint8 or out.dim() != 2 or not out.is_contiguous():  # noqa: PLR2004
        raise UsageError(f"out is {out.dtype} {list(out.shape)}: it is contiguous u8 [S, bytes]")
    if not len(source) == len(row) == len(slots) <= len(out):
        raise UsageError(
            f"{len(source)} sources, {len(row)} rows and {len(slots)} slots are not one a page "
            f"of {len(out)}"
        )
    kernel: Any = found.module(KERNEL, how="it is a part of this package").gather_words
    if not len(source) or not out.numel():
        return
    words = out.view(_word(out))
    grid = (len(source), -(-words.shape[1] // _BLOCK))
    kernel[grid](table, source, row, slots, words, words.shape[1], BLOCK=_BLOCK)


class Gather:
    """The gather of a rank's peers, `Peers.gather`, in one launch however many pointers there are.

    Tables are kept by the addresses in them, and reads joined by the reads themselves: a plan has
    one of each for all of its layers.
    """

    def __init__(self) -> None:
        """Begin with nothing kept."""
        self._table = lru_cache(_KEPT)(_table)
        self._joined = lru_cache(_KEPT)(_joined)

    def __call__(self, table: Sequence[Tensor], reads: Sequence[Any], out: Tensor) -> None:
        """Fetch pages through a table of pointers, as `paths.ipc.moves.gather`.

        Args:
            table: u8 [rows, page_bytes] each, contiguous.
            reads: with source, slots and rows each, hashed by which they are.
            out: u8 [at least S, page_bytes].
        """
        if not reads:
            return
        places = self._table(tuple(part.data_ptr() for part in table), out.device)
        source, row, slots = self._joined(tuple(reads))
        gather(table=places, source=source, row=row, slots=slots, out=out)


def _table(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on a device."""
    return torch.tensor(places, dtype=torch.int64, device=device)


def _joined(reads: Sequence[Any]) -> tuple[Tensor, ...]:
    """Sources, rows and slots of all reads, one after another."""
    sources = [torch.full_like(read.rows, read.source) for read in reads]
    rows, slots = [read.rows for read in reads], [read.slots for read in reads]
    return tuple(torch.cat(each) for each in (sources, rows, slots))


def _word(out: Tensor) -> torch.dtype:
    """The widest word that a page is made of."""
    return next(
        dtype
        for dtype in _WORDS
        if not out.shape[1] % dtype.itemsize and not out.data_ptr() % dtype.itemsize
    )
