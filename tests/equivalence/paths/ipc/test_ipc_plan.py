"""A plan is that of its batch, whatever memory the batch is in; a batch that is none is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_steps import Step, differing, run, step, steps
from hypothesis import given, settings
from torch import Tensor

from equivalence.paths.ipc import candidate
from equivalence.paths.ipc import step as steps_of_ranks
from equivalence.paths.ipc.candidate import RanksFailed
from equivalence.paths.ipc.plan import Plan, build, capacity, planner, room
from equivalence.paths.ipc.ways import WAYS
from equivalence.world.link import Link
from equivalence.world.threads import Threads
from refimpl import batch as batches
from refimpl.batch import Batch, Limits

CPU = torch.device("cpu")


def of(held: Callable[..., Plan], batch: Batch, **more: Any) -> Plan:  # noqa: ANN401 - as `plan.of`
    """The plan of rank 0."""
    return held(batch, **{"rank": 0, "device": CPU, "pool_pages": 20, **more})


def order(plan: Plan) -> list[int]:
    """The rows that rank 0's pool is read in."""
    return plan.prefix[0].rows.tolist()


def two(*pages: int) -> Batch:
    """A request whose prefix is in these pages, each at its own number in the pool of rank 0."""
    return Batch(
        slot_pages=torch.tensor(pages, dtype=torch.int32),
        owner=torch.zeros(9, dtype=torch.int32),
        local_page=torch.arange(9, dtype=torch.int32),
        writer=torch.empty(0, dtype=torch.int32),
        prefix_lens=torch.tensor([8], dtype=torch.int32),
        extend_lens=torch.tensor([0], dtype=torch.int32),
        cp=2,
        page_size=4,
    )


def test_a_batch_changed_in_place_has_another_plan() -> None:
    """Pages [3, 5], then [5, 3] in the same storage."""
    held, batch = planner(), two(3, 5)
    first = of(held, batch)
    batch.slot_pages.copy_(torch.tensor([5, 3]))
    second = of(held, batch)
    assert (order(first), order(second)) == ([3, 5], [5, 3])


def test_a_batch_where_another_was_has_another_plan() -> None:
    """The tensor is gone, and the next one may have its address."""
    held = planner()
    assert [order(of(held, two(*pages))) for pages in ((3, 5), (5, 3))] == [[3, 5], [5, 3]]


def test_a_batch_that_comes_again_has_its_plan() -> None:
    """Also in other memory, and another for another rank, limit or pattern of hits."""
    held = planner()
    first = of(held, two(3, 5))
    assert of(held, two(3, 5)) is first
    others: list[dict[str, Any]] = [
        {"rank": 1},
        {"pool_pages": 21},
        {"limits": Limits(staging_pages=1)},
        {"hits": [True]},
        {"device": torch.device("meta")},
    ]
    assert all(of(held, two(3, 5), **other) is not first for other in others)
    for size in range(1, 90):
        of(held, two(3, 5), pool_pages=20 + size)
    assert of(held, two(3, 5)) is not first


def test_the_same_tensors_in_other_sizes_have_another_plan() -> None:
    """Three tokens are one page of three and of four; two ranks and three have the same pool."""
    held, batch = planner(), replace(two(3), prefix_lens=torch.tensor([3], dtype=torch.int32))
    others: list[dict[str, Any]] = [{}, {"page_size": 3}, {"cp": 3}]
    plans = [of(held, replace(batch, **other)) for other in others]
    assert [(plan.page_size, plan.ranks) for plan in plans] == [(4, 2), (3, 2), (4, 3)]


@settings(max_examples=100, deadline=None)
@given(steps())
def test_plans_of_all_ranks_share_out_a_batch(drawn: Step) -> None:
    """Each current page and token is one rank's; each slot is read once, or is padding."""
    batch = drawn.batch
    plans = [build(batch, rank=rank, device=CPU) for rank in range(batch.cp)]
    now = batches.current_slots(batch)
    every = [plan.own for plan in plans]
    assert torch.cat(every).sort().values.tolist() == list(range(len(batch.writer)))
    for name, where in (("dense", now), ("compact", torch.arange(len(now)))):
        pages = torch.cat([getattr(plan, name).pages for plan in plans])
        assert torch.equal(pages.sort().values, where)
    rows = torch.cat([plan.staging.pages for plan in plans])
    assert rows.sort().values.tolist() == list(range(1, len(now) + 1))
    for plan in plans:
        read = torch.cat([*(part.slots for part in plan.table), plan.padding])
        assert read.sort().values.tolist() == list(range(plan.slots))
        assert plan.capacity >= len(now)
        assert sum(len(span.places.tokens) for span in plan.spans) == len(plan.own)


@pytest.mark.parametrize(("pages", "rows"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_room_is_the_power_of_two_that_is_enough(pages: int, rows: int) -> None:
    """At least one."""
    assert room(pages) == rows


def test_capacity_is_the_limit_where_there_is_one() -> None:
    """Never the batch's own then."""
    batch = step([(0, 9)], cp=2).batch
    admitted = {"max_tokens": 9, "max_requests": 2}
    known = [Limits(), Limits(staging_pages=7), Limits(**admitted)]
    assert [capacity(batch, limits) for limits in known] == [4, 7, 3]


def untouched(link: Link, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as a step's
    """A step whose rank says what it exported before it was refused."""
    names: list[str] = []

    def export(name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        names.append(name)
        return link.export(name, shape)

    try:
        return steps_of_ranks.compose(replace(link, export=export), **call)
    except ValueError as error:
        raise ValueError(f"{error}; exported {names}") from error


def changed(name: str, at: int, value: int) -> Callable[[Step], Step]:
    """A step with another number in one of its tensors."""

    def change(wanted: Step) -> Step:
        tensor = wanted.inputs[name].clone()
        tensor[at] = value
        return Step(inputs={**wanted.inputs, name: tensor}, params=wanted.params)

    return change


def limited(pages: int) -> Callable[[Step], Step]:
    """A step with so many staging pages."""
    return lambda wanted: Step(
        inputs=wanted.inputs, params={**wanted.params, "staging_pages": pages}
    )


def without(name: str) -> Callable[[Step], Step]:
    """A step with one layer less of a tensor, or of a batch's with one number less."""
    return lambda wanted: Step(
        inputs={**wanted.inputs, name: wanted.inputs[name][:-1]}, params=wanted.params
    )


REFUSED = [
    (changed("slot_pages", 1, 99), "page 99 is none of 9 logical pages"),
    (changed("slot_pages", 0, 0), "request 0 relies on page 0"),
    (changed("writer", 1, 2), "is written by ranks"),
    (changed("writer", 1, -1), "that no rank writes"),
    (limited(2), "3 current pages do not fit into 2 staging pages"),
    (without("writer"), "token_rows|index_rows|writer"),
    (without("token_rows"), "token: rows are"),
    (without("slot_pages"), "the requests have 5 pages; slot_pages lists 4"),
    (changed("extend_lens", 0, -1), "extend_lens of request 0 is -1"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_a_batch_that_may_not_be_composed_is_refused_on_every_rank(
    way: str, change: Callable[[Step], Step], says: str
) -> None:
    """With the same sentence and its ids, before anything is exported."""
    wanted = change(step([(8, 9)], cp=3, padding=0))
    outcomes = Threads(3).run(untouched, inputs=wanted.inputs, way=way, **wanted.params)
    told = {outcome.message.partition(" raised ")[2] for outcome in outcomes}
    assert len(told) == 1
    message = told.pop()
    assert message.startswith("ValueError: ")
    assert any(part in message for part in says.split("|"))
    assert message.endswith("exported []")


@pytest.mark.parametrize(
    ("inputs", "params", "says"),
    [
        ({}, {"cp": 2}, "the batch is one of 2 ranks; 3 run"),
        ({"token_rows": None}, {}, "compose_pages lacks token_rows"),
        ({"rows": torch.zeros(1)}, {}, "compose_pages has no input rows"),
        ({f"{k}_{w}": None for k in ("token", "index") for w in ("pools", "rows")}, {}, "nothing"),
        ({"token_pools": torch.zeros(1, 3, 4, dtype=torch.uint8)}, {}, "they have 4 and 3"),
        ({"index_pools": torch.zeros(1, 3, 12, 20, dtype=torch.uint8),
          "index_rows": torch.zeros(1, 9, 5, dtype=torch.uint8)}, {}, "each has the same number"),
        ({}, {"way": "by carrier pigeon"}, "no way named 'by carrier pigeon': one of legacy"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(
    inputs: dict[str, Tensor], params: dict[str, Any], says: str
) -> None:
    """On every rank, with what would be right."""
    wanted = step([(8, 9)], cp=3)
    settings_of = {"way": "direct", **wanted.params, **params}
    outcomes = Threads(3).run(
        steps_of_ranks.compose, inputs={**wanted.inputs, **inputs}, **settings_of
    )
    assert all(says in outcome.message for outcome in outcomes), outcomes[0].message


def otherwise(link: Link, change: str, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as a step's
    """Rank 1 is given something else."""
    if link.rank == 1:
        if change == "layers":
            call["token_pools"] = call["token_pools"][:-1]
        elif change == "pages":
            call["slot_pages"] = call["slot_pages"].flip(0)
        elif change in ("page_size", "turn"):
            call[change] = 2
        else:
            call["token_pools"] = call["token_pools"].view(torch.uint8)
    return steps_of_ranks.compose(link, **call)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("layers", "dimension 0 of token_pools differs by rank: 2 on rank 1, 3 on rank 0"),
        ("pages", "what slot_pages holds differs by rank: "),
        ("page_size", "setting page_size differs by rank: "),
        ("turn", "setting turn differs by rank: "),
        ("dtype", "what token_pools holds differs by rank: "),
    ],
)
def test_ranks_that_were_given_different_things_are_refused(change: str, says: str) -> None:
    """On every rank alike, before a byte is moved."""
    wanted = step([(8, 9)], cp=3)
    outcomes = Threads(3).run(
        otherwise, inputs=wanted.inputs, way="fused", change=change, **wanted.params
    )
    assert [outcome.rule for outcome in outcomes] == ["crash"] * 3
    assert all(says in outcome.message for outcome in outcomes), outcomes[0].message


def test_a_way_that_is_none_is_refused_before_ranks_run() -> None:
    """By the names there are."""
    with pytest.raises(ValueError, match="no way named 'post': one of legacy, fused"):
        candidate.over(Threads(2), "post")


def test_a_refused_step_leaves_the_ranks_as_they_were() -> None:
    """The next one is composed."""
    ranks = candidate.local("direct")
    wanted = step([(8, 9)], cp=3)
    with pytest.raises(RanksFailed, match="do not fit into 2 staging pages") as caught:
        run(ranks, limited(2)(wanted))
    assert (caught.value.rule, caught.value.rank) == ("crash", 0)
    assert differing(run(ranks, wanted), wanted) == []
