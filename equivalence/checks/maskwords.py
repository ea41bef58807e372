"""Masks word by word: which rows differ, streamed, and what their columns hold."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from refimpl.blocks import row_blocks
from refimpl.forms import FAR_PAD
from refimpl.topk import PAD

_BYTE = 8
_PIECES = 4
"""Words for one cell of `row_blocks`: threads wait for each other at the end of every block."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def differing(*, want: Tensor, got: Tensor, visible: Tensor) -> Tensor:
    """Rows whose masks are not the same, read as they are and in memory of some MiB.

    Args:
        want: [B, ...] bool, packed uint8 or int32 block ids.
        got: [B, ...] in the same form, perhaps of another width.
        visible: [B], columns each row sees: no others are compared. Ids are compared as sets
            with pads -1 or INT32_MAX, whatever a row sees.

    Returns:
        bool [B].

    Raises:
        ValueError: the forms differ, or a row sees more columns than a mask has.
    """
    if want.dtype is not got.dtype or len(want) != len(got):
        raise ValueError(
            f"want is {want.dtype} {list(want.shape)} and got {got.dtype} {list(got.shape)}: "
            "masks of one form and as many rows are compared"
        )
    if got.dtype is torch.int32:
        return _other_ids(want, got)
    columns = _BYTE if got.dtype is torch.uint8 else 1
    width = min(want.shape[1], got.shape[1])
    most = int(visible.max()) if len(visible) else 0
    if most > width * columns:
        raise ValueError(f"the masks have {width * columns} columns: a row sees {most}")
    want, got = (mask.view(torch.uint8) for mask in (want, got))
    if want.stride(-1) != 1 or got.stride(-1) != 1:
        want, got = want.contiguous(), got.contiguous()
    # Words are as wide as both masks let them be.
    size = math.gcd(_BYTE, *(x for mask in (want, got) for x in _offsets(mask)))
    x, y = (mask.view(_WORDS[size]) for mask in (want, got))
    bits = visible.clamp(min=0).long() * (_BYTE // columns)
    whole, rest = bits // (_BYTE * size), bits % (_BYTE * size)
    out = torch.zeros(len(got), dtype=torch.bool, device=got.device)
    # A GPU waits for every block: it takes fewer and larger ones.
    pieces = _PIECES * (16 if got.is_cuda else 1)
    for rows in row_blocks(len(got), width // (size * pieces)):
        out[rows] = _other_words(x[rows], y[rows], whole[rows], rest[rows])
    return out


def _offsets(mask: Tensor) -> tuple[int, ...]:
    """Bytes that must be whole words, for the mask to be read in them."""
    return mask.shape[1], int(mask.stride(0)), int(mask.storage_offset()), mask.data_ptr()


def _other_words(want: Tensor, got: Tensor, whole: Tensor, rest: Tensor) -> Tensor:
    """Rows that differ in their first `whole` words, or in the `rest` lowest bits of the next."""
    low, high = int(whole.min()), int(whole.max())
    differ = torch.zeros(len(got), dtype=torch.bool, device=got.device)
    if not torch.equal(want[:, :high], got[:, :high]):
        if torch.equal(want[:, :low], got[:, :low]):
            want, got, whole = want[:, low:], got[:, low:], whole - low
        differ = _other_prefix(want, got, whole)
    if bool(rest.any()):
        at = whole.clamp(max=min(want.shape[1], got.shape[1]) - 1)[:, None]
        last = want.gather(1, at).long() ^ got.gather(1, at).long()
        # A little-endian word: its lowest bits are the first columns.
        differ |= (last[:, 0] & ((torch.ones_like(rest) << rest) - 1)) != 0
    return differ


def _other_prefix(want: Tensor, got: Tensor, whole: Tensor) -> Tensor:
    """Rows that differ in their first `whole` words: eight at a time, then the last few."""
    high = int(whole.max())
    words = want.new_zeros((len(got), -(-high // _BYTE) * _BYTE), dtype=torch.bool)
    torch.ne(want[:, :high], got[:, :high], out=words[:, :high])
    some = words.view(torch.int64) != 0
    eights = whole[:, None] // _BYTE
    differ = (some & (torch.arange(some.shape[1], device=got.device) < eights)).any(1)
    last = eights * _BYTE + torch.arange(_BYTE, device=got.device)
    near = words.gather(1, last.clamp(max=words.shape[1] - 1))
    return differ | (near & (last < whole[:, None])).any(1)


def _other_ids(want: Tensor, got: Tensor) -> Tensor:
    """Rows of ids that hold other blocks, or one of them another number of times."""
    out = torch.zeros(len(got), dtype=torch.bool, device=got.device)
    slots = max(want.shape[1], got.shape[1])
    for rows in row_blocks(len(got), slots):
        x, y = want[rows], got[rows]
        if x.shape == y.shape and torch.equal(x, y):
            continue
        x, y = (_sorted_ids(ids, slots) for ids in (x, y))
        out[rows] = (x != y).any(1)
    return out


def _sorted_ids(ids: Tensor, slots: int) -> Tensor:
    ids = functional.pad(ids, (0, slots - ids.shape[1]), value=FAR_PAD)
    return ids.masked_fill(ids == PAD, FAR_PAD).sort(1).values


def cells(mask: Tensor, *, columns: int) -> Tensor:
    """What the columns of a bool or packed mask hold, uint8 [r, columns]; 0 past its width."""
    held = mask.view(torch.uint8)
    if mask.dtype is torch.uint8:
        bit = torch.arange(_BYTE, dtype=torch.uint8, device=mask.device)
        held = (held[:, :, None] >> bit & 1).flatten(1)
    return functional.pad(held, (0, max(0, columns - held.shape[1])))[:, :columns]


def admitted(mask: Tensor, column: Tensor) -> Tensor:
    """Whether a bool or packed mask admits its columns int64 [r, k], bool [r, k]."""
    if mask.dtype is torch.bool:
        return mask.view(torch.uint8).gather(1, column) != 0
    return (mask.gather(1, column // _BYTE) >> (column % _BYTE).to(torch.uint8) & 1) != 0


def additive(tensor: Tensor) -> str:
    """One sentence where a float tensor holds 0 and -inf and nothing else, "" where it does not.

    Args:
        tensor: floats of any shape; read in pieces.
    """
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return ""
    zeros = dead = 0
    for rows in row_blocks(len(tensor), tensor[:1].numel()):
        zeros += int((tensor[rows] == 0).sum())
        dead += int(tensor[rows].isneginf().sum())
    if not zeros or not dead or zeros + dead < tensor.numel():
        return ""
    return "every value is 0 or -inf: a mask to be added to scores, not one that is applied to them"
