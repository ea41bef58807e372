"""What a scoring call scores: rows, the windows they see, and where the keys come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl.tiles import Keys, clip_windows

Columns = Literal["absolute", "row-relative"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Rows that see the same keys.

    Attributes:
        rows: which of the call.
        windows: of each row, its columns.
        keys: keys and scales of some columns.
        shift: the column that a row's cell 0 stands for; None where it is 0.
    """

    rows: slice
    windows: list[tuple[int, int]]
    keys: Keys
    shift: list[int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a call scores: its parts, and the width of its result."""

    parts: list[Part]
    width: int


def dense_plan(
    k: Tensor,
    k_scale: Tensor | None,
    row_start: Tensor,
    row_end: Tensor,
    *,
    columns: Columns,
    width: int | None,
) -> Plan:
    """What `mqa_logits` scores, or a ValueError where its windows do not fit its width."""
    expect("row_end", row_end, torch.int32, row_start.shape, "row_start")
    if columns not in {"absolute", "row-relative"}:
        raise ValueError(f"columns is {columns!r}: it is 'absolute' or 'row-relative'")
    windows = clip_windows(row_start, row_end, k.shape[0])
    shift = [start if columns == "row-relative" else 0 for start, _ in windows]
    cells = k.shape[0] if width is None else width
    needed = max((end - base for (_, end), base in zip(windows, shift, strict=True)), default=0)
    if needed > cells:
        raise ValueError(f"width is {cells}: the {columns} windows need {needed} cells")

    def keys(c0: int, c1: int) -> tuple[Tensor, Tensor | None]:
        return k[c0:c1], None if k_scale is None else k_scale[c0:c1]

    rows = slice(0, len(windows))
    return Plan(parts=[Part(rows=rows, windows=windows, keys=keys, shift=shift)], width=cells)


def paged_plan(
    values: Tensor,
    scales: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    shape: tuple[int, int],
) -> Plan:
    """What `paged_mqa_logits` scores of pages [pages, page_size, ...], for q of this shape."""
    batch, next_n = shape
    expect("context_lens", context_lens, torch.int32, shape, "q")
    expect("block_table", block_table, torch.int32, (batch, block_table.shape[-1]), "q")
    columns = block_table.shape[1] * values.shape[1]
    parts = [
        Part(
            rows=slice(request * next_n, (request + 1) * next_n),
            windows=clip_windows(torch.zeros_like(lens), lens, columns),
            keys=_paged_keys(values, scales, block_table[request], "block_table"),
        )
        for request, lens in enumerate(context_lens)
    ]
    return Plan(parts=parts, width=columns)


def qsa_plan(
    values: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None,
    *,
    rows: int,
    page_size: int,
) -> Plan:
    """What `qsa_logits` scores of pages [pages, page_size, D], for `rows` queries."""
    if values.shape[1] != page_size:
        raise ValueError(f"k_cache has {values.shape[1]} keys a page and page_size is {page_size}")
    expect("visible_blocks", visible_blocks, torch.int32, (rows,), "q")
    bounds = [0, rows] if query_start_loc is None else query_start_loc.tolist()
    if len(bounds) != page_table.shape[0] + 1 or bounds[0] != 0 or bounds[-1] != rows:
        raise ValueError(
            f"query_start_loc is {bounds}: page_table has {page_table.shape[0]} requests and q "
            f"{rows} rows, so it takes one more entry than requests, from 0 to the rows"
        )
    columns = page_table.shape[1] * page_size
    parts = []
    for request, table in enumerate(page_table):
        mine = slice(bounds[request], bounds[request + 1])
        visible = visible_blocks[mine]
        windows = clip_windows(torch.zeros_like(visible), visible, columns)
        keys = _paged_keys(values, None, table, "page_table")
        parts.append(Part(rows=mine, windows=windows, keys=keys))
    return Plan(parts=parts, width=columns)


def _paged_keys(values: Tensor, scales: Tensor | None, table: Tensor, name: str) -> Keys:
    pages, page_size = values.shape[:2]

    def keys(c0: int, c1: int) -> tuple[Tensor, Tensor | None]:
        first = c0 // page_size
        wanted = table[first : -(-c1 // page_size)].long()
        strange = wanted[(wanted < 0) | (wanted >= pages)]
        if strange.numel():
            raise ValueError(
                f"{name} has page {int(strange[0])} inside a window: the cache has {pages} pages"
            )
        inside = slice(c0 - first * page_size, c1 - first * page_size)
        # fp8 has no index_select on every device: gather its bytes.
        rows = values.view(torch.uint8)[wanted].view(values.dtype).flatten(0, 1)[inside]
        return rows, None if scales is None else scales[wanted].flatten(0, 1)[inside]

    return keys


def expect(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], of: str) -> None:
    """Raise a ValueError unless `x` has the dtype and shape that `of` makes it have."""
    if x.dtype is not dtype or tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)}: {of} makes it {dtype} {list(shape)}"
        )
