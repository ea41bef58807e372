"""A batch as data: its slots, its splits, what its stagings hold, and what forbids it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl import batch as batches
from refimpl.batch import Batch, Problem


def ints(*values: int) -> Tensor:
    """int32, one dimension."""
    return torch.tensor(values, dtype=torch.int32)


def made(
    requests: list[tuple[int, int]], *, cp: int = 2, page_size: int = 4, padding: int = 1
) -> Batch:
    """Page n has number n + 1, is local page n + 1 of rank n % cp, and splits are page aligned."""
    prefix, extend = [p for p, _ in requests], [e for _, e in requests]
    slots = sum(-(-(p + e) // page_size) for p, e in requests)
    pages = range(1, slots + 1)
    writer = batches.split_writers(
        prefix_lens=prefix, extend_lens=extend, cp=cp, page_size=page_size
    )
    return Batch(
        slot_pages=ints(*pages, *[0] * padding),
        owner=ints(-1, *(page % cp for page in range(slots))),
        local_page=ints(0, *pages),
        writer=writer,
        prefix_lens=ints(*prefix),
        extend_lens=ints(*extend),
        cp=cp,
        page_size=page_size,
    )


REQUESTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4)


@given(REQUESTS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_slots_are_laid_out_request_by_request(
    requests: list[tuple[int, int]], page_size: int, cp: int, padding: int
) -> None:
    """Page by page and token by token, as a loop does it."""
    batch = made(requests, cp=cp, page_size=page_size, padding=padding)
    owner, now, locations, carried = [], [], [], []
    first = 0
    for request, (prefix, extend) in enumerate(requests):
        pages = -(-(prefix + extend) // page_size)
        owner += [request] * pages
        written = {(prefix + token) // page_size for token in range(extend)}
        now += [first + page for page in sorted(written)]
        locations += [first * page_size + prefix + token for token in range(extend)]
        carried.append(prefix % page_size if extend else 0)
        first += pages
    assert batches.slot_requests(batch).tolist() == owner + [-1] * padding
    assert batches.current_slots(batch).tolist() == now
    assert batches.row_locations(batch).tolist() == locations
    assert batches.row_locations(batch).dtype is torch.int32
    assert batches.carried_tokens(batch).tolist() == carried
    rows = batches.staging_rows(batch).tolist()
    assert [rows[slot] for slot in now] == list(range(1, len(now) + 1))
    assert sum(rows) == sum(range(1, len(now) + 1))
    assert batches.misfit(batch) == ""


@given(REQUESTS, st.integers(1, 5), st.integers(1, 4))
def test_one_gather_reads_pools_and_stagings(
    requests: list[tuple[int, int]], page_size: int, cp: int
) -> None:
    """A prefix page from its owner's pool, a current one from its writer's staging."""
    batch = made(requests, cp=cp, page_size=page_size)
    source, row = (part.tolist() for part in batches.direct_table(batch))
    now = batches.current_slots(batch).tolist()
    by_token = zip(batches.row_locations(batch).tolist(), batch.writer.tolist(), strict=True)
    writer = {location // page_size: rank for location, rank in by_token}
    for slot, page in enumerate(batch.slot_pages.tolist()):
        if slot in now:
            assert (source[slot], row[slot]) == (cp + writer[slot], now.index(slot) + 1)
        elif page:
            assert (source[slot], row[slot]) == ((page - 1) % cp, page)
        else:
            assert (source[slot], row[slot]) == (-1, 0)


def test_a_batch_of_padding_alone_has_a_table() -> None:
    """Also where there is no logical page at all."""
    nothing = ints()
    batch = replace(made([]), slot_pages=ints(0, -1), owner=nothing, local_page=nothing)
    assert [part.tolist() for part in batches.direct_table(batch)] == [[-1, -1], [0, 0]]
    assert list(batches.problems(batch, pool_pages=1)) == []


def test_a_page_of_two_writers_has_no_table() -> None:
    """Its slot is named."""
    batch = replace(made([(4, 6)]), writer=ints(0, 0, 0, 0, 0, 1))
    with pytest.raises(ValueError, match="slot 2 has no single writer"):
        batches.page_writers(batch)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 8), st.integers(1, 8))
def test_a_split_is_page_aligned_in_sequence_and_even(
    prefix: int, extend: int, cp: int, page_size: int
) -> None:
    """Every edge but the ends is on a page, and runs differ by at most one page."""
    edges = batches.split_tokens(prefix=prefix, extend=extend, cp=cp, page_size=page_size)
    assert (len(edges), edges[0], edges[-1]) == (cp + 1, 0, extend)
    assert edges == sorted(edges)
    assert all((prefix + edge) % page_size == 0 for edge in edges[1:-1] if 0 < edge < extend)
    pages = [{(prefix + token) // page_size for token in range(a, b)} for a, b in pairwise(edges)]
    counts = [len(run) for run in pages]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_the_issues_split_is_legal_at_128_and_72() -> None:
    """200 tokens on two ranks of pages of 64."""
    assert batches.split_tokens(prefix=0, extend=200, cp=2, page_size=64) == [0, 128, 200]
    writer = batches.split_writers(prefix_lens=[0, 64], extend_lens=[200, 1], cp=2, page_size=64)
    assert writer.bincount().tolist() == [129, 72]
    assert writer.dtype is torch.int32


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 70))
def test_admission_counts_the_carried_prefix(prefix: int, extend: int, page_size: int) -> None:
    """A request is charged for the pages that it writes."""
    batch = made([(prefix, extend)], page_size=page_size)
    charged = batches.admitted_pages(prefix=prefix, extend=extend, page_size=page_size)
    assert charged == len(batches.current_slots(batch))


def test_a_prefix_of_70_and_60_new_tokens_take_two_pages() -> None:
    """60 tokens alone would take one; two that fill a page up take none more."""
    assert batches.admitted_pages(prefix=70, extend=60, page_size=64) == 2
    assert batches.admitted_pages(prefix=62, extend=2, page_size=64) == 1


def admissions(tokens: int, requests: int, page_size: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to admit requests under the limits, but for prefixes that take no other page."""

    def partitions(left: int, most: int, requests: int) -> Iterator[list[int]]:
        yield []
        for part in range(1, min(left, most) + 1 if requests else 0):
            for rest in partitions(left - part, part, requests - 1):
                yield [part, *rest]

    for extends in partitions(tokens, tokens, requests):
        yield [(0, extend) for extend in extends]
    if requests:
        for extend in range(tokens + 1):
            for prefix in range(page_size):
                yield [(prefix, extend)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("requests", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 9])
def test_capacity_is_what_the_worst_admitted_batch_takes(
    tokens: int, requests: int, page_size: int
) -> None:
    """No batch takes more, and one takes as much."""
    taken = (
        sum(
            batches.admitted_pages(prefix=prefix, extend=extend, page_size=page_size)
            for prefix, extend in admitted
        )
        for admitted in admissions(tokens, requests, page_size)
    )
    capacity = batches.staging_capacity(
        max_tokens=tokens, max_requests=requests, page_size=page_size
    )
    assert capacity == max(taken)


def told(batch: Batch, *, pool_pages: int = 9, staging_pages: int | None = None) -> list[Problem]:
    """Everything that forbids a batch."""
    return list(batches.problems(batch, pool_pages=pool_pages, staging_pages=staging_pages))


GOOD = made([(4, 6), (0, 3)])
"""Pages 1 to 4 in slots 0 to 3; slot 0 is prefix; tokens 0-3 4-5 6-8 are on pages 2 3 4."""
ALONE = made([(6, 5)], cp=2)
"""Pages 1 2 3; page 2 carries two tokens of rank 1 and is written by rank 0: not yet legal."""


def test_a_batch_that_may_be_composed_has_no_problem() -> None:
    """Nor a carried page that its owner writes, nor one with as many staging pages as it takes."""
    assert told(GOOD) == []
    assert told(GOOD, pool_pages=5, staging_pages=3) == []
    assert told(replace(ALONE, owner=ints(-1, 0, 0, 0))) == []
    assert told(made([(6, 0), (3, 0)])) == []


PROBLEMS: list[tuple[str, dict[str, Any], Problem]] = [
    (
        "a page that is none",
        {"slot_pages": ints(5, 2, 3, 4)},
        Problem(rule="out-of-window", sentence="page 5 is none of 5 logical pages", slot=0, page=5),
    ),
    (
        "a page below -1",
        {"slot_pages": ints(1, -2, 3, 4)},
        Problem(
            rule="out-of-window", sentence="page -2 is none of 5 logical pages", slot=1, page=-2
        ),
    ),
    (
        "an owner that is none",
        {"owner": ints(-1, 2, 1, 0, 1)},
        Problem(rule="out-of-window", sentence="page 1 is owned by rank 2 of 2", slot=0, page=1),
    ),
    (
        "a local page that is none",
        {"local_page": ints(0, 1, 9, 3, 4)},
        Problem(
            rule="out-of-window",
            sentence="page 2 is local page 9 of rank 1, which has 9",
            slot=1,
            page=2,
            ranks=(1,),
        ),
    ),
    (
        "a writer that is none",
        {"writer": ints(0, 0, 0, 0, 1, 1, 2, 2, 2)},
        Problem(rule="out-of-window", sentence="token 6 is written by rank 2 of 2"),
    ),
    (
        "page 0 in a request",
        {"slot_pages": ints(0, 2, 3, 4)},
        Problem(
            rule="page-zero",
            sentence="request 0 relies on page 0, which holds nothing",
            slot=0,
            page=0,
        ),
    ),
    (
        "no page in a request",
        {"slot_pages": ints(1, 2, 3, -1)},
        Problem(
            rule="page-zero",
            sentence="request 1 relies on page -1, which holds nothing",
            slot=3,
            page=-1,
        ),
    ),
    (
        "a page on a pool's dummy",
        {"local_page": ints(0, 0, 2, 3, 4)},
        Problem(
            rule="page-zero",
            sentence="page 1 rests on local page 0 of rank 0, a dummy",
            slot=0,
            page=1,
            ranks=(0,),
        ),
    ),
    (
        "a page of nobody",
        {"owner": ints(-1, -1, 1, 0, 1)},
        Problem(rule="no-writer", sentence="page 1 has no owner", slot=0, page=1),
    ),
    (
        "tokens that nobody writes",
        {"writer": ints(0, 0, 0, 0, -1, -1, 0, 0, 0)},
        Problem(
            rule="no-writer",
            sentence="page 3 has 2 current tokens that no rank writes",
            slot=2,
            page=3,
        ),
    ),
    (
        "a split inside a page",
        {"writer": ints(0, 0, 1, 1, 1, 1, 0, 0, 0)},
        Problem(
            rule="two-writers",
            sentence="page 2 is written by ranks 0 1: a split inside a page",
            slot=1,
            page=2,
            ranks=(0, 1),
        ),
    ),
    (
        "two pages in one place",
        {"local_page": ints(0, 1, 2, 1, 4)},
        Problem(
            rule="two-writers",
            sentence="pages 1 and 3 are one: local page 1 of rank 0",
            slot=2,
            page=3,
            ranks=(0,),
        ),
    ),
    (
        "a current page in two slots",
        {"slot_pages": ints(1, 2, 3, 2)},
        Problem(
            rule="two-writers",
            sentence="page 2 is written in slot 1 and stands in slots 1 3",
            slot=1,
            page=2,
        ),
    ),
    (
        "a prefix page that is written",
        {"slot_pages": ints(2, 2, 3, 4)},
        Problem(
            rule="two-writers",
            sentence="page 2 is written in slot 1 and stands in slots 0 1",
            slot=1,
            page=2,
        ),
    ),
]


@pytest.mark.parametrize(
    ("change", "problem"), [(c, p) for _, c, p in PROBLEMS], ids=[name for name, _, _ in PROBLEMS]
)
def test_each_rule_has_its_batch(change: dict[str, Tensor], problem: Problem) -> None:
    """One change of a good batch, one problem with its ids."""
    assert told(replace(GOOD, **change)) == [problem]  # type: ignore[arg-type]  # tensors by name


def test_more_current_pages_than_staging_are_refused_by_those_that_have_none() -> None:
    """The pages past the capacity are listed."""
    assert told(GOOD, staging_pages=1) == [
        Problem(
            rule="over-budget",
            sentence="3 current pages do not fit into 1 staging pages: 3 4 have none",
            page=3,
        )
    ]
    many = made([(0, 60)])
    assert told(many, pool_pages=99, staging_pages=2)[0].sentence == (
        "15 current pages do not fit into 2 staging pages: 3 4 5 6 7 8 9 10 and 5 more have none"
    )


def test_a_carried_page_is_its_owners() -> None:
    """Another rank lacks the tokens that it holds."""
    assert told(ALONE) == [
        Problem(
            rule="two-writers",
            sentence="page 2 carries 2 tokens of rank 1, its owner, and is written by rank 0",
            slot=1,
            page=2,
            ranks=(1, 0),
        )
    ]


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ([(4, 2)], "runs beside 1 other (2 extend)"),
        ([(3, 0), (0, 1)], "runs beside 2 others (2 extend)"),
        ([(4, 0)], "runs beside 1 other (1 extend)"),
    ],
)
def test_an_unaligned_prefix_runs_alone(beside: list[tuple[int, int]], says: str) -> None:
    """Whoever it runs beside."""
    (problem,) = told(made([(6, 2), *beside]))
    assert (problem.rule, problem.slot, problem.page) == ("two-writers", 1, 2)
    assert problem.sentence == (
        f"request 0 carries 2 tokens of page 2 and {says}: an unaligned prefix runs alone"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cp": 0}, "cp is 0 and page_size 4: both are 1 or more"),
        ({"page_size": 0}, "cp is 2 and page_size 0: both are 1 or more"),
        ({"prefix_lens": ints(4, -1)}, "prefix_lens of request 1 is -1: it is 0 or more"),
        ({"extend_lens": ints(-6, 15)}, "extend_lens of request 0 is -6: it is 0 or more"),
        ({"extend_lens": ints(6, 4)}, "extend_lens add up to 10 tokens; writer names 9"),
        ({"prefix_lens": ints(12, 0)}, "the requests have 6 pages; slot_pages lists 5"),
        (
            {"slot_pages": ints(1, 2, 3, 4, 0, 7)},
            (
                "slot 5 holds page 7 and no request: 4 slots are the requests' pages, "
                "padding is 0 or -1"
            ),
        ),
    ],
)
def test_tensors_that_contradict_each_other_are_told(change: dict[str, Any], says: str) -> None:
    """In one sentence, with both numbers."""
    assert batches.misfit(replace(GOOD, **change)) == says
