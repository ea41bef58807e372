"""A bounded workspace used again gives what fresh tensors give, and holds one size."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import batches
import pytest
import torch
from batches import DRAWN, call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import parts, qsa, waves, workspace
from equivalence.paths.chunked import original
from equivalence.planted import reused
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status
from refimpl.bits import as_int
from refimpl.scoring import qsa_logits
from refimpl.topk import ragged_topk

FAULTS = ("stale_columns", "view_kept", "workspace_shared")
GARBAGE = (float("inf"), float("nan"), -1.2345e33, 0.0)
BUDGETS = st.sampled_from([1, 256, 1000, 3 * 256, 1 << 20])
BATCH = [(5, 11), (1, 70), (0, 6), (6, 13)]


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether both hold the same outputs, bit for bit."""
    return set(got) == set(want) and all(
        torch.equal(as_int(tensor), as_int(want[name])) for name, tensor in got.items()
    )


def qsa_case(lengths: list[tuple[int, int]], *, seed: int = 0, page_size: int = 4) -> Case:
    """Requests of (new rows, tokens) as a case of qsa_logits; keys repeat, so that scores tie."""
    random = torch.Generator().manual_seed(seed)
    extend, total = (torch.tensor(n, dtype=torch.int32) for n in zip(*lengths, strict=True))
    ends = extend.cumsum(0)
    position = torch.cat([torch.arange(t - n, t) for n, t in lengths])
    pages = max(1, int(-(-total.max() // (4 * page_size))))
    table = torch.randperm(len(lengths) * pages, generator=random).int().view(-1, pages)
    keys = torch.randn(7, 32, generator=random).bfloat16()
    count = len(lengths) * pages * page_size
    return Case(
        op="qsa_logits",
        inputs={
            "q": torch.randn(int(ends[-1]), 4, 32, generator=random).bfloat16(),
            "k_cache": keys[torch.arange(count) % 7].view(-1, page_size, 1, 32),
            "page_table": table,
            "visible_blocks": ((position + 1) // 4).int(),
            "query_start_loc": torch.cat([ends.new_zeros(1), ends]).int(),
        },
        params={"page_size": page_size},
        arithmetic="vllm_qsa_prefill.sm90",
    )


QSA_LENGTHS = st.lists(
    st.integers(1, 90).flatmap(lambda t: st.tuples(st.integers(1, min(t, 5)), st.just(t))),
    min_size=1,
    max_size=3,
)


def picks_case(case: Case, topk: int) -> Case:
    """The selection of a case of qsa_logits, judged by the reference's scores."""
    visible = case.inputs["visible_blocks"]
    given: dict[str, Any] = {**case.inputs, **case.params}
    return Case(
        op="ragged_topk",
        inputs={
            "scores": qsa_logits(**given),
            "row_start": torch.zeros_like(visible),
            "row_end": visible,
        },
        params={"k": topk},
    )


def sees(shapes: list[tuple[int, int]]) -> parts.Selector:
    """The reference selector, which also writes down the shape of every view."""

    def select(*, scores: Tensor, **rest: Tensor) -> None:
        shapes.append((scores.shape[0], scores.shape[1]))
        parts.reference_topk(scores=scores, **rest)

    return select


@given(
    batch=DRAWN,
    budget=BUDGETS,
    micro_batches=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 4]),
    form=st.sampled_from(["page_table", "slot_map", "offset"]),
)
def test_dense_layers_are_those_of_the_reference(
    batch: Any,  # noqa: ANN401 - lengths
    budget: int,
    micro_batches: int,
    ratio: int,
    form: Any,  # noqa: ANN401 - one of three words
) -> None:
    """Reused, fresh and the reference have the same logits, picks and slots."""
    case = batches.case(batch, ratio=ratio, form=form)
    how = {"budget_bytes": budget, "micro_batches": micro_batches, "keep_logits": True}
    whole = len(case.inputs["q"]) and len(case.inputs["k"])
    want = right_outputs(case) if whole else call(case, original, keep_logits=True)
    assert same(call(case, workspace.fresh, **how), want)
    assert same(call(case, workspace.reused, **how), want)


@given(
    lengths=QSA_LENGTHS,
    budget=BUDGETS,
    micro_batches=st.integers(1, 3),
    page_size=st.sampled_from([4, 24]),
)
def test_qsa_layers_are_those_of_the_reference(
    lengths: list[tuple[int, int]], budget: int, micro_batches: int, page_size: int
) -> None:
    """Reused, fresh and the reference have the same logits and the same blocks."""
    case = qsa_case(lengths, page_size=page_size)
    select = picks_case(case, 5)
    given: dict[str, Any] = {**select.inputs, **select.params}
    picks = ragged_topk(**given)
    want = {"logits": select.inputs["scores"], "raw_indices": picks}
    how = {"budget_bytes": budget, "micro_batches": micro_batches}
    for way in (qsa.fresh, qsa.reused):
        assert same(call(case, way, topk=5, keep_logits=True, **how), want)
        assert same(call(case, way, **how), {"logits": want["logits"]})


@pytest.mark.parametrize("way", [workspace.fresh, workspace.reused])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_judge_calls_dense_layers_equal(way: Any, micro_batches: int) -> None:  # noqa: ANN401 - a candidate
    """Logits, picks and slots, chunk by chunk of two rows."""
    how = {"budget_bytes": 8 * 70, "micro_batches": micro_batches, "keep_logits": True}
    verdict = check(batches.case(BATCH), partial(way, **how))
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    assert set(verdict.stages) == {"logits", "raw_indices", "page_indices"}


@pytest.mark.parametrize("way", [qsa.fresh, qsa.reused])
def test_the_judge_calls_qsa_layers_equal(way: Any) -> None:  # noqa: ANN401 - a candidate
    """Logits by their op, blocks by the scores of the reference."""
    case = qsa_case([(5, 90), (3, 40), (4, 17)])
    how = {"budget_bytes": 600}
    assert check(case, partial(way, **how)).status is Status.EQUAL
    blocks = call(case, way, topk=5, **how)["raw_indices"]
    assert check(picks_case(case, 5), lambda **_: blocks).status is Status.EQUAL


@given(batch=DRAWN.filter(len), budget=BUDGETS, micro_batches=st.integers(1, 3))
def test_both_ways_hand_a_selector_the_same_geometry(
    batch: Any,  # noqa: ANN401 - lengths
    budget: int,
    micro_batches: int,
) -> None:
    """The rows and the width of every chunk are those of the engine's own formula."""
    case = batches.case(batch)
    shapes: list[list[tuple[int, int]]] = [[], []]
    for way, told in zip((workspace.fresh, workspace.reused), shapes, strict=True):
        call(case, way, budget_bytes=budget, micro_batches=micro_batches, selector=sees(told))
    assert shapes[0] == shapes[1]
    if micro_batches == 1:
        visible = case.inputs["row_end"] - case.inputs["row_start"]
        most = int(visible.max()) if len(visible) else 0
        width = max(64, -(-most // 64) * 64)
        step = max(1, budget // (4 * width))
        rows = len(visible)
        assert shapes[0] == [(min(step, rows - i), width) for i in range(0, rows, step)]


def test_the_width_is_that_of_the_longest_request_in_tokens() -> None:
    """257 tokens are 65 blocks; no row sees the open one, and the width is all 72 of the table."""
    case = qsa_case([(2, 257)], page_size=24)
    shapes: list[tuple[int, int]] = []
    how = {"topk": 3, "selector": sees(shapes)}
    want = call(case, qsa.reused, **how)
    assert same(call(case, qsa.reused, max_seq_len=257, **how), want)
    assert shapes == [(2, 64), (2, 72)]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_lies_outside_visible_never_changes_a_pick(garbage: float) -> None:
    """The same picks whatever the workspace held, +inf and NaN included."""
    dense, sparse = batches.case(BATCH), qsa_case([(5, 90), (3, 40)])
    for case, way, widest in (
        (dense, workspace.reused, 128),
        (sparse, partial(qsa.reused, topk=5), 24),
    ):
        held = workspace.reserve(rows=12, widest=widest, topk=5, budget_bytes=600)
        held.scores.fill_(garbage)
        held.scratch.fill_(123456)
        got = call(case, way, workspaces=[held], budget_bytes=600)
        assert same(got, call(case, way, budget_bytes=600))


def test_later_chunks_and_layers_alias_earlier_views() -> None:
    """Every view begins where the workspace begins; what a narrow one leaves out stays stale."""
    at: set[int] = set()
    layers: list[list[tuple[int, int]]] = [[(9, 80)], BATCH, [(3, 7)], [(8, 8)]]
    cases = [batches.case(batch, seed=i) for i, batch in enumerate(layers)]
    budget: dict[str, Any] = {"budget_bytes": 2 * 4 * 128}
    held = workspace.reserve(rows=12, widest=128, topk=4, **budget)
    held.scores.fill_(77.0)

    def select(*, scores: Tensor, **rest: Tensor) -> None:
        at.add(scores.data_ptr())
        parts.reference_topk(scores=scores, **rest)

    for case in cases:
        got = call(case, workspace.reused, workspaces=[held], selector=select, **budget)
        assert same(got, call(case, workspace.fresh, **budget))
    assert at == {held.scores.data_ptr()}
    # No row saw more than 80 columns, and none of those in the second place more than 79.
    kept = (held.scores == 77.0).nonzero().flatten().tolist()
    assert kept == [*range(80, 128), *range(128 + 79, 256)]


def test_views_and_scratch_share_no_memory() -> None:
    """The largest view and the largest scratch end before the other begins."""
    held = workspace.reserve(rows=9, widest=80, topk=4, budget_bytes=2000)
    view, picks = held.view(6, 80), held.picks(6, 4)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (view, picks))
    assert spans[0][1] <= spans[1][0]
    assert (view.is_contiguous(), picks.is_contiguous()) == (True, True)


@given(
    rows=st.integers(0, 40),
    widest=st.integers(0, 300),
    longest=st.integers(0, 300),
    topk=st.integers(1, 8),
    budget=st.integers(1, 5000),
)
def test_a_workspace_holds_every_chunk_it_was_reserved_for(
    rows: int, widest: int, longest: int, topk: int, budget: int
) -> None:
    """At least one row of the widest width fits; no chunk of any narrower launch is refused."""
    held = workspace.reserve(rows=rows, widest=widest, topk=topk, budget_bytes=budget)
    assert held.view(1, widest).shape == (1, widest)
    assert held.scores.nbytes <= max(4 * widest, budget)
    cut = waves.geometry(
        rows=rows, longest=min(longest, widest), widest=widest, budget_bytes=budget
    )
    for begin, end in cut.chunks:
        assert held.view(end - begin, cut.width).shape == (end - begin, cut.width)
        assert held.picks(end - begin, topk).shape == (end - begin, topk)
    assert cut.most_bytes <= max(4 * widest, budget)


def test_growing_contexts_keep_every_size_or_one() -> None:
    """Fresh tensors of 128 rows leave all sizes behind, a workspace is one, and smaller."""
    contexts = range(800, 64_001, 3_200)
    how: dict[str, Any] = {"rows": 128, "widest": 64_000, "budget_bytes": 16 << 20}
    fresh = [waves.geometry(longest=n, **how).most_bytes for n in contexts]
    held = workspace.reserve(topk=512, **how)
    want = [4 * 128 * -(-n // 64) * 64 for n in contexts if n < 32_000]
    assert fresh[: len(want)] == want
    kept = workspace.kept_bytes(fresh)
    assert kept >= sum(want)
    assert held.scores.nbytes == 16 << 20
    assert held.held_bytes == (16 << 20) + 4 * 128 * 512
    assert workspace.kept_bytes([held.held_bytes] * len(fresh)) == held.held_bytes < kept // 5


@pytest.mark.parametrize(
    ("sizes", "kept"), [([], 0), ([3, 3, 2], 3), ([2, 3, 2, 5], 10), ([5, 3, 2], 5)]
)
def test_a_freed_block_serves_what_fits_into_it(sizes: list[int], kept: int) -> None:
    """Only a size larger than all before it takes memory."""
    assert workspace.kept_bytes(sizes) == kept


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: workspace.reserve(rows=4, widest=80, topk=4, budget_bytes=640).view(3, 80),
            "a view of 3 x 80 takes 240 scores; the workspace reserved 160",
        ),
        (
            lambda: workspace.reserve(rows=2, widest=80, topk=4, budget_bytes=640).picks(3, 4),
            "a view of 3 x 4 takes 12 picks; the workspace reserved 8",
        ),
        (
            lambda: workspace.reserve(rows=-1, widest=80, topk=4),
            "rows is -1; it is 0 or more",
        ),
        (
            lambda: workspace.reserve(rows=1, widest=80, topk=4, budget_bytes=0),
            "budget_bytes is 0: it is a whole number, 1 or more",
        ),
        (
            lambda: call(batches.case(BATCH), workspace.fresh, budget_bytes=-5),
            "budget_bytes is -5: it is a whole number, 1 or more",
        ),
        (
            lambda: call(batches.case(BATCH), workspace.fresh, micro_batches=0),
            "micro_batches is 0: it is a whole number, 1 or more",
        ),
        (
            lambda: call(batches.case(BATCH), workspace.fresh, selector="best"),
            "no selector named 'best': one of reference, torch, sgl_kernel",
        ),
        (
            lambda: call(
                batches.case(BATCH),
                workspace.reused,
                workspaces=[workspace.reserve(rows=12, widest=99, topk=4)],
                micro_batches=2,
            ),
            "2 micro-batches take one workspace each, not 1",
        ),
        (
            lambda: call(
                batches.case(BATCH),
                workspace.reused,
                workspaces=[workspace.reserve(rows=12, widest=100, topk=4)] * 2,
                micro_batches=2,
            ),
            "micro-batches 0 and 1 share a workspace: they take one each",
        ),
        (
            lambda: call(qsa_case([(2, 50)]), qsa.fresh, max_seq_len=44),
            "max_seq_len 44 has 11 blocks; a row sees 12",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(make: Any, message: str) -> None:  # noqa: ANN401 - a function
    """Both values are in it."""
    with pytest.raises(UsageError) as raised:
        make()
    assert str(raised.value) == message


def test_a_workspace_too_small_for_the_launch_is_refused() -> None:
    """It was reserved for 50 columns, the launch has 100."""
    small = workspace.reserve(rows=12, widest=50, topk=4, budget_bytes=1)
    with pytest.raises(UsageError) as raised:
        call(batches.case(BATCH), workspace.reused, workspaces=[small], budget_bytes=1)
    assert str(raised.value) == "a view of 1 x 128 takes 128 scores; the workspace reserved 50"


def test_no_rows_give_no_picks() -> None:
    """A call of no rows, dense or QSA, has outputs of no rows."""
    case = batches.case([(0, 6)])
    got = call(case, workspace.reused, keep_logits=True, micro_batches=2)
    assert {name: list(t.shape) for name, t in got.items()} == {
        "logits": [0, 6],
        "raw_indices": [0, 4],
        "page_indices": [0, 4],
    }
    empty = qsa_case([(1, 9)])
    inputs: dict[str, Any] = {
        **empty.inputs,
        "q": empty.inputs["q"][:0],
        "visible_blocks": empty.inputs["visible_blocks"][:0],
        "query_start_loc": torch.zeros(2, dtype=torch.int32),
    }
    got = qsa.reused(**inputs, page_size=4, topk=3, keep_logits=True)
    assert {name: list(t.shape) for name, t in got.items()} == {
        "logits": [0, 4],
        "raw_indices": [0, 3],
    }


@pytest.mark.parametrize("way", [workspace.fresh, workspace.reused])
def test_rows_without_columns_pick_nothing(way: Any) -> None:  # noqa: ANN401 - a candidate
    """Three rows of two requests that have no key yet: pads alone, and logits of no width."""
    case = batches.case([(1, 1), (2, 3)], ratio=4, form="slot_map")
    got = call(case, way, keep_logits=True, budget_bytes=256)
    pads = torch.full((3, 4), -1, dtype=torch.int32)
    want = {"logits": torch.empty(3, 0), "raw_indices": pads, "page_indices": pads}
    assert same(got, want)


def test_one_request_needs_no_query_start_loc() -> None:
    """Its rows are all rows of the call, whatever the chunk."""
    case = qsa_case([(5, 90)])
    alone = {n: t for n, t in case.inputs.items() if n != "query_start_loc"}
    for budget in (1, 700):
        how = {"topk": 3, "keep_logits": True, "budget_bytes": budget}
        got = call(replace(case, inputs=alone), qsa.reused, **how)
        assert same(got, call(case, qsa.fresh, **how))


def test_windows_are_copied_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row give what one block gives."""
    case = batches.case(BATCH)
    want = call(case, workspace.reused, keep_logits=True)
    monkeypatch.setattr(waves, "_CELLS", 1)
    assert same(call(case, workspace.reused, keep_logits=True), want)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_different_by_its_rule(name: str, seed: int) -> None:
    """The judge sees it in dense layers and in QSA, and the honest path beside it is equal."""
    fault = next(f for f in reused.FAULTS.values() if f.candidate is getattr(reused, name))
    how: dict[str, Any] = {
        "budget_bytes": 2 * 4 * 100,
        "micro_batches": 2 if name == "workspace_shared" else 1,
    }
    case = batches.case(BATCH, seed=seed, tie_rich=False)
    verdict = check(case, partial(getattr(reused, name), **how))
    assert verdict.status is Status.DIFFERENT
    assert {f.rule for f in verdict.findings} <= fault.rules
    assert check(case, partial(workspace.reused, **how)).status is Status.EQUAL
    sparse = qsa_case([(5, 90), (3, 80), (4, 23)], seed=seed)
    told = {
        way: check(
            picks_case(sparse, 5),
            lambda way=way, **_: call(sparse, way, topk=5, **how)["raw_indices"],
        )
        for way in (partial(getattr(reused, name), path=qsa.layer), qsa.reused)
    }
    assert [v.status for v in told.values()] == [Status.DIFFERENT, Status.EQUAL]
    assert {f.rule for v in told.values() for f in v.findings} <= fault.rules


def test_a_fault_needs_a_second_chunk_to_show() -> None:
    """With one chunk, or one micro-batch, nothing is overwritten too early."""
    case = batches.case(BATCH)
    assert check(case, reused.view_kept).status is Status.EQUAL
    assert check(case, partial(reused.workspace_shared, micro_batches=1)).status is Status.EQUAL


@given(rows=st.integers(0, 30), micro_batches=st.integers(1, 5))
def test_micro_batches_are_all_rows_in_order(rows: int, micro_batches: int) -> None:
    """Runs follow each other and differ by at most one row."""
    runs = waves.split(rows, micro_batches)
    assert [row for run in runs for row in run] == list(range(rows))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert all(one.stop == two.start for one, two in pairwise(runs))
