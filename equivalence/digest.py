"""Digests: of a tensor's bytes in a file, and of the reference's scores inside their windows."""

from collections.abc import Mapping

import xxhash
from torch import Tensor

from equivalence import layout


def of_bytes(data: bytes | memoryview) -> str:
    """XXH3-128 of some bytes, in hex: integrity, not authenticity."""
    return xxhash.xxh3_128_hexdigest(data)


def of_tensor(tensor: Tensor) -> str:
    """XXH3-128 of a tensor's values in row-major order."""
    return of_bytes(_flat(tensor))


class Rows:
    """The digest of scores that arrive block by block; only cells inside the windows count."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._hash = xxhash.xxh3_128()
        self._cells = 0

    def add(self, scores: Tensor, first: Tensor, count: Tensor) -> None:
        """Add a block [B, W] whose windows are [first, first + count)."""
        for row, begin, cells in zip(scores, first.tolist(), count.tolist(), strict=True):
            self._hash.update(_flat(row[begin : begin + cells]))
            self._cells += cells

    def result(self) -> Mapping[str, str]:
        """By output, as a case stores it; empty where nothing was added."""
        return {"logits": self._hash.hexdigest()} if self._cells else {}


def _flat(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    flat = layout.flat_bytes(tensor).cpu()
    return memoryview(flat.numpy().data) if flat.numel() else memoryview(b"")
