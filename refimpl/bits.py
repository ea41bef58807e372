"""Bit patterns of scores and keys: integer views, total order, ulp distance, planar K pages."""

from typing import Literal

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
SCALE_BYTES = 4

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

ZeroSign = Literal["distinct", "equal"]
NanOrder = Literal["reject", "first", "last"]


def as_int(x: Tensor) -> Tensor:
    """View floats as integers of the same width; integers stay as they are, bool becomes uint8.

    Args:
        x: any shape. fp64 gives int64, fp32 int32, bf16 and fp16 int16, fp8 uint8.

    Returns:
        A view of the same storage and shape.
    """
    if x.dtype.is_floating_point or x.dtype is torch.bool:
        return x.view(_SIGNED[x.dtype.itemsize])
    return x


def order_key(
    scores: Tensor, *, zero_sign: ZeroSign = "distinct", nan: NanOrder = "reject"
) -> Tensor:
    """Map scores to int32 keys that sort as the IEEE 754 total order of their bits.

    Args:
        scores: fp32, bf16 or fp16, any shape.
        zero_sign: `equal` gives -0 the key of +0.
        nan: `first` puts every NaN above +inf as one class, `last` below -inf as one class;
            `reject` leaves NaNs where the total order has them (the caller rejects the row).

    Returns:
        int32 of the shape of `scores`; keys of one dtype and one setting compare with each other.

    Raises:
        ValueError: `scores` has another dtype, or a setting is unknown.
    """
    if scores.dtype not in _INFINITY:
        raise ValueError(f"scores are {scores.dtype}: order keys exist for fp32, bf16 and fp16")
    if zero_sign not in {"distinct", "equal"}:
        raise ValueError(f"zero_sign is {zero_sign!r}: it is 'distinct' or 'equal'")
    if nan not in {"reject", "first", "last"}:
        raise ValueError(f"nan is {nan!r}: it is 'reject', 'first' or 'last'")
    bits = as_int(scores).to(torch.int32)
    # The magnitude of a negative number sorts the other way round.
    key = bits ^ (bits >> 31 & torch.iinfo(as_int(scores).dtype).max)
    if zero_sign == "equal":
        key = torch.where(scores == 0, 0, key)
    above = _INFINITY[scores.dtype] + 1
    if nan == "first":
        key = torch.where(scores.isnan(), above, key)
    elif nan == "last":
        key = torch.where(scores.isnan(), ~above, key)
    return key


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Count the values from `b` up to `a` in the total order; -0 and +0 are one apart.

    Args:
        a: fp32, bf16 or fp16.
        b: the same dtype, broadcast against `a`.

    Returns:
        int64, negative where `a` lies below `b`.

    Raises:
        ValueError: the dtypes differ or have no order keys.
    """
    if a.dtype is not b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}: ulps need one dtype")
    return order_key(a).to(torch.int64) - order_key(b).to(torch.int64)


def split_planar_pages(kv_cache: Tensor, *, head_dim: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Split index-K pages, `page_size * head_dim` value bytes and then `page_size` fp32 scales.

    Args:
        kv_cache: uint8 [pages, page_size * (head_dim + 4)], or the same bytes in more dimensions
            such as [pages, page_size, 1, head_dim + 4].
        head_dim: bytes a key.
        page_size: keys a page.

    Returns:
        e4m3 [pages, page_size, head_dim] and fp32 [pages, page_size]: views of the cache wherever
        its strides and alignment allow one, else copies.

    Raises:
        ValueError: the cache is not uint8, or a page has another number of bytes.
    """
    pages = kv_cache.flatten(1)
    width = page_size * (head_dim + SCALE_BYTES)
    if kv_cache.dtype is not torch.uint8 or pages.shape[1] != width:
        raise ValueError(
            f"kv_cache is {kv_cache.dtype} with {pages.shape[1]} bytes a page: page_size "
            f"{page_size} and head_dim {head_dim} make uint8 pages of {width} bytes"
        )
    split = page_size * head_dim
    values = pages[:, :split].view(E4M3).view(pages.shape[0], page_size, head_dim)
    scales = pages[:, split:]
    if (scales.storage_offset() | scales.stride(0) | scales.data_ptr()) % SCALE_BYTES:
        scales = scales.clone(memory_format=torch.contiguous_format)
    return values, scales.view(torch.float32)
