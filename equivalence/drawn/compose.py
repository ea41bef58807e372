"""Seeded steps of context-parallel batches: small ones of every shape, and several in a row."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from equivalence.case import Case
from equivalence.errors import UsageError
from refimpl import batch as batches
from refimpl.batch import Batch
from refimpl.bits import E4M3
from refimpl.compose import KINDS, written

SHAPES = ("cold", "hits", "chunk", "carried", "shared", "mixed")
"""New prompts; cache hits with short extends; a chunk on an aligned prefix; a chunk alone on an
unaligned one; requests with a prefix page in common; all of them that may run together."""
WIDTHS = {"token": 24, "index": 12}
"""Bytes a token."""

Request = tuple[int, int]


def requests(shape: str, *, page_size: int) -> list[Request]:
    """Prefix and new tokens of each request of a shape.

    Raises:
        UsageError: there is no such shape.
    """
    one = page_size
    known: dict[str, list[Request]] = {
        "cold": [(0, 2 * one + 1), (0, one), (0, 3 * one - 1)],
        "hits": [(2 * one, 1), (one, 2), (3 * one, 0), (one, one + 1)],
        "chunk": [(4 * one, 5 * one - 1)],
        "carried": [(2 * one + max(1, one - 1), 3 * one)],
        "shared": [(2 * one, one), (2 * one, 1), (one, 2 * one)],
        "mixed": [(3 * one, 3 * one), (0, one + 1), (2 * one, 1), (2 * one - 1, 0)],
    }
    if shape not in known:
        raise UsageError(f"no shape named {shape!r}: one of {', '.join(SHAPES)}")
    return known[shape]


def compose_pages(
    seed: int,
    *,
    shape: str | None = None,
    cp: int = 4,
    layers: int = 3,
    page_size: int = 4,
    kinds: Sequence[str] = KINDS,
    padding: int = 2,
    fp8: bool = False,
) -> Case:
    """One step that may be composed.

    Args:
        seed: of everything; it picks the shape where none is named.
        shape: one of `SHAPES`.
        cp: ranks.
        layers: of every kind.
        page_size: tokens a page; with 1 no prefix is unaligned.
        kinds: "token", "index", or both.
        padding: slots past the last request, 0 and -1 by turns.
        fp8: whether bytes come as e4m3.

    Raises:
        UsageError: there is no such shape or kind, or a number is not 1 or more.
    """
    return _steps(
        seed,
        steps=1,
        shape=SHAPES[seed % len(SHAPES)] if shape is None else shape,
        cp=cp,
        layers=layers,
        page_size=page_size,
        kinds=kinds,
        padding=padding,
        fp8=fp8,
    )[0]


def compose_sequence(
    seed: int,
    *,
    steps: int = 3,
    cp: int = 4,
    layers: int = 3,
    page_size: int = 4,
    kinds: Sequence[str] = KINDS,
    fp8: bool = False,
) -> list[Case]:
    """Steps on the same ranks: what one writes is prefix of the next, in its owners' pools.

    Args:
        seed: of everything.
        steps: how many; each extends every request by one page or two.
        cp: ranks.
        layers: of every kind.
        page_size: tokens a page.
        kinds: "token", "index", or both.
        fp8: whether bytes come as e4m3.

    Raises:
        UsageError: there is no such kind, or a number is not 1 or more.
    """
    return _steps(
        seed,
        steps=steps,
        shape="shared",
        cp=cp,
        layers=layers,
        page_size=page_size,
        kinds=kinds,
        padding=2,
        fp8=fp8,
    )


def case_of(
    batch: Batch, *, pools: Mapping[str, Tensor], rows: Mapping[str, Tensor], fp8: bool
) -> Case:
    """A step as a case without a name.

    Args:
        batch: which pages are read and written.
        pools: by kind, u8 [layers, cp, pool pages, page_bytes].
        rows: by kind, u8 [layers, T, token_bytes].
        fp8: whether these bytes are e4m3.
    """
    held = {f"{kind}_pools": pool for kind, pool in pools.items()}
    held |= {f"{kind}_rows": new for kind, new in rows.items()}
    return Case(
        op="compose_pages",
        inputs={
            **{name: tensor.view(E4M3) if fp8 else tensor for name, tensor in held.items()},
            **{name: getattr(batch, name).clone() for name in batches.TENSORS},
        },
        params={"cp": batch.cp, "page_size": batch.page_size},
    )


def _steps(
    seed: int,
    *,
    steps: int,
    shape: str,
    cp: int,
    layers: int,
    page_size: int,
    kinds: Sequence[str],
    padding: int,
    fp8: bool,
) -> list[Case]:
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        given = repr(kinds) if isinstance(kinds, str) else ", ".join(kinds) or "none"
        raise UsageError(f"kinds are {given}: they are a list of {' and '.join(KINDS)}")
    counts = {"cp": cp, "layers": layers, "page_size": page_size, "steps": steps}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"{name} is {count!r}: it is a whole number, 1 or more")
    random = torch.Generator().manual_seed(seed)
    batch = requests(shape, page_size=page_size)
    most = sum(-(-(prefix + extend) // page_size) for prefix, extend in batch)
    most += 2 * steps * len(batch)
    owner, local, pool_pages = _places(random, most, cp=cp)
    pools = {
        kind: _bytes(random, layers, cp, pool_pages, page_size * WIDTHS[kind]) for kind in kinds
    }
    order = (1 + torch.randperm(most, generator=random)).tolist()
    tables = [_take(order, -(-prefix // page_size)) for prefix, _ in batch]
    for table in tables[1:] if shape == "shared" else ():
        table[0] = tables[0][0]
    made: list[Case] = []
    for number in range(steps):
        step = _batch(
            random,
            batch,
            tables=tables,
            order=order,
            owner=owner,
            local=local,
            cp=cp,
            page_size=page_size,
            padding=padding,
        )
        rows = {kind: _bytes(random, layers, len(step.writer), WIDTHS[kind]) for kind in kinds}
        name = f"compose_pages {shape} seed {seed}"
        case = case_of(step, pools=pools, rows=rows, fp8=fp8)
        made.append(replace(case, name=f"{name} step {number}" if steps > 1 else name))
        pools = {
            kind: written(step, pools=pools[kind], rows=rows[kind], kind=kind) for kind in kinds
        }
        batch = [
            (prefix + extend, page_size * (1 + i % 2))
            for i, (prefix, extend) in enumerate(_whole(batch, page_size))
        ]
    return made


def _whole(batch: Sequence[Request], page_size: int) -> list[Request]:
    """Requests whose pages are all full, so that they may be extended together."""
    return [
        (prefix, -(-(prefix + extend) // page_size) * page_size - prefix)
        for prefix, extend in batch
    ]


def _batch(
    random: torch.Generator,
    batch: Sequence[Request],
    *,
    tables: list[list[int]],
    order: list[int],
    owner: Tensor,
    local: Tensor,
    cp: int,
    page_size: int,
    padding: int,
) -> Batch:
    """The step, with new pages for what does not fit into the tables of its requests."""
    for (prefix, extend), table in zip(batch, tables, strict=True):
        table.extend(_take(order, -(-(prefix + extend) // page_size) - len(table)))
    prefixes, extends = [p for p, _ in batch], [e for _, e in batch]
    writer = batches.split_writers(
        prefix_lens=prefixes, extend_lens=extends, cp=cp, page_size=page_size
    )
    shift = int(torch.randint(cp, (), generator=random))
    carried = [i for i, (prefix, extend) in enumerate(batch) if extend and prefix % page_size]
    for i in carried:
        # The owner of a carried page goes on writing it.
        shift = int(owner[tables[i][prefixes[i] // page_size]]) - int(writer[0])
    return Batch(
        slot_pages=torch.tensor(
            [*(page for table in tables for page in table), *([0, -1] * padding)[:padding]],
            dtype=torch.int32,
        ),
        owner=owner,
        local_page=local,
        writer=(writer + shift) % cp,
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_lens=torch.tensor(extends, dtype=torch.int32),
        cp=cp,
        page_size=page_size,
    )


def _places(random: torch.Generator, pages: int, *, cp: int) -> tuple[Tensor, Tensor, int]:
    """An owner and a local page for logical pages 1 .. pages, and how many a pool has."""
    owner = torch.randint(cp, (pages + 1,), generator=random, dtype=torch.int32)
    counts = torch.bincount(owner[1:], minlength=cp)
    pool_pages = int(counts.max()) + 2
    local = torch.zeros(pages + 1, dtype=torch.int32)
    for rank in range(cp):
        mine = 1 + (owner[1:] == rank).nonzero()[:, 0]
        free = 1 + torch.randperm(pool_pages - 1, generator=random)
        local[mine] = free[: len(mine)].int()
    return owner, local, pool_pages


def _bytes(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)


def _take(order: list[int], count: int) -> list[int]:
    """The next pages that nobody has."""
    taken, order[:] = order[:count], order[count:]
    return taken
