"""Poisons: what fresh buffers hold, so that a cell nobody wrote can be seen; two of each kind."""

import torch
from torch import Tensor

from equivalence import layout
from refimpl.bits import as_int

INDEX = (-1_347_440_721, 2_122_219_134)
SCORE = (-1.2345e33, 6.789e32)
HALF = (-12345.0, 6789.0)
BYTE = (0x53, 0xA7)


def fill(tensor: Tensor, which: int) -> None:
    """Fill a buffer with one of the two poisons of its kind."""
    if (poison := of(tensor.dtype, which)) is not None:
        (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).fill_(poison)


def of(dtype: torch.dtype, which: int) -> float | None:
    """What fills a buffer of this kind, of one byte a value that byte; None where nothing does."""
    if dtype in (torch.int32, torch.int64):
        return INDEX[which]
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        return SCORE[which]
    if dtype is torch.float16:
        return HALF[which]
    return BYTE[which] if dtype.itemsize == 1 else None


def left(first: Tensor, second: Tensor) -> bool:
    """Whether some cell holds the first poison after one call and the second after the other."""
    held = [of(first.dtype, which) for which in (0, 1)]
    if None in held or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    every = BYTE[1]
    again = layout.pieces(layout.as_bytes(second))
    if (
        first.itemsize == 1
        and first.dtype is not torch.bool
        and all((x == every).all() for x in again)
    ):
        # A buffer that was handed out again holds nothing but the poison it was given since.
        return False
    cells = zip(*(layout.pieces(layout.as_bytes(t)) for t in (first, second)), strict=True)
    poisons = [_bits(value, first) for value in held if value is not None]
    return any(bool(((x == poisons[0]) & (y == poisons[1])).any()) for x, y in cells)


def _bits(poison: float, like: Tensor) -> Tensor:
    dtype = torch.uint8 if like.itemsize == 1 else like.dtype
    return as_int(torch.tensor(poison, dtype=dtype, device=like.device))


def holds(tensor: Tensor, *, which: int) -> bool:
    """Whether an output holds a poison anywhere."""
    poison = of(tensor.dtype, which)
    if poison is None:
        return False
    held = _bits(poison, tensor)
    return any(bool((piece == held).any()) for piece in layout.pieces(layout.as_bytes(tensor)))
