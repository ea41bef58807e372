"""One call for all rows and row chunks under a budget give the same logits and the same picks."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import batches
import pytest
import torch
from batches import BATCHES, Batch, Way, call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import generate, memory, receipt
from equivalence.case import Case
from equivalence.draws import Form
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import parts
from equivalence.paths.chunked import chunked, original, peak_bytes, row_chunks
from equivalence.paths.parts import Logits, Scorer
from equivalence.paths.pipelined import pipelined
from equivalence.planted.paths import CHUNK_ROWS, FAULTS, SWITCH_ROW
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status
from refimpl import fast
from refimpl.bits import as_int
from refimpl.geometry import PLAN_STYLES

STYLES = st.sampled_from(sorted(PLAN_STYLES))
FORMS: tuple[Form, ...] = ("page_table", "slot_map", "offset")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all outputs have equal bits."""
    return got.keys() == want.keys() and all(
        torch.equal(as_int(got[name]), as_int(want[name])) for name in want
    )


def row_budget(case: Case, rows: int, style: str) -> int:
    """Bytes in which a style counts so many rows."""
    plan = PLAN_STYLES[style]
    steps = -(-len(case.inputs["k"]) // plan.width_multiple)
    return 4 * rows * max(1, plan.least_width, steps * plan.width_multiple)


@given(
    case=st.builds(
        batches.case,
        batches.DRAWN,
        ratio=st.sampled_from([1, 2, 4]),
        form=st.sampled_from(FORMS),
        seed=st.integers(0, 3),
    ),
    style=STYLES,
    budget=st.integers(1, 30_000),
)
def test_chunks_have_the_bits_and_picks_of_one_call(case: Case, style: str, budget: int) -> None:
    """Whatever the batch, the style and the budget; rows of no columns and no rows included."""
    want = call(case, original, scorer="torch", keep_logits=True)
    for way in (chunked, pipelined):
        how = {"style": style, "budget_bytes": budget, "scorer": "torch", "keep_logits": True}
        assert same(call(case, way, **how), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_all_ways_are_the_reference(batch: Batch, form: Form) -> None:
    """Cold prompts, prefix hits and decode rows: strict EQUAL with bits, picks and slots."""
    case = batches.case(batch, form=form)
    cut: dict[str, Any] = {"style": "vllm", "budget_bytes": row_budget(case, 2, "vllm")}
    right = right_outputs(case)
    for way in (original, partial(chunked, **cut), partial(pipelined, **cut)):
        verdict = check(case, partial(way, keep_logits=True))
        assert (verdict.status, verdict.findings, set(verdict.stages)) == (
            Status.EQUAL,
            (),
            set(right),
        )
        assert same(call(case, way, keep_logits=True), right)


@pytest.mark.parametrize("style", sorted(PLAN_STYLES))
def test_every_budget_from_a_row_to_everything_is_the_reference(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine generated rows in 1 to 9 chunks, whatever a style counts."""
    small = replace(PLAN_STYLES[style], unsplit_below=0, quantum_heads=0, row_quantum=1)
    monkeypatch.setattr("equivalence.paths.chunked.PLAN_STYLES", {style: small})
    case = generate.prefill_indexer(2, heads=16, head_dim=32)
    want = right_outputs(case)
    counts = []
    for rows in (1, 2, 3, 4, 5, 8, 9):
        seen: list[slice] = []
        budget = row_budget(case, rows, style)
        got = call(
            case,
            chunked,
            style=style,
            budget_bytes=budget,
            keep_logits=True,
            observe=lambda rows, _, seen=seen: seen.append(rows),
        )
        assert same(got, want)
        counts.append(len(seen))
    assert counts == [9, 5, 3, 3, 2, 2, 1]


def test_a_short_context_is_one_call_by_default() -> None:
    """2 GiB of v4.1: the scorer is called once, with all rows."""
    case = batches.case(BATCHES["cold"])
    with receipt.collected() as left:
        call(case, chunked)
    assert [(r.kernel, r.rows, r.calls) for r in left] == [
        ("refimpl.mqa_logits", (9,), 1),
        ("refimpl.ragged_topk", (9,), 1),
    ]


def test_rows_of_a_chunk_follow_the_heads() -> None:
    """v4.1 in a budget of one byte: 128 heads a chunk, 8 rows of 16 heads and 2 of 64."""
    for heads, rows in ((16, (8, 1)), (64, (2, 1)), (32, (4, 1))):
        case = batches.case(BATCHES["cold"], heads=heads)
        with receipt.collected() as left:
            call(case, chunked, budget_bytes=1)
        assert left[0].rows == rows


@pytest.mark.parametrize(
    ("columns", "width"),
    [
        ("absolute", None),
        ("absolute", 50),
        ("row-relative", None),
        ("row-relative", 20),
        ("row-relative", 50),
    ],
)
@pytest.mark.parametrize("scorer", ["reference", "torch"])
def test_kept_logits_have_the_layout_that_was_asked_for(
    columns: str, width: int | None, scorer: str
) -> None:
    """Absolute or from the row's start, narrower or wider than the keys; -inf outside windows."""
    case = batches.case(BATCHES["prefill beside decode"], tie_rich=False)
    case = replace(case, params={**case.params, "columns": columns, "width": width})
    got = call(case, chunked, style="vllm", budget_bytes=500, scorer=scorer, keep_logits=True)
    want = right_outputs(case)
    assert got["logits"].shape == (9, width or 45)
    assert torch.equal(got["logits"] == -torch.inf, want["logits"] == -torch.inf)
    if scorer == "reference":
        assert same(got, want)
        assert check(case, partial(chunked, keep_logits=True), contract="dead=-inf").findings == ()


def test_a_row_relative_scorer_gives_the_same_outputs() -> None:
    """Scores that begin at the row's start, in as few columns as the chunk needs."""

    def compact(**rows: Any) -> Logits:  # noqa: ANN401 - what a scorer takes
        wide = parts.reference_logits(**rows)
        need = int((rows["row_end"] - rows["row_start"]).max())
        at = (wide.column[:, None] + torch.arange(need)).clamp(max=wide.values.shape[1] - 1)
        return Logits(values=wide.values.gather(1, at), column=torch.zeros_like(wide.column))

    case = batches.case(BATCHES["prefill beside decode"])
    cut = {"style": "vllm", "budget_bytes": 400, "keep_logits": True}
    want = right_outputs(case)
    assert same(call(case, chunked, scorer=compact, **cut), want)
    assert same(call(case, original, scorer=compact, keep_logits=True), want)


def test_an_observer_sees_every_chunk_before_it_is_picked_from() -> None:
    """Slices in order with their scores, even where the selector spoils what it read."""

    def spoils(*, scores: Tensor, out: Tensor, **rest: Tensor) -> None:
        parts.reference_topk(scores=scores, out=out, **rest)
        scores.fill_(torch.nan)

    case = batches.case(BATCHES["prefix hit"])
    told: list[tuple[slice, Tensor]] = []
    for way in (chunked, pipelined):
        told.clear()
        how = {"style": "vllm", "budget_bytes": row_budget(case, 4, "vllm")}
        call(
            case,
            way,
            **how,
            selector=spoils,
            observe=lambda rows, logits: told.append((rows, logits.values.clone())),
        )
        step = 4 if way is chunked else 2
        cut = [slice(i, min(i + step, 5)) for i in range(0, 5, step)]
        assert [rows for rows, _ in told] == cut
        want = right_outputs(case)["logits"]
        assert torch.equal(torch.cat([values for _, values in told]), want)


def test_padding_rows_pick_nothing() -> None:
    """A backward window in a row of a request that is not there gives pads alone."""
    case = batches.case(BATCHES["cold"])
    inputs = {name: tensor.clone() for name, tensor in case.inputs.items()}
    inputs["row_start"][4], inputs["row_end"][4], inputs["row_to_request"][4] = 5, 2, 77
    kind = torch.zeros(9, dtype=torch.int8)
    kind[4] = 1
    case = replace(case, inputs=inputs, row_class=kind)
    for way in (original, partial(chunked, style="vllm", budget_bytes=100)):
        got = call(case, way)
        assert got["raw_indices"][4].tolist() == got["page_indices"][4].tolist() == [-1] * 4
        assert check(case, way).status is Status.EQUAL
        seen: list[int] = []

        def told(*, visible: Tensor, seen: list[int] = seen, **rest: Tensor) -> None:
            parts.reference_topk(visible=visible, **rest)
            seen.extend(visible.tolist())

        call(case, way, selector=told)
        assert seen == [1, 2, 3, 4, 0, 6, 7, 8, 9]


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_give_empty_outputs(form: Form) -> None:
    """A batch without new rows, and one without any column, need no scorer."""
    for batch in ([], [(0, 7)]):
        case = batches.case(batch, form=form)
        for way in (original, chunked, pipelined):
            got = call(case, way, scorer=lambda **_: 1 / 0, keep_logits=True)
            assert {name: list(t.shape) for name, t in got.items()} == {
                "logits": [0, len(case.inputs["k"])],
                "raw_indices": [0, 4],
                **{
                    name: [0, 4]
                    for name in ("ragged_indices", "page_indices")
                    if (name == "ragged_indices") == (form == "offset")
                },
            }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", ["reference", "torch"])
def test_rows_of_a_call_without_columns_pick_nothing(form: Form, part: str) -> None:
    """Two tokens of a ratio of 4 make no column yet: pads alone, and no logit is kept."""
    case = batches.case([(2, 3)], ratio=4, form=form)
    for width in (None, 5):
        case = replace(case, params={**case.params, "width": width})
        for way in (original, chunked, pipelined):
            got = call(case, way, scorer=part, selector=part, keep_logits=True)
            assert got.pop("logits").tolist() == [[-torch.inf] * (width or 0)] * 2
            assert {name: t.tolist() for name, t in got.items()} == {
                name: [[-1] * 4] * 2 for name in got
            }


def test_columns_past_the_keys_do_not_exist() -> None:
    """A window that ends past L is the window that ends at L, whatever the parts."""
    case = batches.case(BATCHES["cold"], topk=12)
    want = call(case, original, scorer="torch", keep_logits=True)
    past = case.inputs["row_end"].clone()
    past[8] += 3
    case = replace(case, inputs={**case.inputs, "row_end": past})
    for way in (original, chunked, pipelined):
        assert same(call(case, way, scorer="torch", keep_logits=True), want)


def test_without_requests_every_row_has_its_own_table_row() -> None:
    """The table is cut with the rows."""
    case = batches.case(BATCHES["four cold prompts"])
    inputs = dict(case.inputs)
    owner = inputs.pop("row_to_request").long()
    inputs["block_table"] = inputs["block_table"][owner]
    own = replace(case, inputs=inputs)
    want = call(case, original)
    for way in (original, chunked, pipelined):
        cut = {} if way is original else {"style": "vllm", "budget_bytes": 200}
        assert same(call(own, way, **cut), want)
    assert check(own, partial(chunked, style="vllm", budget_bytes=200)).status is Status.EQUAL


def test_more_picks_than_columns_are_pads() -> None:
    """Rows of 9 columns owe 40 picks."""
    case = batches.case(BATCHES["cold"], topk=40)
    for selector, contract in (("reference", "strict"), ("torch", "torch.topk")):
        for way in (original, chunked, pipelined):
            verdict = check(case, partial(way, selector=selector), contract=contract)
            assert verdict.status is Status.EQUAL
            assert call(case, way, selector=selector)["raw_indices"][8, 9:].tolist() == [-1] * 31


def test_nan_scores_pass_through() -> None:
    """A NaN weight makes a row of NaN; chunks keep its bits and rank it as one call does."""
    case = batches.case(BATCHES["prefix hit"])
    weights = case.inputs["weights"].clone()
    weights[3] = torch.nan
    case = replace(case, inputs={**case.inputs, "weights": weights})
    for part in ("reference", "torch"):
        want = call(case, original, scorer=part, selector=part, keep_logits=True)
        assert bool(want["logits"][3, :16].isnan().all())
        cut = {"style": "vllm", "budget_bytes": 100, "scorer": part, "selector": part}
        assert same(call(case, chunked, **cut, keep_logits=True), want)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"budget_bytes": 0}, "budget_bytes is 0: it is a whole number, 1 or more"),
        ({"budget_bytes": -4}, "budget_bytes is -4: it is a whole number, 1 or more"),
        ({"budget_bytes": 1.5}, "budget_bytes is 1.5: it is a whole number, 1 or more"),
        ({"budget_bytes": True}, "budget_bytes is True: it is a whole number, 1 or more"),
        ({"style": "v5"}, "no plan style named 'v5': one of dsa, v4.1, vllm, qsa"),
        ({"style": "dsa"}, "style dsa has no budget of its own: give budget_bytes"),
        ({"topk": 0}, "topk is 0: it is a whole number, 1 or more"),
        ({"columns": "local"}, "columns is 'local': it is 'absolute' or 'row-relative'"),
        ({"scorer": "fp4"}, "no scorer named 'fp4': one of reference, torch, deep_gemm"),
        ({"selector": "sort"}, "no selector named 'sort': one of reference, torch, sgl_kernel"),
        (
            {"width": 8, "keep_logits": True},
            "width is 8: the absolute windows need 9 cells",
        ),
        (
            {"budget": 4},
            (
                "{way} takes no 'budget': its settings are style, budget_bytes, scorer, selector, "
                "keep_logits, observe{more}, and prefill_indexer takes q, k, k_scale, weights, "
                "row_start, row_end, topk, columns, width, page_size, block_table, "
                "row_to_request, k_slots, topk_indices_offset, mask, block_ids, topk_blocks, "
                "rows, block_size"
            ),
        ),
    ],
)
@pytest.mark.parametrize("way", [chunked, pipelined])
def test_wrong_use_is_said_in_one_sentence(way: Way, how: dict[str, Any], sentence: str) -> None:
    """The sentence has the value and what would be right."""
    case = batches.case(BATCHES["cold"])
    with pytest.raises(UsageError) as raised:
        call(case, way, **how)
    more = ", streams" if way is pipelined else ""
    assert str(raised.value) == sentence.format(way=way.__name__, more=more)


def test_a_missing_input_is_named() -> None:
    """A call without weights says so."""
    case = batches.case(BATCHES["cold"])
    without = {name: t for name, t in case.inputs.items() if name != "weights"}
    with pytest.raises(UsageError) as raised:
        call(replace(case, inputs=without), original)
    assert str(raised.value) == "prefill_indexer needs 'weights'"


def scores_of(values: Tensor, column: Tensor | None = None) -> Any:  # noqa: ANN401 - a scorer
    """A scorer that always returns this."""

    def stub(**rows: Tensor) -> Logits:
        return Logits(values=values, column=rows["row_start"] if column is None else column)

    return stub


@pytest.mark.parametrize(
    ("scorer", "sentence"),
    [
        (
            scores_of(torch.zeros(8, 9)),
            "values: want float32 [9, 9 or more], got float32 [8, 9]",
        ),
        (
            scores_of(torch.zeros(9, 9, dtype=torch.bfloat16)),
            "values: want float32 [9, 9 or more], got bfloat16 [9, 9]",
        ),
        (scores_of(torch.zeros(9)), "values: want float32 [9, 9 or more], got float32 [9]"),
        (scores_of(torch.zeros(9, 8)), "values: want float32 [9, 9 or more], got float32 [9, 8]"),
        (
            scores_of(torch.zeros(9, 9), torch.zeros(9)),
            "column: want int32 [9], got float32 [9]",
        ),
        (
            scores_of(torch.zeros(9, 9), torch.zeros(3, dtype=torch.int32)),
            "column: want int32 [9], got int32 [3]",
        ),
        (lambda **_: torch.zeros(9, 9), "it returned Tensor, it returns Logits"),
    ],
)
@pytest.mark.parametrize("way", [original, chunked, pipelined])
def test_a_scorer_that_returns_something_else_is_named(
    way: Way, scorer: Scorer, sentence: str
) -> None:
    """The sentence has the scorer, the rows, what it returns and what it returned."""
    case = batches.case(BATCHES["cold"])
    with pytest.raises(UsageError) as raised:
        call(case, way, scorer=scorer)
    assert str(raised.value) == f"scorer {scorer.__qualname__}, rows 0-9: {sentence}"
    verdict = check(case, partial(way, scorer=scorer))
    assert (verdict.status, verdict.findings[0].rule) == (Status.UNDECIDED, "crash")


@pytest.mark.parametrize(
    ("how", "gib"),
    [
        ({"way": "original"}, 29.80),
        ({"way": "chunked"}, 2.00),
        ({"way": "pipelined"}, 2.00),
        ({"way": "chunked", "budget_bytes": 1 << 29}, 0.50),
        ({"way": "original", "scorer": "deep_gemm"}, 29.80),
        ({"way": "chunked", "scorer": "deep_gemm"}, 2.00),
    ],
)
def test_the_largest_context_takes_what_was_measured(how: dict[str, Any], gib: float) -> None:
    """16,384 rows of 487,936 columns: 29.8 GiB in one call, 2.0 GiB in chunks (on an H200)."""
    peak = peak_bytes(rows=16_384, columns=487_936, heads=64, **how) / (1 << 30)
    assert abs(peak - gib) < 0.02


@given(
    rows=st.integers(0, 12), columns=st.integers(1, 40), style=STYLES, budget=st.integers(1, 4000)
)
def test_the_peak_is_that_of_the_scores_alive(
    rows: int, columns: int, style: str, budget: int
) -> None:
    """One call holds all scores, chunks the largest, a pipeline its two largest neighbours."""
    size: dict[str, Any] = {"rows": rows, "columns": columns, "heads": 16}
    cut: dict[str, Any] = {"style": style, "budget_bytes": budget}
    one = [c.stop - c.start for c in row_chunks(**size, **cut)]
    two = [c.stop - c.start for c in row_chunks(**size, **cut, alive=2)]
    assert peak_bytes(**size, way="original") == 4 * columns * rows
    assert peak_bytes(**size, **cut) == 4 * columns * max(one, default=0)
    pairs = [sum(two[i : i + 2]) for i in range(len(two))]
    assert peak_bytes(**size, **cut, way="pipelined") == 4 * columns * max(pairs, default=0)


@pytest.mark.parametrize("selector", ["reference", "torch"])
def test_what_is_measured_is_the_peak_and_the_scratch_of_the_parts(
    selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured bytes beyond the formula are the same for one call and for chunks, and few."""
    monkeypatch.setattr(parts, "_CELLS", 1 << 13)
    case = batches.case([(300, 600)], heads=2)
    cut = {"style": "vllm", "budget_bytes": 100 * 600 * 4}
    beyond = []
    for way, name, how in ((original, "original", {}), (chunked, "chunked", cut)):
        with memory.measured(None) as meter:
            outputs = call(case, way, scorer="torch", selector=selector, **how)
        plan: dict[str, Any] = {"rows": 300, "columns": 600, "heads": 2, "way": name, **how}
        held = sum(tensor.nbytes for tensor in outputs.values())
        beyond.append(meter.of(held).transient - peak_bytes(**plan))
    # Metadata of 300 rows against those of 100, and nothing like 120 KB of scores.
    assert abs(beyond[0] - beyond[1]) < 8 * 300
    assert 0 < beyond[0] < parts.SCRATCH_BYTES * (1 << 13) // (1 << 19)


def test_an_unknown_way_has_no_peak() -> None:
    """The sentence lists the ways."""
    with pytest.raises(UsageError) as raised:
        peak_bytes(rows=1, columns=1, heads=1, way="tiled")  # type: ignore[arg-type]  # a wrong one
    assert str(raised.value) == "no way named 'tiled': one of original, chunked, pipelined"


def weighed(made: list[Any], alive: list[int], **rows: Tensor) -> Logits:
    """The torch scorer, counting how many of its earlier results still live."""
    alive.append(sum(ref() is not None for ref in made))
    logits = parts.torch_logits(**rows)
    made.append(weakref.ref(logits.values))
    return logits


def test_a_chunk_s_scores_are_gone_before_the_next_ones_come() -> None:
    """A scorer that looks for its earlier results finds none in `chunked`, one in `pipelined`."""
    case = batches.case(BATCHES["cold"])
    for way, most in ((chunked, 0), (pipelined, 1)):
        made: list[Any] = []
        alive: list[int] = []

        looks = partial(weighed, made, alive)
        call(case, way, scorer=looks, style="vllm", budget_bytes=row_budget(case, 2, "vllm"))
        assert max(alive) == most
        assert len(alive) == (5 if way is chunked else 9)


RULES = {
    "chunk-forgets-row-offset": {
        "logits": {"bits"},
        "raw_indices": {"out-of-window", "pad", "lost-winner"},
    },
    "last-chunk-short": {
        "logits": {"unwritten"},
        "raw_indices": {"unwritten"},
        "page_indices": {"unwritten"},
    },
    "view-outlives-chunk": {"raw_indices": {"lost-winner"}},
    "row-64-loses-winner": {"raw_indices": {"lost-winner"}},
}
ROWS = {
    "chunk-forgets-row-offset": {3, 4, 5, 6, 7, 8},
    "last-chunk-short": {8},
    "view-outlives-chunk": {0, 1, 2, 3},
    "row-64-loses-winner": {64, 65, 66, 67, 68, 69},
}


def level(rows: int) -> Case:
    """So many rows that all see 80 columns."""
    case = batches.case([(rows, 80)], tie_rich=False)
    return replace(
        case, inputs={**case.inputs, "row_end": torch.full_like(case.inputs["row_end"], 80)}
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_different(name: str) -> None:
    """Each breaks its rules in its own rows, and nowhere else."""
    fault = FAULTS[name]
    case = generate.prefill_indexer(1)
    if fault.rows > len(case.inputs["q"]):
        case = level(70)
    verdict = check(case, partial(fault.candidate, keep_logits=True))
    assert verdict.status is Status.DIFFERENT
    rules: dict[str, set[str]] = {}
    for found in verdict.findings:
        rules.setdefault(found.stage, set()).add(found.rule)
    assert rules == RULES[name]
    right, got = right_outputs(case), call(case, fault.candidate)
    wrong = (right["raw_indices"] != got["raw_indices"]).any(1).nonzero()[:, 0].tolist()
    assert set(wrong) == ROWS[name]


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.rows > 1])
def test_a_planted_fault_needs_its_rows(name: str) -> None:
    """Calls of fewer rows are right: a fault that always shows would be no fault of chunks."""
    fault = FAULTS[name]
    case = level(fault.rows - 1)
    assert fault.rows - 1 in {CHUNK_ROWS, SWITCH_ROW}
    assert check(case, partial(fault.candidate, keep_logits=True)).status is Status.EQUAL
