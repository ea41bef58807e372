"""What every rank must hold of one step, layer by layer, in pieces that stay small."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from equivalence.case import Case
from equivalence.windows import param
from refimpl import batch as batches
from refimpl import compose
from refimpl.batch import Batch, Limits
from refimpl.bits import as_int

_PIECE_BYTES = 32 << 20
"""Bytes of pages that are composed and compared at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """The tensors of one kind of page, as bytes.

    Attributes:
        name: "token" or "index".
        pools: u8 [layers, cp, pool pages, page_bytes].
        rows: u8 [layers, T, token_bytes].
    """

    name: str
    pools: Tensor
    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of a batch, and what ranks bring into it.

    Attributes:
        batch: which pages it reads and writes.
        kinds: by name.
        limits: of admission and of staging.
    """

    batch: Batch
    kinds: Mapping[str, Kind]
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Some slots of one layer.

    Attributes:
        slots: which.
        want: u8 [n, page_bytes], what every rank must hold there until the next piece is asked for.
    """

    slots: slice
    want: Tensor


def of_case(case: Case) -> Step:
    """The step that a case of `compose_pages` holds in memory."""
    held = case.inputs
    kinds = {
        name: Kind(
            name=name, pools=as_int(held[f"{name}_pools"]), rows=as_int(held[f"{name}_rows"])
        )
        for name in compose.KINDS
        if f"{name}_pools" in held
    }
    return Step(
        batch=Batch(
            **{name: held[name] for name in batches.TENSORS},
            cp=int(param(case, "cp")),
            page_size=int(param(case, "page_size")),
            pool_group=int(param(case, "pool_group")),
        ),
        kinds=kinds,
        limits=Limits(**{each.name: param(case, each.name) for each in fields(Limits)}),
    )


def layer(step: Step, kind: Kind, number: int) -> Iterator[Piece]:
    """The reference of one layer, piece after piece, in one buffer; the step may be composed."""
    width = kind.pools.shape[-1]
    most = max(1, _PIECE_BYTES // width)
    buffer = kind.pools.new_empty(1, min(most, len(step.batch.slot_pages)), width)
    for slots, tokens, part in _parts(step.batch, most):
        out = buffer[:, : slots.stop - slots.start]
        compose.composed(
            part,
            pools=kind.pools[number : number + 1],
            rows=kind.rows[number : number + 1, tokens],
            kind=kind.name,
            out=out,
        )
        yield Piece(slots=slots, want=out[0])


def _parts(step: Batch, most: int) -> Iterator[tuple[slice, slice, Batch]]:
    """Batches of at most so many slots that together are this one, with their slots and tokens."""
    slots, tokens = len(step.slot_pages), len(step.writer)
    if slots <= most:
        yield slice(0, slots), slice(0, tokens), step
        return
    at = token = 0
    before, now = (each.tolist() for each in batches.slot_counts(step))
    lens = zip(step.extend_lens.tolist(), batches.carried_tokens(step).tolist(), strict=True)
    for held, fresh, (extend, carried) in zip(before, now, lens, strict=True):
        for first in range(0, held, most):
            some = slice(at + first, at + min(first + most, held))
            yield some, slice(token, token), _part(step, some, prefix=some.stop - some.start)
        at, left = at + held, extend
        for first in range(0, fresh, most):
            some = slice(at + first, at + min(first + most, fresh))
            room = (some.stop - some.start) * step.page_size - (0 if first else carried)
            new = slice(token, token + min(left, room))
            yield some, new, _part(step, some, new=new, carried=0 if first else carried)
            token, left = new.stop, left - (new.stop - new.start)
        at += fresh
    for first in range(at, slots, most):
        some = slice(first, min(first + most, slots))
        yield some, slice(token, token), _part(step, some)


def _part(
    step: Batch, slots: slice, *, prefix: int = 0, new: slice | None = None, carried: int = 0
) -> Batch:
    """Some slots as a batch of their own: whole pages of prefix, new tokens, or padding."""
    lens = step.prefix_lens
    extend = 0 if new is None else new.stop - new.start
    some = 1 if prefix or extend else 0
    return Batch(
        slot_pages=step.slot_pages[slots],
        owner=step.owner,
        local_page=step.local_page,
        writer=step.writer[slice(0, 0) if new is None else new],
        prefix_lens=lens.new_full((some,), prefix * step.page_size + carried),
        extend_lens=lens.new_full((some,), extend),
        cp=step.cp,
        page_size=step.page_size,
    )


def remote(step: Batch) -> bool:
    """Whether some rank must read a page of another, or any new token has to be placed."""
    if len(step.writer):
        return True
    read = bool(torch.any(step.slot_pages > batches.NOTHING))
    return step.cp > 1 and read
