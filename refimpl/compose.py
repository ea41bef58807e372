"""Page composition under context parallelism: the dense buffer that every rank must hold.

Ranks each have some pages of the KV cache and compute some of the new tokens. What they read from
each other, through collectives or peer memory, must come to the bytes of this one process.
"""

import torch
from torch import Tensor

from refimpl import batch as batches
from refimpl import refusals
from refimpl.batch import NOTHING, Batch, Limits
from refimpl.bits import SCALE_BYTES, as_int

KINDS = ("token", "index")
"""Token KV has its bytes of a token together; index K has a page's keys, then its fp32 scales."""


def planes(kind: str, token_bytes: int) -> tuple[int, ...]:
    """How many bytes of a token stand together, part by part, in a page of this kind.

    Raises:
        ValueError: there is no such kind, or an index token has no byte beside its scale.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: it is {' or '.join(KINDS)}")
    if kind == "token":
        return (token_bytes,)
    if token_bytes <= SCALE_BYTES:
        raise ValueError(f"an index token of {token_bytes} bytes has no key beside its scale")
    return (token_bytes - SCALE_BYTES, SCALE_BYTES)


def write_rows(
    pages: Tensor, *, rows: Tensor, locations: Tensor, kind: str, page_size: int
) -> None:
    """Put tokens into the pages where they belong, in place, byte by byte.

    Args:
        pages: u8 [..., S, page_bytes].
        rows: u8 [..., n, token_bytes], the same leading dimensions.
        locations: int [n], slot * page_size + offset of each token.
        kind: one of KINDS.
        page_size: tokens a page.
    """
    slot, offset = locations.long() // page_size, locations.long() % page_size
    first = 0
    for width in planes(kind, rows.shape[-1]):
        plane = pages[..., first * page_size : (first + width) * page_size]
        cells = plane.view(*plane.shape[:-1], page_size, width)
        cells[..., slot, offset, :] = rows[..., first : first + width]
        first += width


def compose_pages(
    *,
    pools: Tensor,
    rows: Tensor,
    slot_pages: Tensor,
    owner: Tensor,
    local_page: Tensor,
    writer: Tensor,
    prefix_lens: Tensor,
    extend_lens: Tensor,
    cp: int,
    kind: str,
    page_size: int = 64,
    pool_group: int = 1,
    staging_pages: int | None = None,
    max_tokens: int | None = None,
    max_requests: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The dense buffer of every layer: prefix pages, current pages, zeros for padding.

    A current page holds zeros where no new token stands; a carried one holds its owner's bytes.

    Args:
        pools: u8 or e4m3 [layers, cp, pool pages, page_bytes], what each rank has of each layer;
            pool page 0 is a dummy.
        rows: the same dtype [layers, T, token_bytes], the current tokens, request by request.
        slot_pages: int32 [S], see `batch.Batch`, as the next ones.
        owner: int32 [N].
        local_page: int32 [N].
        writer: int32 [T].
        prefix_lens: int32 [R].
        extend_lens: int32 [R].
        cp: ranks.
        kind: "token" or "index".
        page_size: tokens a page.
        pool_group: pages that a row of the index pool stands for.
        staging_pages: current pages that may be staged at most, see `batch.Limits`, as the next.
        max_tokens: new tokens that are admitted at most.
        max_requests: requests likewise.
        out: u8 [layers, S, page_bytes] to compose in; fresh memory when None.

    Returns:
        [layers, S, page_bytes] of the dtype of pools; every rank must hold the same.

    Raises:
        ValueError: the batch may not be composed, or its tensors do not fit each other.

    Source: a fork's context-parallel shared KV for GLM-5.1; see docs/families/compose.md.
    """
    step = Batch(
        slot_pages=slot_pages,
        owner=owner,
        local_page=local_page,
        writer=writer,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        cp=cp,
        page_size=page_size,
        pool_group=pool_group,
    )
    limits = Limits(staging_pages=staging_pages, max_tokens=max_tokens, max_requests=max_requests)
    if why := unfit(step, pools=pools, rows=rows, kind=kind):
        raise ValueError(why)
    refusals.refuse(step, pool_pages=pools.shape[2], limits=limits)
    return composed(step, pools=pools, rows=rows, kind=kind, out=out)


def composed(
    step: Batch, *, pools: Tensor, rows: Tensor, kind: str, out: Tensor | None = None
) -> Tensor:
    """As `compose_pages`, of a batch that may be composed: nothing is asked again.

    Args:
        step: see `refusals.refuse`.
        pools: u8 or e4m3 [layers, cp, pool pages, page_bytes], as the next ones in `compose_pages`.
        rows: the same dtype [layers, T, token_bytes].
        kind: "token" or "index".
        out: u8 [layers, S, page_bytes] to compose in; fresh memory when None.

    Returns:
        [layers, S, page_bytes] of the dtype of pools.

    Raises:
        ValueError: out has another shape.
    """
    held, tokens = as_int(pools), as_int(rows)
    shape = (len(held), len(step.slot_pages), held.shape[-1])
    dense = held.new_empty(shape) if out is None else as_int(out)
    if dense.shape != shape:
        raise ValueError(f"out is {list(dense.shape)}: the dense buffer is {list(shape)}")
    page = step.slot_pages.long().clamp(min=NOTHING)
    fresh = page == NOTHING
    now = batches.current_slots(step)
    # A carried prefix runs alone: its page is the first current one and begins as its owner's.
    fresh[now[1:] if bool(batches.carried_tokens(step).any()) else now] = True
    place, read = torch.zeros_like(page), page[~fresh]
    place[~fresh] = step.owner.long()[read] * held.shape[2] + step.local_page.long()[read]
    for pool, pages in zip(*_words(held.flatten(1, 2), dense), strict=True):
        torch.index_select(pool, 0, place, out=pages)
    dense.index_fill_(1, fresh.nonzero()[:, 0], 0)
    locations = batches.row_locations(step)
    write_rows(dense, rows=tokens, locations=locations, kind=kind, page_size=step.page_size)
    return dense.view(pools.dtype)


def written(step: Batch, *, pools: Tensor, rows: Tensor, kind: str) -> Tensor:
    """Pools after a step: its tokens stand in their pages at the owners, the rest stays.

    Args:
        step: may be composed.
        pools: u8 [layers, cp, pool pages, page_bytes].
        rows: u8 [layers, T, token_bytes].
        kind: "token" or "index".
    """
    now = batches.current_slots(step)
    page = step.slot_pages[now].long()
    rank, local = step.owner[page].long(), step.local_page[page].long()
    pages = pools[:, rank, local]
    locations = batches.row_locations(step).long()
    slot = torch.searchsorted(now, locations // step.page_size)
    at = slot * step.page_size + locations % step.page_size
    write_rows(pages, rows=rows, locations=at, kind=kind, page_size=step.page_size)
    after = pools.clone()
    after[:, rank, local] = pages
    return after


def _words(*parts: Tensor) -> tuple[Tensor, ...]:
    """The same memory as int64 where all of its pages are whole words: they move faster."""
    whole = all(
        pages.is_contiguous() and not (pages.shape[-1] % 8 or pages.storage_offset() % 8)
        for pages in parts
    )
    return tuple(pages.view(torch.int64) for pages in parts) if whole else parts


def unfit(step: Batch, *, pools: Tensor, rows: Tensor, kind: str) -> str:
    """Why these tensors are not those of the batch, in one sentence, or ""."""
    planes(kind, rows.shape[-1])
    if pools.dtype is not rows.dtype or pools.dtype.itemsize != 1:
        return f"pools are {pools.dtype} and rows {rows.dtype}: both are bytes of one dtype"
    if pools.shape[1] != step.cp:
        return f"pools are those of {pools.shape[1]} ranks; cp is {step.cp}"
    if pools.shape[3] != step.page_size * rows.shape[-1]:
        return (
            f"a page of pools has {pools.shape[3]} bytes; {step.page_size} tokens of "
            f"{rows.shape[-1]} bytes make {step.page_size * rows.shape[-1]}"
        )
    if rows.shape[:2] != (pools.shape[0], len(step.writer)):
        return (
            f"rows are {list(rows.shape[:2])} layers and tokens; pools have {pools.shape[0]} "
            f"layers and writer {len(step.writer)} tokens"
        )
    return ""
