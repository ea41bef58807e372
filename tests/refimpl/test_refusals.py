"""What forbids a batch, rule by rule, with its ids."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged import made
from tiny import ints
from torch import Tensor

from refimpl import refusals
from refimpl.batch import Batch, Limits, split_writers
from refimpl.refusals import Problem

FREE = Limits()


def told(batch: Batch, *, pool_pages: int = 9, limits: Limits = FREE) -> list[Problem]:
    """Everything that forbids a batch."""
    return list(refusals.problems(batch, pool_pages=pool_pages, limits=limits))


GOOD = made([(4, 6), (0, 3)])
"""Pages 1 to 4 in slots 0 to 3; slot 0 is prefix; tokens 0-3 4-5 6-8 are on pages 2 3 4."""
ALONE = made([(6, 5)], cp=2)
"""Pages 1 2 3; page 2 carries two tokens of rank 1 and is written by rank 0: not yet legal."""


def test_a_batch_that_may_be_composed_has_no_problem() -> None:
    """Nor a carried page that its owner writes, nor as many staging pages as it takes, nor none."""
    assert told(GOOD) == []
    assert told(GOOD, pool_pages=5, limits=Limits(staging_pages=3)) == []
    assert told(replace(ALONE, owner=ints(-1, 0, 0, 0))) == []
    assert told(made([(6, 0), (3, 0)])) == []
    nothing = ints()
    padding = replace(made([]), slot_pages=ints(0, -1), owner=nothing, local_page=nothing)
    assert told(padding, pool_pages=1) == []


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
        "an owner below -1",
        {"owner": ints(-1, -2, 1, 0, 1)},
        Problem(rule="out-of-window", sentence="page 1 is owned by rank -2 of 2", slot=0, page=1),
    ),
    (
        "a local page below 0",
        {"local_page": ints(0, 1, -2, 3, 4)},
        Problem(
            rule="out-of-window",
            sentence="page 2 is local page -2 of rank 1, which has 9",
            slot=1,
            page=2,
            ranks=(1,),
        ),
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
        "a writer below -1",
        {"writer": ints(0, 0, 0, 0, 1, 1, -2, -2, -2)},
        Problem(rule="out-of-window", sentence="token 6 is written by rank -2 of 2"),
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
        "a page of nobody in a place that is none",
        {"owner": ints(-1, -1, 1, 0, 1), "local_page": ints(0, 0, 2, 3, 4)},
        Problem(rule="no-writer", sentence="page 1 has no owner", slot=0, page=1),
    ),
    (
        "a token that nobody writes beside one that is written",
        {"writer": ints(0, 0, 0, 0, 1, -1, 0, 0, 0)},
        Problem(
            rule="no-writer",
            sentence="page 3 has 1 current token that no rank writes",
            slot=2,
            page=3,
        ),
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


def test_pages_of_nobody_are_in_no_place_together() -> None:
    """Neither is told to be the other."""
    nobodys = replace(GOOD, owner=ints(-1, -1, -1, 0, 1), local_page=ints(0, 1, 1, 3, 4))
    assert told(nobodys) == [
        Problem(rule="no-writer", sentence=f"page {page} has no owner", slot=page - 1, page=page)
        for page in (1, 2)
    ]


def test_more_current_pages_than_staging_are_refused_by_those_that_have_none() -> None:
    """The pages past the capacity are listed."""
    assert told(GOOD, limits=Limits(staging_pages=1)) == [
        Problem(
            rule="over-budget",
            sentence="3 current pages do not fit into 1 staging pages: 3 4 have none",
            page=3,
        )
    ]
    many = made([(0, 60)])
    assert told(many, pool_pages=99, limits=Limits(staging_pages=2))[0].sentence == (
        "15 current pages do not fit into 2 staging pages: 3 4 5 6 7 8 9 10 and 5 more have none"
    )


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(max_tokens=9, max_requests=2), []),
        (Limits(max_tokens=9, max_requests=2, staging_pages=3), []),
        (Limits(max_tokens=8), ["9 new tokens are more than the 8 that are admitted"]),
        (
            Limits(max_requests=1),
            ["2 requests that extend are more than the 1 that are admitted"],
        ),
        (
            Limits(max_tokens=9, max_requests=2, staging_pages=4),
            ["staging has 4 pages; 9 tokens of 2 requests, as admitted, take 3"],
        ),
        (
            Limits(max_tokens=4, max_requests=1),
            [
                "9 new tokens are more than the 4 that are admitted",
                "2 requests that extend are more than the 1 that are admitted",
                "3 current pages do not fit into 2 staging pages: 4 have none",
            ],
        ),
    ],
)
def test_staging_is_that_of_the_admission_limits(limits: Limits, says: list[str]) -> None:
    """Neither more nor less, and no batch is beyond them."""
    assert [(each.rule, each.sentence) for each in told(GOOD, limits=limits)] == [
        ("over-budget", sentence) for sentence in says
    ]


def test_a_split_inside_a_pool_group_has_two_writers() -> None:
    """640 new tokens over two ranks: 320 each is a multiple of a page and not of 4 pages."""
    batch = replace(made([(0, 640)], page_size=64), writer=ints(*[0] * 320, *[1] * 320))
    assert told(batch, pool_pages=11) == []
    assert told(replace(batch, pool_group=4), pool_pages=11) == [
        Problem(
            rule="two-writers",
            sentence="pages 5 6 7 8 are one pool group of ranks 0 1: a split inside a group",
            slot=4,
            page=5,
            ranks=(0, 1),
        )
    ]
    legal = split_writers(prefix_lens=[0], extend_lens=[640], cp=2, page_size=256)
    assert told(replace(batch, writer=legal, pool_group=4), pool_pages=11) == []


def test_pool_groups_are_counted_from_a_requests_first_page() -> None:
    """The second request's first two pages are a group, in slots 1 and 2."""
    batch = replace(made([(0, 64), (0, 128)], page_size=64), pool_group=2)
    assert batch.writer.tolist() == [0] * 128 + [1] * 64
    assert [(each.slot, each.sentence) for each in told(batch)] == [
        (1, "pages 2 3 are one pool group of ranks 0 1: a split inside a group")
    ]


def test_a_pool_group_with_prefix_is_its_owners() -> None:
    """A chunk that goes on inside a group overwrites the row of the pages before it."""
    own = replace(
        made([(64, 64), (0, 64)], page_size=64), owner=ints(-1, 0, 0, 1), writer=ints(*[0] * 128)
    )
    assert told(replace(own, pool_group=2)) == []
    other = replace(own, pool_group=2, writer=ints(*[1] * 64, *[0] * 64))
    assert [each.sentence for each in told(other)] == [
        "pages 1 2 are one pool group of ranks 0 1: a split inside a group"
    ]


@pytest.mark.parametrize("staging_pages", [0, 1, 2])
def test_what_was_admitted_is_what_the_rule_counts(staging_pages: int) -> None:
    """A prefix of 70 and 60 new tokens: its carried prefix takes a second page."""
    over = {
        each.rule
        for each in told(made([(70, 60)], page_size=64), limits=Limits(staging_pages=staging_pages))
    }
    assert ("over-budget" in over) is (staging_pages < 2)


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
        ({"cp": 0}, "cp is 0: it is 1 or more"),
        ({"page_size": 0}, "page_size is 0: it is 1 or more"),
        ({"prefix_lens": ints(4, -1)}, "prefix_lens of request 1 is -1: it is 0 or more"),
        ({"local_page": ints(0, 1)}, "owner has 5 entries and local_page 2: they have as many"),
        (
            {"prefix_lens": ints(4)},
            "prefix_lens has 1 entries and extend_lens 2: they have as many",
        ),
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
    assert refusals.misfit(replace(GOOD, **change)) == says


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_tensors_that_fit_each_other_are_let_pass(
    requests: list[tuple[int, int]], page_size: int, padding: int
) -> None:
    """Whatever the lengths are."""
    assert refusals.misfit(made(requests, page_size=page_size, padding=padding)) == ""
