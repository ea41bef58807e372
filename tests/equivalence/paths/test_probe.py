"""Growing contexts: fresh tensors come and go at every size, a workspace is always there."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from equivalence import memory
from equivalence.errors import UsageError
from equivalence.paths import parts, probe, waves, workspace

SMALL: dict[str, Any] = {
    "contexts": (320, 640, 1_280, 25_600),
    "rows": 16,
    "topk": 8,
    "head_dim": 32,
    "budget_bytes": 40_000,
}
WIDEST = 6_400


def test_fresh_tensors_leave_nothing_alive_and_a_workspace_stays() -> None:
    """Live bytes are 0 or the workspace; its calls never hold more than what they return."""
    got = probe.probe(**SMALL)
    held = workspace.reserve(rows=16, widest=WIDEST, topk=8, budget_bytes=40_000).held_bytes
    assert {way: [step.context for step in steps] for way, steps in got.items()} == {
        way: [0, 320, 640, 1_280, 25_600] for way in ("per-call", "workspace")
    }
    assert [step.live for step in got["per-call"]] == [0] * 5
    assert [step.live for step in got["workspace"]] == [held] * 5
    assert {step.reserved for steps in got.values() for step in steps} == {None}


def test_the_peak_of_fresh_tensors_grows_with_the_context() -> None:
    """A call's scores, twice where a chunk is made while the one before it is still held.

    Over the workspace a call holds as much at every context.
    """
    got = probe.probe(**SMALL)
    (rest,) = {step.peak - step.live for step in got["workspace"][1:]}
    for step in got["per-call"][1:]:
        cut = waves.geometry(rows=16, longest=step.context // 4, widest=WIDEST, budget_bytes=40_000)
        scores = cut.most_bytes * min(2, len(cut.chunks))
        assert 0 <= step.peak - scores <= rest + 4 * 16 * 8
    peaks = [step.peak for step in got["per-call"]]
    assert all(a < b for a, b in pairwise(peaks))


def test_parts_of_the_caller_run_in_both_ways() -> None:
    """Each chunk of each call is scored and selected from, over the same geometry."""
    seen: dict[str, list[tuple[int, ...]]] = {"scored": [], "selected": []}

    def score(*, out: Tensor, **_: object) -> None:
        seen["scored"].append(tuple(out.shape))
        out.zero_()

    def select(*, scores: Tensor, **rest: Tensor) -> None:
        seen["selected"].append(tuple(scores.shape))
        parts.reference_topk(scores=scores, **rest)

    probe.probe(**SMALL, scorer=score, selector=select)
    assert seen["scored"] == seen["selected"]
    half = len(seen["scored"]) // 2
    assert seen["scored"][:half] == seen["scored"][half:]
    assert seen["scored"][0] == (16, 128)
    assert seen["scored"][half - 1] == (1, WIDEST)


def test_a_context_shorter_than_the_rows_has_padding_rows() -> None:
    """They see nothing."""
    got = probe.probe(**SMALL | {"contexts": (8,)})
    assert [step.context for step in got["per-call"]] == [0, 8]


def test_the_allocator_s_bytes_are_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved bytes add up from call to call, as the cache is never emptied in between."""
    taken = iter([5, 0, 7, 100, 30, 0])

    @contextmanager
    def measured(_: object) -> Iterator[memory.Meter]:
        yield memory.Meter(peak=3, live=1, reserved=next(taken))

    monkeypatch.setattr(memory, "measured", measured)
    got = probe.probe(**SMALL | {"contexts": (320, 640)})
    assert [(s.peak, s.live, s.reserved) for s in got["per-call"]] == [
        (3, 1, 5),
        (4, 2, 5),
        (5, 3, 12),
    ]
    assert [s.reserved for s in got["workspace"]] == [100, 130, 130]


def test_the_default_contexts_are_those_of_the_published_probe() -> None:
    """From 3,200 to 256,000 tokens, each more than the one before."""
    assert (probe.CONTEXTS[0], probe.CONTEXTS[-1]) == (3_200, 256_000)
    assert all(a < b for a, b in pairwise(probe.CONTEXTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": ()}, "contexts is empty: it takes the tokens of one call or more"),
        ({"contexts": (4, 0)}, "contexts[1] is 0: it is a whole number, 1 or more"),
        ({"rows": 0}, "rows is 0: it is a whole number, 1 or more"),
        ({"budget_bytes": 0}, "budget_bytes is 0: it is a whole number, 1 or more"),
    ],
)
def test_numbers_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    """In one sentence."""
    with pytest.raises(UsageError) as raised:
        probe.probe(**SMALL | change)
    assert str(raised.value) == message
