"""A batch as data: its slots, its splits, and what its stagings hold."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import made
from tiny import ints

from refimpl import batch as batches

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


@given(REQUESTS, st.integers(1, 70))
def test_admission_counts_the_carried_prefix(
    requests: list[tuple[int, int]], page_size: int
) -> None:
    """A request is charged for the pages that its new tokens stand in, one by one."""
    prefix, extend = ints(*(p for p, _ in requests)), ints(*(e for _, e in requests))
    charged = batches.admitted_pages(prefix_lens=prefix, extend_lens=extend, page_size=page_size)
    assert charged.tolist() == [
        len({(old + token) // page_size for token in range(new)}) for old, new in requests
    ]


def test_a_prefix_of_70_and_60_new_tokens_take_two_pages() -> None:
    """60 tokens alone would take one; two that fill a page up take none more."""
    charged = batches.admitted_pages(
        prefix_lens=ints(70, 62, 70), extend_lens=ints(60, 2, 0), page_size=64
    )
    assert charged.tolist() == [2, 1, 0]


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
        batches.admitted_pages(
            prefix_lens=ints(*(prefix for prefix, _ in admitted)),
            extend_lens=ints(*(extend for _, extend in admitted)),
            page_size=page_size,
        )
        for admitted in admissions(tokens, requests, page_size)
    )
    capacity = batches.staging_capacity(
        max_tokens=tokens, max_requests=requests, page_size=page_size
    )
    assert capacity == max(int(pages.sum()) for pages in taken)
