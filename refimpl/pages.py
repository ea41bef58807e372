"""From picked columns to KV slots: page tables, slot maps, offsets, and the keys of pages."""

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


def gather_batch(
    *, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, page_size: int = 64
) -> dict[str, Tensor]:
    """The keys of every request out of planar pages, request after request.

    SGLang `dsa_index_k_cache` gather, vLLM `cp_gather_indexer_k_quant_cache`.

    Args:
        kv_cache: uint8 [pages, page_size * (D + 4)], or the same bytes in more dimensions.
        block_table: [B, table] int32, pages of each request.
        seq_lens: [B] int32, keys of each request; below zero counts as none.
        page_size: keys a page.

    Returns:
        `values` e4m3 [sum of seq_lens, D] and `k_scale` fp32 [sum of seq_lens].

    Raises:
        ValueError: the bytes of a page are not those of page_size keys, or a request has more keys
            than its pages hold or a page that is not in the cache.
    """
    width = kv_cache.flatten(1).shape[1]
    if page_size < 1 or width // page_size <= bits.SCALE_BYTES:
        raise ValueError(f"kv_cache has {width} bytes a page: they hold no {page_size} keys")
    if len(seq_lens) != len(block_table):
        raise ValueError(f"seq_lens has {len(seq_lens)} requests, block_table {len(block_table)}")
    values, scales = bits.split_planar_pages(
        kv_cache, head_dim=width // page_size - bits.SCALE_BYTES, page_size=page_size
    )
    request, position = batch_positions(seq_lens)
    room = block_table.shape[1] * page_size
    if bool((position >= room).any()):
        short = int(request[position >= room][0])
        raise ValueError(
            f"request {short} has {int(seq_lens[short])} keys: "
            f"{block_table.shape[1]} pages of {page_size} hold {room}"
        )
    page = block_table[request, position // page_size].long()
    strange = (page < 0) | (page >= len(kv_cache))
    if bool(strange.any()):
        i = int(strange.nonzero()[0])
        raise ValueError(
            f"request {int(request[i])} has page {int(page[i])}: the cache has {len(kv_cache)}"
        )
    token = position % page_size
    # fp8 has no index_select on every device: gather its bytes.
    keys = values.view(torch.uint8)[page, token].view(values.dtype)
    return {"values": keys, "k_scale": scales[page, token]}


def batch_positions(seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The request of each gathered key and its position there, both int64 [sum of seq_lens]."""
    lens = seq_lens.clamp(min=0).long()
    requests = torch.arange(len(lens), device=lens.device)
    request = requests.repeat_interleave(lens)
    first = lens.cumsum(0) - lens
    return request, torch.arange(len(request), device=lens.device) - first[request]


def move_tokens(
    *, kv_cache: Tensor, source: Tensor, destination: Tensor, page_size: int = 64, pad: int = 0
) -> Tensor:
    """The pages after tokens were moved in them; every source is read before any token is written.

    A location is `page * page_size + token`, and a token is its key and its scale.
    SGLang `IndexKeyCache.move`, on which accepted draft tokens go to their places: the right side
    of its assignment is gathered first, and lists of locations end in zeros, which are padding
    (speculative/spec_utils.py, `move_accept_tokens_to_target_kvcache`).

    Args:
        kv_cache: uint8 [pages, page_size * (D + 4)], or the same bytes in more dimensions.
        source: [m] int32 or int64, the location each token is read from; one may repeat.
        destination: [m] of the same kind, where it is written; no two are the same.
        page_size: keys a page.
        pad: what stands in both lists where nothing is moved.

    Returns:
        uint8 of the shape of `kv_cache`, in memory of its own.

    Raises:
        ValueError: see `refuse_moves`.
    """
    where = {"source": source, "destination": destination}
    refuse_moves(kv_cache=kv_cache, **where, page_size=page_size, pad=pad)
    cache = kv_cache.flatten(1)
    out = cache.clone(memory_format=torch.contiguous_format)
    held = {name: location[source != pad] for name, location in where.items()}
    copy_tokens(out, cache, **held, page_size=page_size)
    return out.view(kv_cache.shape)


def refuse_moves(
    *, kv_cache: Tensor, source: Tensor, destination: Tensor, page_size: int, pad: int
) -> None:
    """Raise ValueError, with the numbers of the moves, where `move_tokens` has no one answer.

    The lists differ in length, the bytes of a page are not those of page_size keys, padding stands
    on one side alone, a location is none of the cache, or two tokens go to one.
    """
    if source.shape != destination.shape or source.dim() != 1:
        shapes = f"{list(source.shape)} and destination {list(destination.shape)}"
        raise ValueError(f"source is {shapes}: one location a move")
    width = kv_cache.flatten(1).shape[1]
    if page_size < 1 or width % page_size or width // page_size <= bits.SCALE_BYTES:
        raise ValueError(f"kv_cache has {width} bytes a page: they hold no {page_size} keys")
    room = len(kv_cache) * page_size
    for move in ((source == pad) != (destination == pad)).nonzero()[:1, 0].tolist():
        way = f"from {int(source[move])} to {int(destination[move])}"
        raise ValueError(f"move {move} goes {way}: padding ({pad}) is on both sides or on none")
    for what, location in (("reads", source), ("writes", destination)):
        strange = (location != pad) & ((location < 0) | (location >= room))
        for move in strange.nonzero()[:1, 0].tolist():
            raise ValueError(
                f"move {move} {what} token {int(location[move])}: "
                f"{len(kv_cache)} pages of {page_size} hold {room}"
            )
    order = destination.argsort(stable=True)
    to = destination[order]
    for at in ((to[1:] == to[:-1]) & (to[1:] != pad)).nonzero()[:1, 0].tolist():
        one, two = order[at : at + 2].tolist()
        raise ValueError(f"moves {one} and {two} both go to token {int(to[at])}")


def copy_tokens(
    out: Tensor, cache: Tensor, *, source: Tensor, destination: Tensor, page_size: int
) -> None:
    """Write tokens of uint8 pages [*, bytes] into others of as many bytes, all read before."""
    width = cache.shape[1]
    read = cache[token_bytes(source, page_size=page_size, width=width)]
    out[token_bytes(destination, page_size=page_size, width=width)] = read


def token_bytes(location: Tensor, *, page_size: int, width: int) -> tuple[Tensor, Tensor]:
    """The pages [n, 1] and bytes [n, D + 4] of tokens in planar pages of `width` bytes, int64."""
    at, head_dim = location.long()[:, None], width // page_size - bits.SCALE_BYTES
    page, token = at // page_size, at % page_size
    byte = torch.arange(width // page_size, device=at.device)
    scale = page_size * head_dim + token * bits.SCALE_BYTES + byte - head_dim
    return page, torch.where(byte < head_dim, token * head_dim + byte, scale)


def pack_keys(*, values: Tensor, scale: Tensor, page_size: int = 64) -> Tensor:
    """Planar pages of keys in order: of each page all values, then all fp32 scales.

    Args:
        values: e4m3 [L, D].
        scale: fp32 [L].
        page_size: keys a page.

    Returns:
        uint8 [ceil(L / page_size), page_size * (D + 4)], zeros where the last page has no key.

    Raises:
        ValueError: dtypes or lengths do not fit.
    """
    if values.dtype is not bits.E4M3 or scale.dtype is not torch.float32:
        raise ValueError(f"values are {values.dtype} and scale {scale.dtype}: e4m3 and float32")
    if scale.shape != values.shape[:1]:
        raise ValueError(f"scale is {list(scale.shape)}: there are {len(values)} keys")
    length, head_dim = values.shape
    pages = -(-length // page_size)
    cache = torch.zeros(
        pages, page_size, head_dim + bits.SCALE_BYTES, dtype=torch.uint8, device=values.device
    )
    cache.flatten(0, 1)[:length, :head_dim] = values.view(torch.uint8)
    cache.flatten(0, 1)[:length, head_dim:] = scale[:, None].contiguous().view(torch.uint8)
    planes = cache[..., :head_dim].flatten(1), cache[..., head_dim:].flatten(1)
    return torch.cat(planes, 1)
