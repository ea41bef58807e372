"""What an outside attack on masks, ranks and quantisers found, each as a fact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import call_of, ints
from torch import Tensor

from equivalence import generate, store
from equivalence.case import Case, Space
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.verdict import Status, Verdict
from refimpl import layer, masks, quant, ranks

BOUND = "scores=bound,order=any,ties=any,reserved_pages=0"


def rules(verdict: Verdict) -> set[tuple[str, str]]:
    """Every stage and rule."""
    return {(found.stage, found.rule) for found in verdict.findings}


def small(**inputs: Tensor) -> Case:
    """One row of 64 columns that publishes three blocks."""
    scores = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    tensors = {"scores": scores, "row_start": ints(0), "row_end": ints(64)} | inputs
    return Case(op="publish_mask", inputs=tensors, params={"topk_blocks": 3})


def doubled(mask: Tensor) -> Tensor:
    """A mask whose True is the byte 2."""
    return (mask.view(torch.uint8) * 2).view(torch.bool)


@pytest.mark.parametrize("arithmetic", ["exact", "deep_gemm.sm100"])
def test_a_source_layer_is_judged_within_a_bound(arithmetic: str) -> None:
    """The mask of a kernel of other bits is equal or open; one that lost its best block is not."""
    case = generate.prefill_indexer(3, columns=400, topk=6, tie_rich=False)
    case = replace(case, params={**case.params, "topk_blocks": 8}, arithmetic=arithmetic)
    best = 1

    def kernel(*, loses: bool = False, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - the call
        call["logits"] = layer.prefill_indexer(**{**call, "topk_blocks": None})["logits"]
        mask = masks.publish(
            scores=call["logits"],
            row_start=call["row_start"],
            row_end=call["row_end"],
            topk_blocks=8,
        )
        if loses:
            start, end = int(call["row_start"][best]), int(call["row_end"][best])
            block = int(call["logits"][best, start:end].argmax()) // 8
            mask[best, 8 * block : 8 * block + 8] = False
        return {"mask": mask}

    right = check(case, kernel, contract=BOUND)
    wrong = check(case, lambda **call: kernel(loses=True, **call), contract=BOUND)
    counts = right.stages["mask"].counts
    assert (right.status, counts["identical"] + counts["open"]) == (Status.EQUAL, 9)
    assert rules(wrong) == {("mask", "mask-missing")}


def test_open_blocks_and_the_newest_within_a_bound() -> None:
    """Other blocks within their bounds are open; the newest is owed whatever it scores."""
    case = generate.prefill_indexer(3, columns=400, topk=6)
    case = replace(
        case,
        params={**case.params, "topk_blocks": 8},
        arithmetic="deep_gemm.sm100.bf16_sums",
    )

    def kernel(*, newest: bool = True, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - the call
        logits = layer.prefill_indexer(**{**call, "topk_blocks": None})["logits"].bfloat16()
        start, end = call["row_start"], call["row_end"]
        mask = masks.publish(
            scores=logits, row_start=start, row_end=end, topk_blocks=8, ties="highest"
        )
        if not newest:
            last = int(end[1] - start[1] - 1) // 8
            mask[1, 8 * last :] = False
        return {"mask": mask}

    right = check(case, kernel, contract=BOUND)
    wrong = check(case, lambda **call: kernel(newest=False, **call), contract=BOUND)
    assert right.status is Status.EQUAL
    assert right.stages["mask"].counts["open"] > 0
    assert [(f.rule, f.row) for f in wrong.findings] == [("mask-missing", 1)]


def test_a_file_keeps_the_bytes_of_a_mask(tmp_path: Path) -> None:
    """A faulty mask is as faulty when it is read back."""
    mask = doubled(masks.publish(**call_of(small())))
    case = replace(small(), recorded=({"mask": mask},))
    store.save(case, tmp_path / "case.safetensors")
    back = store.load(tmp_path / "case.safetensors")
    assert rules(check(case)) == rules(check(back)) == {("mask", "bits")}


@pytest.mark.parametrize(
    ("writes", "status"), [("scores", Status.EQUAL), ("none", Status.DIFFERENT)]
)
def test_a_merge_may_write_its_scores_where_it_has_leave(writes: str, status: Status) -> None:
    """Scores of ranks have no windows: all of them or none."""
    case = generate.merge_topk(4)

    def spoils(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        picks = ranks.merge_topk(**call)
        call["scores"].fill_(0)
        return picks

    assert check(case, spoils, contract=f"writes={writes}").status is status


@pytest.mark.parametrize("name", ["mask", "block_ids"])
def test_a_mask_without_dimensions_is_an_invalid_record(name: str) -> None:
    """It is told, not raised."""
    dtype = torch.bool if name == "mask" else torch.int32
    verdict = check(replace(small(), recorded=({name: torch.ones((), dtype=dtype)},)))
    assert rules(verdict) == {("inputs", "invalid-record")}


class Stale:
    """A candidate that computes once and hands out the same buffer for ever."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        """Keep what it computes with."""
        self.compute, self.held = compute, None

    def __call__(self, **call: Any) -> Any:  # noqa: ANN401 - inputs and params of the op
        """Give the buffer."""
        if self.held is None:
            self.held = self.compute(**call)
        return self.held


def of_bytes(dtype: torch.dtype) -> Case:
    """Rows of one byte a value."""
    case = generate.gather_rows(0)
    shards = case.inputs["shards"].to(torch.uint8).view(dtype)
    return replace(case, inputs={**case.inputs, "shards": shards})


@pytest.mark.parametrize(
    ("case", "compute"),
    [
        (generate.quantize_k(3), quant.quantize_k),
        (of_bytes(torch.int8), ranks.gather_rows),
        (of_bytes(torch.float8_e4m3fn), ranks.gather_rows),
        (
            replace(
                generate.apply_mask(1),
                inputs={
                    **generate.apply_mask(1).inputs,
                    "scores": generate.apply_mask(1).inputs["scores"].half(),
                },
            ),
            masks.apply,
        ),
    ],
)
def test_a_stale_buffer_of_any_dtype_shows(case: Case, compute: Callable[..., Any]) -> None:
    """Between two calls it is poisoned, and nobody writes it again."""
    assert check(case, compute, repeats=2).status is Status.EQUAL
    assert check(case, Stale(compute), repeats=2).status is Status.DIFFERENT


def test_mask_and_ids_of_one_run_say_the_same() -> None:
    """Each is legal under ties=any, and together they are not."""
    scores = torch.zeros(1, 64)
    scores[0, 0] = 1
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, :16], mask[0, 56:] = True, True
    for ids, found in ((ints([0, 1, 7]), set()), (ints([0, 3, 7]), {("block_ids", "mask-extra")})):
        given = {"mask": mask, "block_ids": ids}
        verdict = check(small(scores=scores), lambda _given=given, **_: _given, contract="ties=any")
        assert rules(verdict) == found


@pytest.mark.parametrize("topk_blocks", [5, 6, 7])
def test_a_mask_of_columns_may_leave_a_pick_out_for_the_newest(topk_blocks: int) -> None:
    """An honest source whose blocks are columns is equal, whatever it picks."""
    case = generate.prefill_indexer(3, columns=80, topk=6, tie_rich=False)
    case = replace(case, params={**case.params, "topk_blocks": topk_blocks, "block_size": 1})
    assert check(case, layer.prefill_indexer, contract=BOUND[13:]).status is Status.EQUAL


def test_slots_alone_are_not_judged_within_a_bound() -> None:
    """Which columns stand behind them is not known; beside their picks they are."""
    case = generate.prefill_indexer(0, tie_rich=False)
    right = layer.prefill_indexer(**call_of(case))
    alone, both = (
        check(case, lambda _names=names, **_: {n: right[n] for n in _names}, contract=BOUND)
        for names in (["page_indices"], ["raw_indices", "page_indices"])
    )
    assert (alone.status, both.status) == (Status.UNDECIDED, Status.EQUAL)
    assert {f.reading for f in alone.findings} == {
        "slots alone are not judged within a bound: give the picks beside them"
    }


def test_scores_that_need_not_be_written_judge_nothing() -> None:
    """A record that leaves the declared rows alone is no unwritten record."""
    case = generate.prefill_indexer(0)
    start, end = (case.inputs[name] for name in ("row_start", "row_end"))
    ends = torch.where(end - start <= 12, start, end)
    right = layer.prefill_indexer(**call_of(case))
    logits = torch.where((end - start <= 12)[:, None], -7.0, right["logits"])
    declared = replace(
        case,
        inputs={**case.inputs, "score_end": ends},
        arithmetic=None,
        recorded=({**right, "logits": logits},),
        provenance={"poison.logits": "-7"},
        contract="reserved_pages=0",
    )
    assert check(declared).stages["raw_indices"].status is Status.EQUAL
    assert "unwritten" not in {rule for _, rule in rules(check(declared))}


def test_rows_that_publish_nothing_are_judged_by_the_rest() -> None:
    """A layer whose chosen rows are not published owes no mask."""
    case = generate.prefill_indexer(0, topk=12, columns=200)
    tensors = {**case.inputs, "rows": ints(0, 2, 8)}
    case = replace(case, inputs=tensors, params={**case.params, "topk_blocks": 2})
    verdict = check(case, layer.prefill_indexer, rows=[1, 3], contract="reserved_pages=0")
    assert (verdict.status, rules(verdict)) == (Status.EQUAL, set())
    assert set(verdict.stages) == {"logits", "raw_indices", "page_indices"}


def test_a_declared_pad_of_ids_is_a_pad() -> None:
    """And ids of published blocks count from the row alone."""
    case = small()
    ids = masks.publish(**call_of(case), form="ascending")
    ids = torch.cat([ids, ints([-7, -7])], 1)
    space = {"block_ids": Space(kind="request-local", pad=-7)}
    assert check(replace(case, spaces=space, recorded=({"block_ids": ids},))).status is Status.EQUAL
    space = {"block_ids": Space(kind="absolute")}
    verdict = check(replace(case, spaces=space, recorded=({"block_ids": ids},)))
    assert [f.reading for f in verdict.findings] == [
        "spaces.block_ids cannot be 'absolute': blocks count from the row"
    ]


def test_rows_are_refused_before_they_are_cut() -> None:
    """A list of published rows that cannot be is told whatever rows are asked for."""
    case = generate.publish_mask(3)
    bad = replace(case, inputs={**case.inputs, "rows": ints(-5, 0)})
    verdict = check(bad, masks.publish, rows=[0, 2])
    assert [f.reading for f in verdict.findings] == [
        "inputs.rows has row -5; the call has 9 rows, from 0 on"
    ]


def test_no_row_sees_a_block_that_is_still_to_come() -> None:
    """More visible blocks than the position has whole ones break a row."""
    case = generate.expand_blocks(0)
    visible = case.inputs["visible_blocks"].clone()
    visible[4] += 1
    verdict = check(
        replace(case, inputs={**case.inputs, "visible_blocks": visible}), lambda **_: None
    )
    assert "2 visible blocks are more than position 5 has" in {f.reading for f in verdict.findings}


def test_fewer_slots_than_places_are_enough_where_blocks_are_few() -> None:
    """Rows whose other blocks are -inf need no slot for them."""
    scores = torch.full((1, 64), -torch.inf)
    scores[0, 0], scores[0, 63] = 1, 1
    case = small(scores=scores)
    assert check(case, lambda **_: {"block_ids": ints([0, 7])}).status is Status.EQUAL
    assert rules(check(case, lambda **_: {"block_ids": ints([7])})) == {
        ("block_ids", "mask-missing")
    }


def test_a_bool_mask_as_bytes_is_recognised() -> None:
    """uint8 is eight columns a byte."""
    case = small()
    mask = masks.publish(**call_of(case)).to(torch.uint8)
    assert {f.reading for f in check(case, lambda **_: mask).findings} == {
        "one byte a column: a uint8 mask holds eight columns a byte"
    }


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), True])
def test_a_scale_is_a_finite_number(value: float) -> None:
    """Anything else is told."""
    case = generate.quantize_q(0)
    verdict = check(
        replace(case, params={**case.params, "softmax_scale": value}),
        quant.quantize_q,
    )
    assert rules(verdict) == {("inputs", "invalid-record")}


def test_a_broken_row_of_ranks_leaves_the_others() -> None:
    """A negative length is told of its row."""
    case = generate.merge_topk(0)
    lens = case.inputs["context_lens"].clone()
    lens[2] = -3
    verdict = check(replace(case, inputs={**case.inputs, "context_lens": lens}), lambda **_: None)
    assert "context_lens -3 is negative" in {f.reading for f in verdict.findings}


def test_an_output_left_out_of_an_exact_op_is_not_judged() -> None:
    """A quantiser that gives its scales alone is undecided, whatever they are."""
    case = generate.quantize_k(0)
    right = quant.quantize_k(**call_of(case))
    verdict = check(case, lambda **_: {"scale": right["scale"]})
    assert (verdict.status, rules(verdict)) == (Status.UNDECIDED, {("values", "not-compared")})
    assert [found.reading for found in verdict.findings] == [
        "values was not given: values, scale are what quantize_k makes"
    ]


@pytest.mark.parametrize("value", [[1, 2], None, 1.0])
def test_what_is_no_tensor_is_told(value: Any) -> None:  # noqa: ANN401 - anything at all
    """By its name and its kind."""
    verdict = check(small(scores=value), masks.publish)
    kind = type(value).__name__
    assert [found.reading for found in verdict.findings] == [
        f"inputs.scores is a {kind}, not a torch tensor"
    ]


def test_what_is_no_callable_is_refused() -> None:
    """As a row that is no number is."""
    with pytest.raises(UsageError, match="a candidate is a callable"):
        check(small(), "kernels:publish")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="row 'a' is no number"):
        check(small(), masks.publish, rows="a")  # type: ignore[arg-type]
