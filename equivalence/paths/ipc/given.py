"""What a step is given: the batch and, by kind, pools and rows; the same sizes on every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from equivalence import digest
from equivalence.errors import UsageError
from refimpl.batch import TENSORS, Batch
from refimpl.compose import KINDS, unfit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from equivalence.world.link import Link

POOLS = tuple(f"{kind}_pools" for kind in KINDS)
ROWS = tuple(f"{kind}_rows" for kind in KINDS)
NAMES = (*POOLS, *ROWS, *TENSORS)
"""The inputs of compose_pages."""
_DIMENSIONS = 4


@dataclass(frozen=True)
class _Fact:
    """A number that must be the same on every rank.

    Attributes:
        name: the same on every rank too.
        value: as this rank was given it.
        shown: whether the number says something; a digest does not.
    """

    name: str
    value: int
    shown: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """The inputs of one step.

    Attributes:
        batch: on the CPU.
        kinds: those there are, in the order of KINDS.
        pools: by kind, u8 [layers, cp, pool pages, page_bytes].
        rows: by kind, u8 [layers, T, token_bytes].
        dtypes: by kind, of its pools.
    """

    batch: Batch
    kinds: tuple[str, ...]
    pools: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]

    @property
    def layers(self) -> int:
        """How many layers each kind has."""
        return len(self.pools[self.kinds[0]])

    @property
    def pool_pages(self) -> int:
        """Rows that every pool has."""
        return min(pool.shape[2] for pool in self.pools.values())


def read(
    tensors: Mapping[str, Tensor], *, ranks: int, cp: int, page_size: int, pool_group: int
) -> Given:
    """The inputs by what they are.

    Args:
        tensors: by the names of the op.
        ranks: how many run.
        cp: ranks of the batch.
        page_size: tokens a page.
        pool_group: pages that a row of the index pool stands for.

    Raises:
        UsageError: one is missing or unknown, or another number of ranks runs.
        ValueError: they do not fit each other.
    """
    kinds = tuple(kind for kind in KINDS if f"{kind}_pools" in tensors or f"{kind}_rows" in tensors)
    needed = (*TENSORS, *(f"{kind}_{what}" for kind in kinds for what in ("pools", "rows")))
    if missing := [name for name in needed if name not in tensors]:
        raise UsageError(f"compose_pages lacks {' '.join(missing)}")
    if unknown := [name for name in tensors if name not in NAMES]:
        raise UsageError(f"compose_pages has no input {' '.join(unknown)}: {' '.join(NAMES)}")
    if not kinds:
        raise UsageError(f"compose_pages has nothing to compose: {' or '.join(POOLS)} with rows")
    if cp != ranks:
        raise ValueError(f"the batch is one of {cp} ranks; {ranks} run")
    held = {name: tensors[name].cpu() for name in TENSORS}
    step = Batch(**held, cp=cp, page_size=page_size, pool_group=pool_group)
    for kind in kinds:
        pools, rows = tensors[f"{kind}_pools"], tensors[f"{kind}_rows"]
        if (pools.dim(), rows.dim()) != (4, 3):
            raise ValueError(
                f"{kind}_pools has {pools.dim()} dimensions and {kind}_rows {rows.dim()}: "
                "they have 4 and 3"
            )
        if why := unfit(step, pools=pools, rows=rows, kind=kind):
            raise ValueError(f"{kind}: {why}")
    layers = {kind: len(tensors[f"{kind}_pools"]) for kind in kinds}
    if len(set(layers.values())) > 1 or 0 in layers.values():
        raise ValueError(f"kinds have {layers} layers: each has the same number, 1 or more")
    return Given(
        batch=step,
        kinds=kinds,
        pools={kind: tensors[f"{kind}_pools"].view(torch.uint8) for kind in kinds},
        rows={kind: tensors[f"{kind}_rows"].view(torch.uint8) for kind in kinds},
        dtypes={kind: tensors[f"{kind}_pools"].dtype for kind in kinds},
    )


def agree(link: Link, tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> None:
    """Raise a ValueError on every rank alike unless all were given the same sizes and batch.

    Args:
        link: of this rank.
        tensors: the inputs.
        settings: what else must be the same.
    """
    facts = _facts(tensors, settings)
    if _spread(link, _number(repr(facts))) is None:
        return
    for fact in facts:
        spread = _spread(link, fact.value)
        if spread is None:
            continue
        least, most = (link.agree(link.rank if fact.value == end else link.ranks) for end in spread)
        told = f"ranks {least} and {most} were given others"
        if fact.shown:
            told = f"{spread[0]} on rank {least}, {spread[1]} on rank {most}"
        raise ValueError(f"{fact.name} differs by rank: {told}")
    raise ValueError("ranks were given different inputs")


def _facts(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> list[_Fact]:
    """As many on each rank, in one order."""
    facts = [_Fact("number of inputs", len(tensors))]
    for name in NAMES:
        tensor = tensors.get(name)
        shape = [] if tensor is None else list(tensor.shape)
        padded = shape + [-1] * (_DIMENSIONS - len(shape))
        facts += [_Fact(f"dimension {at} of {name}", n, shown=True) for at, n in enumerate(padded)]
        told = "" if tensor is None else str(tensor.dtype)
        if tensor is not None and name in TENSORS:
            told += digest.of_tensor(tensor)
        facts.append(_Fact(f"what {name} holds", _number(told)))
    return facts + [
        _Fact(f"setting {name}", _number(json.dumps(value))) for name, value in settings.items()
    ]


def _spread(link: Link, number: int) -> tuple[int, int] | None:
    """The least and the greatest that ranks say, or None where all say the same."""
    low, high = link.agree(number), -link.agree(-number)
    return None if low == high else (low, high)


def _number(text: str) -> int:
    """A digest that fits into an int64 with either sign."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 2
