"""Steps of context-parallel ranks at production sizes: what a batch reads, writes and finds there.

A scenario is several steps on the same ranks, since old data show only where there are some. What a
step writes stands in its owners' pools from the next one on, and later requests read it as prefix.
Pages that nothing wrote hold random bytes, as the rest of a pool does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from equivalence import draws
from equivalence.case import Case
from equivalence.compose.requests import PAGE_SIZE, Request, plan
from equivalence.drawn.compose import case_of
from equivalence.errors import UsageError
from refimpl import batch as batches
from refimpl import compose
from refimpl.batch import Batch

TOKEN_BYTES = {"token": 656, "index": 132}
_SPARE = 2
"""Pages of each pool that no step reads or writes."""
_MOST_SEED = 2**63 - 1
_PAD_TO = 4
"""Slots of a step are a multiple of this; what is left holds page 0 or -1."""


@dataclass(kw_only=True)
class _Text:
    """Pages of a text, in order, and the tokens that they hold."""

    pages: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A step with its pages, before there are bytes: the text of each request, then its lengths."""

    slots: tuple[int, ...]
    prefix: tuple[int, ...]
    extend: tuple[int, ...]


def sequence(
    name: str,
    *,
    cp: int = 8,
    layers: int = 8,
    kinds: Sequence[str] = ("token", "index"),
    seed: int = 0,
    scale: int = 1,
) -> list[Case]:
    """The steps of a scenario as cases of `compose_pages`, in order.

    Pools keep their size from step to step, and `staging_pages` is what the step with most tokens
    and the one with most requests admit.

    Args:
        name: one of `requests.NAMES`.
        cp: ranks.
        layers: of every kind.
        kinds: token, index or both.
        seed: of bytes, of who owns which page, and of where it stands there.
        scale: divides lengths, see `plan`.

    Raises:
        UsageError: a name, a kind or a number is none of those.
    """
    _check(cp, layers, kinds, seed)
    steps, pages = _paged(plan(name, scale=scale))
    random = torch.Generator().manual_seed(seed)
    each = -(-pages // cp) + _SPARE
    number, table = _tables(pages, cp=cp, each=each, random=random)
    limits = batches.Limits(
        max_tokens=max(sum(step.extend) for step in steps),
        max_requests=max(len(step.extend) for step in steps),
    )
    staging = batches.limited_pages(limits, page_size=PAGE_SIZE)
    shape = (layers, cp, 1 + each)
    pools = {kind: draws.raw(random, *shape, PAGE_SIZE * TOKEN_BYTES[kind]) for kind in kinds}
    cases = []
    for turn, step in enumerate(steps):
        batch = _batch(step, number, table, cp=cp, turn=turn)
        tokens = len(batch.writer)
        rows = {kind: draws.raw(random, layers, tokens, TOKEN_BYTES[kind]) for kind in kinds}
        case = case_of(batch, pools=pools, rows=rows, fp8=True)
        cases.append(
            replace(
                case,
                params={**case.params, **asdict(replace(limits, staging_pages=staging))},
                provenance={
                    "scenario": name,
                    "step": f"{turn}",
                    "seed": f"{seed}",
                    "scale": f"{scale}",
                },
                name=f"{name}.{turn}",
            )
        )
        if turn + 1 < len(steps):
            pools = {
                kind: compose.written(batch, pools=pools[kind], rows=rows[kind], kind=kind)
                for kind in kinds
            }
    return cases


def _check(cp: int, layers: int, kinds: Sequence[str], seed: int) -> None:
    """Refuse what makes no sequence."""
    for name, count, least in (("cp", cp, 1), ("layers", layers, 1), ("seed", seed, 0)):
        if count < least:
            raise UsageError(f"{name} is {count}: it is {least} or more")
    if seed > _MOST_SEED:
        raise UsageError(f"seed is {seed}: it is 0 to {_MOST_SEED}")
    if not kinds or set(kinds) - set(compose.KINDS) or len(set(kinds)) != len(kinds):
        raise UsageError(
            f"kinds are {', '.join(kinds) or 'none'}: {' or '.join(compose.KINDS)}, or both"
        )


def _paged(steps: Sequence[Sequence[Request]]) -> tuple[list[_Step], int]:
    """The steps with pages 1, 2, ... as they come into use, and how many those are."""
    texts: dict[str, _Text] = {}
    count = 0
    paged = []
    for requests in steps:
        slots: list[list[int]] = []
        prefixes: list[int] = []
        written: dict[str, _Text] = {}
        for request in requests:
            read = texts.setdefault(request.of or request.text, _Text())
            prefix = read.tokens if request.prefix is None else request.prefix
            prefix -= prefix % PAGE_SIZE if request.whole else 0
            needed = -(-prefix // PAGE_SIZE)
            fresh = range(count + 1, count + 1 + max(0, needed - len(read.pages)))
            read.pages.extend(fresh)
            read.tokens = max(read.tokens, prefix)
            count += len(fresh)
            end = prefix + request.extend
            new = range(count + 1, count + 1 - (-end // PAGE_SIZE) - needed)
            count += len(new)
            slots.append([*read.pages[:needed], *new])
            prefixes.append(prefix)
            written[request.text] = _Text(pages=list(slots[-1]), tokens=end)
        texts.update(written)
        paged.append(
            _Step(
                slots=tuple(chain.from_iterable(slots)),
                prefix=tuple(prefixes),
                extend=tuple(request.extend for request in requests),
            )
        )
    return paged, count


def _tables(
    pages: int, *, cp: int, each: int, random: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """The number of each logical page as it comes into use, and owner and local_page by number."""
    owner, local = _placed(pages, cp=cp, each=each, random=random)
    number = 1 + torch.randperm(len(owner) - 1, generator=random)
    number = torch.cat([number.new_zeros(1), number])
    return number, {
        "owner": torch.empty_like(owner).scatter_(0, number, owner).int(),
        "local_page": torch.empty_like(local).scatter_(0, number, local).int(),
    }


def _placed(pages: int, *, cp: int, each: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Owner and local page of logical pages 0 .. pages, int64, evenly and in no order.

    Page 0 is nobody's.
    """
    place = torch.arange(-(-pages // cp) * cp)
    owner = torch.cat([torch.randperm(cp, generator=random) for _ in range(len(place) // cp)])
    local = torch.stack([1 + torch.randperm(each, generator=random) for _ in range(cp)])
    nth = place // cp
    nobody = place.new_zeros(1)
    return (
        torch.cat([nobody, owner[:pages]]),
        torch.cat([nobody, local[owner, nth][:pages]]),
    )


def _batch(
    step: _Step, number: Tensor, table: Mapping[str, Tensor], *, cp: int, turn: int
) -> Batch:
    """A step as the ranks get it."""
    slots = number[torch.tensor(step.slots)].int()
    padding = torch.arange(-len(slots) % _PAD_TO, dtype=torch.int32) % 2 - 1
    slots = torch.cat([slots, padding])
    runs, first = [], 0
    for i, (prefix, extend) in enumerate(zip(step.prefix, step.extend, strict=True)):
        own = batches.split_writers(
            prefix_lens=[prefix], extend_lens=[extend], cp=cp, page_size=PAGE_SIZE
        )
        page = int(slots[first + prefix // PAGE_SIZE])
        # Who has the tokens that a page carries writes the rest of it.
        shift = int(table["owner"][page]) if prefix % PAGE_SIZE else i + turn
        runs.append((own + shift) % cp)
        first += -(-(prefix + extend) // PAGE_SIZE)
    return Batch(
        slot_pages=slots,
        owner=table["owner"],
        local_page=table["local_page"],
        writer=torch.cat(runs),
        prefix_lens=torch.tensor(step.prefix, dtype=torch.int32),
        extend_lens=torch.tensor(step.extend, dtype=torch.int32),
        cp=cp,
        page_size=PAGE_SIZE,
    )
