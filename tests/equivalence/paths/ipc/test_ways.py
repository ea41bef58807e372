"""Every way of composing pages comes to the bytes of one process, on every rank."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn_steps import Step, differing, run, step, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equivalence import receipt
from equivalence.candidate import name_of
from equivalence.checks.composed.strayed import REGIONS
from equivalence.paths.ipc import candidate, ways
from equivalence.paths.ipc import step as steps_of_ranks
from equivalence.paths.ipc.peers import Peers
from equivalence.paths.ipc.ways import WAYS, Composed, taken
from equivalence.world.link import Link
from equivalence.world.threads import Threads

if TYPE_CHECKING:
    from equivalence.candidate import Candidate

CHUNK = step([(24, 13)], cp=3)
MIXED = step([(8, 9), (4, 0), (0, 3), (0, 12), (3, 0)], cp=4, layers=5)
HITS = [[True, False, True], [False, True, True], [False, False], [True]]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(steps())
def test_every_way_gives_the_bytes_of_one_process(way: str, drawn: Step) -> None:
    """Whatever requests, ranks, owners, page sizes, kinds and layers."""
    assert differing(run(candidate.local(way), drawn), drawn) == []


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8, deadline=None)
@given(st.lists(steps(cp=3), min_size=2, max_size=4), st.integers(1, 2))
def test_steps_follow_each_other_in_the_same_memory(
    way: str, drawn: list[Step], times: int
) -> None:
    """What a step leaves behind is in no result of another."""
    ranks = candidate.local(way)
    for wanted in drawn * times:
        assert differing(run(ranks, wanted), wanted) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wanted", [CHUNK, MIXED], ids=["chunk", "mixed"])
def test_a_way_is_a_candidate_by_its_name(way: str, wanted: Step) -> None:
    """As `replay --candidate` finds it."""
    named: Candidate = getattr(candidate, way)
    assert name_of(named) == f"equivalence.paths.ipc.candidate:{way}"
    assert differing(run(named, wanted), wanted) == []


@settings(max_examples=25, deadline=None)
@given(steps(), st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=8))
def test_prefetch_hits_may_differ_by_rank_and_layer(drawn: Step, hits: list[list[bool]]) -> None:
    """Every rank runs as many rounds, hit or miss."""
    assert differing(run(candidate.local("prefetch", hits=hits), drawn), drawn) == []


def rounds(link: Link, way: str, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as a step's
    """How many barriers a rank runs while it composes, and whether it does without others."""
    told: list[str] = []

    def barrier() -> None:
        told.append("barrier")
        link.barrier()

    watched = Link(**{**vars(link), "barrier": barrier})
    steps_of_ranks.compose(watched, way=way, **call)
    return {"barriers": torch.tensor(len(told) - 2)}


@pytest.mark.parametrize("hits", [None, HITS])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requests", [[(24, 13)], [(8, 0)], []])
def test_there_is_one_barrier_a_layer_and_kind_where_others_read_it(
    way: str, hits: list[list[bool]] | None, requests: list[tuple[int, int]]
) -> None:
    """Also with nothing to send."""
    wanted = step(requests, cp=3)
    told = Threads(3).run(rounds, inputs=wanted.inputs, way=way, hits=hits, **wanted.params)
    barriers = 6 if WAYS[way].fenced else 0
    assert [int(outcome.outputs["barriers"]) for outcome in told] == [barriers] * 3


def half_blind(link: Link, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as a step's
    """Rank 1 cannot read what others export."""
    return steps_of_ranks.compose(Link(**{**vars(link), "peer_memory": link.rank != 1}), **call)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_without_peer_memory_sends_all_to_the_fallback(way: str) -> None:
    """The bytes are the same, and a receipt of every rank says which way was gone."""
    outcomes = Threads(3).run(half_blind, inputs=CHUNK.inputs, way=way, **CHUNK.params)
    with receipt.collected() as left:
        assert differing(candidate.stacked(outcomes), CHUNK) == []
    gone = "fallback" if WAYS[way].exports else way
    assert gone == taken(way, peer_memory=False)
    assert [(one.kernel, one.calls, one.arguments["asked"]) for one in left] == [
        (f"equivalence.paths.ipc.ways.{gone}", 3, way)
    ]
    assert left[0].arguments["peer_memory"] is False


def test_what_way_was_gone_is_told_with_peer_memory() -> None:
    """So that a silent fallback shows."""
    with receipt.collected() as left:
        run(candidate.direct, CHUNK)
    assert [(one.kernel, one.rows, one.arguments) for one in left] == [
        (
            "equivalence.paths.ipc.ways.direct",
            (len(CHUNK.inputs["slot_pages"]),),
            {"asked": "direct", "transport": "threads", "peer_memory": True},
        )
    ]


ONE_ROUND = step([(4, 5)], cp=2, layers=1, kinds=["token"], padding=0)
"""Half 0 alone is used; rank 0 writes slot 1 and rank 1 slot 2, from staging rows 1 and 2."""


@pytest.mark.parametrize(
    ("way", "region", "at"),
    [
        *((way, "pool", (0, 0, 2)) for way in WAYS),
        *((way, "pool", (1, 0, 0)) for way in WAYS if "pool" in WAYS[way].exports),
        *((way, "dense", (0, 1, 0)) for way in WAYS),
        ("dense", "dense", (0, 0, 3)),
        *(("direct", "staging", at) for at in [(0, 0, 0), (0, 0, 2), (0, 1, 1), (1, 0, 1)]),
    ],
)
def test_bytes_that_no_step_may_write_are_strays(
    monkeypatch: pytest.MonkeyPatch, way: str, region: str, at: tuple[int, int, int]
) -> None:
    """Rank 0 changes three bytes of a page: whose it is tells where they are and how many."""
    whose, part, page = at

    def spoils(peers: Peers, *given: Any, **settings: Any) -> Composed:  # noqa: ANN401 - as a way
        yield from WAYS[way].run(peers, *given, **settings)
        regions = peers.regions["token"]
        parts = {"pool": regions.pools, "staging": regions.staging, "dense": regions.dense}
        if not peers.rank:
            parts[region][whose][part, page, 7:10] ^= 255

    monkeypatch.setattr(ways, "WAYS", {**WAYS, way: replace(WAYS[way], run=spoils)})
    got = run(candidate.local(way), ONE_ROUND)
    assert differing(got, ONE_ROUND) == ["strays"]
    told = [[[-1] * 6], [[-1] * 6]]
    told[whose] = [[part, 0, REGIONS.index(region), page, 7, 3]]
    assert got["strays"].tolist() == told
