"""Steps of compose_pages for tests: any owners, any places, any requests that may run together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.drawn.compose import case_of
from refimpl import compose
from refimpl.batch import TENSORS, Batch, row_locations, split_writers

BYTES = {"token": 6, "index": 5}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step and what it must come to.

    Attributes:
        inputs: tensors of compose_pages.
        params: its parameters.
    """

    inputs: Mapping[str, Tensor]
    params: Mapping[str, Any]

    @property
    def batch(self) -> Batch:
        """What is composed."""
        tensors: dict[str, Any] = {name: self.inputs[name] for name in TENSORS}
        return Batch(**tensors, cp=self.params["cp"], page_size=self.params["page_size"])

    @property
    def case(self) -> Case:
        """As a case."""
        return Case(op="compose_pages", inputs=dict(self.inputs), params=dict(self.params))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those there are."""
        return tuple(kind for kind in BYTES if f"{kind}_pools" in self.inputs)

    @property
    def call(self) -> dict[str, Any]:
        """The batch as keywords."""
        return {name: self.inputs[name] for name in TENSORS} | dict(self.params)

    def want(self) -> dict[str, Tensor]:
        """Pages by kind, u8 [layers, S, page_bytes]."""
        return {
            kind: compose.compose_pages(
                pools=self.inputs[f"{kind}_pools"],
                rows=self.inputs[f"{kind}_rows"],
                **self.call,
                kind=kind,
            ).view(torch.uint8)
            for kind in self.kinds
        }


def differing(got: dict[str, Tensor], wanted: Step) -> list[str]:
    """What is not as it must be: outputs by rank, and strays."""
    want = {f"{kind}_pages": pages for kind, pages in wanted.want().items()}
    assert got.keys() == {*want, "row_locations", "strays"}
    pools = {f"{kind}_pages": wanted.inputs[f"{kind}_pools"].dtype for kind in wanted.kinds}
    wrong = [
        f"{name} of rank {rank}"
        for name, pages in want.items()
        for rank, part in enumerate(got[name])
        if part.dtype is not pools[name] or not torch.equal(part.view(torch.uint8), pages)
    ]
    locations = row_locations(wanted.batch)
    wrong += ["row_locations" for part in got["row_locations"] if not torch.equal(part, locations)]
    return wrong + (["strays"] if got["strays"].numel() else [])


def run(way: Candidate, wanted: Step) -> dict[str, Tensor]:
    """What ranks hold."""
    made: dict[str, Tensor] = way(**wanted.inputs, **wanted.params)
    return made


def step(
    requests: Sequence[tuple[int, int]],
    *,
    cp: int,
    page_size: int = 4,
    layers: int = 3,
    kinds: Sequence[str] = ("token", "index"),
    padding: int = 1,
    turn_by: int = 0,
    seed: int = 0,
    dtype: torch.dtype = FP8,
    staging_pages: int | None = None,
) -> Step:
    """A step of requests (prefix, extend), everything else drawn from a seed.

    Args:
        requests: their tokens.
        cp: ranks.
        page_size: tokens a page.
        layers: of each kind.
        kinds: of pages.
        padding: slots that hold nothing.
        turn_by: the rank that has the first run of each split.
        seed: of pages, owners, places and bytes.
        dtype: of pools and rows.
        staging_pages: the limit.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = [(-(-(prefix + extend) // page_size)) for prefix, extend in requests]
    slots = sum(lens)
    pages = slots + 3
    ids = torch.randperm(pages, generator=generator)[:slots] + 1
    owner = torch.randint(0, cp, (pages + 1,), generator=generator)
    writer = split_writers(
        prefix_lens=[prefix for prefix, _ in requests],
        extend_lens=[extend for _, extend in requests],
        cp=cp,
        page_size=page_size,
    )
    writer = (writer + turn_by) % cp
    if len(requests) == 1 and requests[0][0] % page_size and requests[0][1]:
        owner[ids[requests[0][0] // page_size]] = writer[0]
    local = torch.randperm(pages + 1, generator=generator) + 1
    owner[0], local[0] = -1, 0

    def drawn(*shape: int) -> Tensor:
        made = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        told = torch.tensor([0x7F, 0xFF, 0x80, 0x00], dtype=torch.uint8)
        made.view(-1)[: 8 * len(told) : 2] = told.repeat(4)[: len(made.view(-1)[:32:2])]
        return made

    tokens = sum(extend for _, extend in requests)
    batch = Batch(
        slot_pages=torch.cat([ids, torch.arange(padding) % 2 - 1]).int(),
        owner=owner.int(),
        local_page=local.int(),
        writer=writer.int(),
        prefix_lens=torch.tensor([prefix for prefix, _ in requests], dtype=torch.int32),
        extend_lens=torch.tensor([extend for _, extend in requests], dtype=torch.int32),
        cp=cp,
        page_size=page_size,
    )
    pools, rows = {}, {}
    for kind in kinds:
        pools[kind] = drawn(layers, cp, pages + 3, page_size * BYTES[kind])
        rows[kind] = drawn(layers, tokens, BYTES[kind])
    case = case_of(batch, pools=pools, rows=rows, fp8=dtype is FP8)
    limit = {} if staging_pages is None else {"staging_pages": staging_pages}
    return Step(inputs=case.inputs, params={**case.params, **limit})


@st.composite
def requests_of(draw: st.DrawFn, page_size: int) -> list[tuple[int, int]]:
    """Requests that may run together: one of any prefix, or several of whole pages."""
    extend = st.integers(0, 4 * page_size + 1)
    if draw(st.booleans()):
        return [(draw(st.integers(0, 4 * page_size)), draw(extend))]
    whole = st.integers(0, 3).map(lambda pages: pages * page_size)
    done = st.tuples(st.integers(0, 3 * page_size), st.just(0))
    some = st.one_of(st.tuples(whole, extend), done)
    return draw(st.lists(some, max_size=4))


@st.composite
def steps(draw: st.DrawFn, *, cp: int | None = None) -> Step:
    """Any step of up to 8 ranks."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    ranks = draw(st.integers(1, 8)) if cp is None else cp
    return step(
        draw(requests_of(page_size)),
        cp=ranks,
        page_size=page_size,
        layers=draw(st.integers(1, 5)),
        kinds=draw(st.sampled_from([("token",), ("index",), ("token", "index")])),
        padding=draw(st.integers(0, 3)),
        turn_by=draw(st.integers(0, ranks - 1)),
        seed=draw(st.integers(0, 1 << 16)),
        dtype=draw(st.sampled_from([FP8, torch.uint8])),
    )
