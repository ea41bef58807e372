"""Forms of a published mask: bool, packed bits and block ids, read and written row by row.

The dtype names the form.
*bool* [rows, lc]: True where a column of the row's window may be picked.
*packed* uint8 [rows, ceil(lc / 8)]: bit j % 8 of byte j // 8 is column j, the lowest bit first.
*block ids* int32 [rows, n]: `unordered` with pads -1, or `ascending` with pads INT32_MAX.
Columns count from the row's start. Those past `visible` are dead: never read, written False.
"""

from typing import Literal

import torch
from torch import Tensor

from refimpl.blocks import BLOCK, block_counts, row_blocks
from refimpl.topk import PAD

Form = Literal["bool", "packed", "unordered", "ascending"]
FAR_PAD = torch.iinfo(torch.int32).max

_BYTE = 8
_PADS = {"unordered": PAD, "ascending": FAR_PAD}
_DTYPES = {"bool": torch.bool, "packed": torch.uint8} | dict.fromkeys(_PADS, torch.int32)


def form_bytes(
    *, rows: int, columns: int, topk_blocks: int, block_size: int = BLOCK
) -> dict[Form, int]:
    """Bytes of a mask: 16K rows of 1M columns are 16 GiB of bool, 2 GiB packed, 128 MiB as ids."""
    ids = rows * min(topk_blocks, -(-columns // block_size)) * torch.int32.itemsize
    packed = rows * -(-columns // _BYTE)
    return {"bool": rows * columns, "packed": packed, "unordered": ids, "ascending": ids}


def aligned(*, visible: Tensor, align: int = BLOCK) -> int:
    """Columns of a mask: those of the longest row, rounded up to a multiple."""
    most = int(visible.max().clamp(min=0)) if len(visible) else 0
    return -(-most // align) * align


def empty(*, form: Form, rows: int, columns: int, ids: int, device: torch.device) -> Tensor:
    """A mask that admits nothing; `ids` is the width of the id forms.

    Raises:
        ValueError: the form is unknown.
    """
    if form not in _DTYPES:
        raise ValueError(f"form is {form!r}: known are {', '.join(_DTYPES)}")
    width = {"bool": columns, "packed": -(-columns // _BYTE)}.get(form, ids)
    return torch.full((rows, width), _PADS.get(form, 0), dtype=_DTYPES[form], device=device)


def read(
    mask: Tensor, *, visible: Tensor, columns: int, first: int = 0, block_size: int = BLOCK
) -> Tensor:
    """Which columns some rows may pick, whatever the form.

    Args:
        mask: [r, ...] in any form.
        visible: [r] int32, columns each row sees; below zero counts as none.
        columns: width of the result, no row sees more.
        first: number of the first row, for messages.
        block_size: columns a block, of ids.

    Returns:
        bool [r, columns], False past `visible`.

    Raises:
        ValueError: the mask has another dtype or number of rows, or fewer columns than a row sees,
            or a live bool byte other than 0 and 1, or an id out of range or twice in a row.
    """
    if mask.dim() != 2 or len(mask) != len(visible):  # noqa: PLR2004 - rows and columns
        raise ValueError(
            f"mask is {list(mask.shape)}: {len(visible)} rows have a mask of 2 dimensions"
        )
    live = torch.arange(columns, device=mask.device) < visible[:, None]
    if mask.dtype in {torch.bool, torch.uint8}:
        each = 1 if mask.dtype is torch.bool else _BYTE
        _expect_columns(mask.shape[1] * each, visible, first)
        mask = mask[:, : -(-columns // each)]
    if mask.dtype is torch.int32:
        kept = read_ids(mask, visible=visible, first=first, block_size=block_size)
        return _spread(kept, columns, block_size) & live
    if mask.dtype not in {torch.bool, torch.uint8}:
        raise ValueError(f"mask is {mask.dtype}: a mask is bool, packed uint8 or int32 block ids")
    held = mask.view(torch.uint8)
    if mask.dtype is torch.uint8:
        bit = torch.arange(_BYTE, dtype=torch.uint8, device=mask.device)
        held = (held[:, :, None] >> bit & 1).flatten(1)
    held = torch.nn.functional.pad(held, (0, max(0, columns - held.shape[1])))[:, :columns]
    if mask.dtype is torch.bool:
        odd = (held > 1) & live
        if odd.any():
            row, column = odd.nonzero()[0].tolist()
            raise ValueError(
                f"mask row {first + row} holds byte {int(held[row, column])} at column {column}: "
                "a bool is 0 or 1"
            )
    return (held == 1) & live


def read_ids(mask: Tensor, *, visible: Tensor, first: int = 0, block_size: int = BLOCK) -> Tensor:
    """Which blocks id rows [r, n] hold, bool [r, blocks of the longest row]; errors of `read`."""
    counts = block_counts(visible=visible, block_size=block_size)
    held = (mask != PAD) & (mask != FAR_PAD)
    strange = held & ((mask < 0) | (mask >= counts[:, None]))
    if strange.any():
        row, slot = strange.nonzero()[0].tolist()
        raise ValueError(
            f"mask row {first + row} has block {int(mask[row, slot])} in slot {slot}: its "
            f"{int(visible[row])} columns make {int(counts[row])} blocks"
        )
    width = int(counts.max()) if len(counts) else 0
    # Pads go to one column past the blocks.
    found = torch.zeros(len(mask), width + 1, dtype=torch.int32, device=mask.device)
    found.scatter_add_(1, torch.where(held, mask, width).long(), held.int())
    if (found > 1).any():
        row, block = (found > 1).nonzero()[0].tolist()
        one, two = (mask[row] == block).nonzero().flatten()[:2].tolist()
        raise ValueError(f"mask row {first + row} has block {block} in slots {one} and {two}")
    return found[:, :width] > 0


def write(
    out: Tensor,
    admitted: Tensor,
    *,
    visible: Tensor,
    form: Form,
    first: int = 0,
    block_size: int = BLOCK,
) -> None:
    """Write which columns rows may pick into rows of an `empty` mask.

    Args:
        out: [r, width] of the form.
        admitted: bool [r, columns], False past visible.
        visible: [r] int32.
        form: of out.
        first: number of the first row, for messages.
        block_size: columns a block, of ids.

    Raises:
        ValueError: ids are asked of a mask that admits a block in part, or out is too narrow.
    """
    if form == "bool":
        out.copy_(admitted)
    elif form == "packed":
        bit = torch.arange(_BYTE, dtype=torch.uint8, device=out.device)
        octets = _blocked(admitted, _BYTE).view(torch.uint8)
        out.copy_((octets << bit).sum(2, dtype=torch.uint8))
    else:
        kept = whole_blocks(admitted, visible=visible, first=first, block_size=block_size)
        write_ids(out, kept, first=first)


def write_blocks(
    out: Tensor, kept: Tensor, *, visible: Tensor, columns: int, form: Form, block_size: int = BLOCK
) -> None:
    """Write the blocks bool [r, B] that rows keep into rows of an `empty` mask of any form."""
    if form in _PADS:
        write_ids(out, kept)
    else:
        live = torch.arange(columns, device=kept.device) < visible[:, None]
        write(out, _spread(kept, columns, block_size) & live, visible=visible, form=form)


def write_ids(out: Tensor, kept: Tensor, *, first: int = 0) -> None:
    """Write the blocks bool [r, B] that rows keep into pads int32 [r, n], in ascending order.

    Raises:
        ValueError: a row keeps more than n.
    """
    counts = kept.sum(1)
    if len(kept) and int(counts.max()) > out.shape[1]:
        row = int((counts > out.shape[1]).nonzero()[0])
        raise ValueError(
            f"mask row {first + row} holds {int(counts[row])} blocks: ids have {out.shape[1]} slots"
        )
    at, block = kept.nonzero().unbind(1)
    out[at, kept.cumsum(1)[at, block] - 1] = block.int()


def whole_blocks(
    admitted: Tensor, *, visible: Tensor, first: int = 0, block_size: int = BLOCK
) -> Tensor:
    """Which blocks rows admit: bool [r, B]; the part of a block past `visible` says nothing.

    Raises:
        ValueError: a row admits a block in part.
    """
    live = torch.arange(admitted.shape[1], device=admitted.device) < visible[:, None]
    inside, outside = (_blocked(x & live, block_size) for x in (admitted, ~admitted))
    some = inside.any(2)
    parted = some & outside.any(2)
    if parted.any():
        row, block = parted.nonzero()[0].tolist()
        seen = min(block_size, int(visible[row]) - block * block_size)
        raise ValueError(
            f"mask row {first + row} admits {int(inside[row, block].sum())} of the {seen} columns "
            f"of block {block}: ids hold whole blocks"
        )
    return some


def convert(
    mask: Tensor,
    *,
    visible: Tensor,
    form: Form,
    columns: int | None = None,
    ids: int | None = None,
    block_size: int = BLOCK,
) -> Tensor:
    """The same mask in another form.

    Args:
        mask: [rows, ...] in any form.
        visible: [rows] int32, columns each row sees.
        form: of the result; ids stand in ascending order in both id forms.
        columns: lc of the result; the mask's own, or from ids the longest row's rounded up to 8.
        ids: slots of an id form; the mask's own, or as many as its fullest row holds.
        block_size: columns a block.

    Raises:
        ValueError: what `read`, `write` and `empty` raise, or a row sees more than `columns`.
    """
    if columns is None:
        own = mask.shape[1] * {torch.bool: 1, torch.uint8: _BYTE}.get(mask.dtype, 0)
        columns = own or aligned(visible=visible)
    _expect_columns(columns, visible, 0)
    if ids is None:
        ids = mask.shape[1]
        if form in _PADS and mask.dtype is not torch.int32:
            ids = _fullest(mask, visible, columns, block_size)
    out = empty(form=form, rows=len(mask), columns=columns, ids=ids, device=mask.device)
    for rows in row_blocks(len(mask), columns):
        seen, first = visible[rows], rows.start
        admitted = read(
            mask[rows], visible=seen, columns=columns, first=first, block_size=block_size
        )
        write(out[rows], admitted, visible=seen, form=form, first=first, block_size=block_size)
    return out


def _fullest(mask: Tensor, visible: Tensor, columns: int, block_size: int) -> int:
    most = 0
    for rows in row_blocks(len(mask), columns):
        seen, first = visible[rows], rows.start
        admitted = read(mask[rows], visible=seen, columns=columns, first=first)
        kept = whole_blocks(admitted, visible=seen, first=first, block_size=block_size)
        most = max(most, int(kept.sum(1).max()))
    return most


def _spread(kept: Tensor, columns: int, block_size: int) -> Tensor:
    wide: Tensor = kept.repeat_interleave(block_size, dim=1)
    return torch.nn.functional.pad(wide, (0, max(0, columns - wide.shape[1])))[:, :columns]


def _blocked(cells: Tensor, size: int) -> Tensor:
    """Bool [r, columns] as [r, ceil(columns / size), size], the last block filled up with False."""
    wide = torch.nn.functional.pad(cells, (0, -cells.shape[1] % size))
    return wide.view(len(cells), wide.shape[1] // size, size)


def _expect_columns(columns: int, visible: Tensor, first: int) -> None:
    short = visible > columns
    if short.any():
        row = int(short.nonzero()[0])
        raise ValueError(f"mask has {columns} columns: row {first + row} sees {int(visible[row])}")
