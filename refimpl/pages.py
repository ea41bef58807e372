"""From picked columns to KV slots: page tables, slot maps, offsets, and the key rows of pages."""

import torch
from torch import Tensor

from refimpl import bits
from refimpl.topk import PAD


def translate_pages(
    *,
    raw_indices: Tensor,
    page_table: Tensor,
    page_size: int,
    row_to_request: Tensor | None = None,
) -> Tensor:
    """`page_table[request, raw // ps] * ps + raw % ps`; a pad stays a pad.

    Args:
        raw_indices: [T, k] int32, request-local columns, pads -1.
        page_table: [R, pages] int32, physical page of each logical page.
        page_size: keys a page; 1 makes the table a map from position to slot.
        row_to_request: [T] int32, the table row of each query; without it row i reads table row i.

    Returns:
        [T, k] int32 physical slots.

    Source: SGLang `V/metadata.py:45-51`, vLLM `transform_index_page_table`.
    """
    table = page_table if row_to_request is None else page_table[row_to_request.long()]
    valid = raw_indices != PAD
    raw = torch.where(valid, raw_indices, 0).long()
    page = table.gather(1, raw // page_size).long()
    return torch.where(valid, page * page_size + raw % page_size, PAD).int()


def map_slots(*, raw_indices: Tensor, row_start: Tensor, slot_map: Tensor) -> Tensor:
    """`slot_map[row_start + raw]`: slots of a flattened K whose every column has its own.

    Args:
        raw_indices: [T, k] int32 relative to row_start, pads -1.
        row_start: [T] int32, the request's first column.
        slot_map: [L] int32 or int64 slot of each column.

    Returns:
        [T, k] int32 physical slots.
    """
    valid = raw_indices != PAD
    column = torch.where(valid, raw_indices + row_start[:, None], 0).long()
    return torch.where(valid, slot_map[column].long(), PAD).int()


def offset_indices(*, raw_indices: Tensor, topk_indices_offset: Tensor) -> Tensor:
    """`raw + offset[row]`: rows of a gathered KV; raw is relative to the row's start, pads -1.

    Args:
        raw_indices: [T, k] int32.
        topk_indices_offset: [T] int32, its own tensor and not row_start.

    Returns:
        [T, k] int32.
    """
    valid = raw_indices != PAD
    return torch.where(valid, raw_indices + topk_indices_offset[:, None], PAD).int()


def gather_keys(
    *, kv_cache: Tensor, block_table: Tensor, length: int, page_size: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """The first `length` keys of one request out of planar pages.

    Args:
        kv_cache: uint8 [pages, page_size * (head_dim + 4)]: all values, then all fp32 scales.
        block_table: [pages of the request] int32.
        length: keys to gather.
        page_size: keys a page.
        head_dim: bytes of a key.

    Returns:
        e4m3 [length, head_dim] and fp32 [length].
    """
    used = block_table[: -(-length // page_size)].long()
    values, scales = bits.split_planar_pages(kv_cache[used], head_dim=head_dim, page_size=page_size)
    return values.reshape(-1, head_dim)[:length], scales.reshape(-1)[:length]
