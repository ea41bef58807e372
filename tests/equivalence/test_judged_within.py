"""Kernels whose bits nobody claims, judged within a derived bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import call_of
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.report import as_text
from equivalence.verdict import Status
from refimpl import bound, layer, mx
from refimpl.profiles import PUBLISHED

FREE = "scores=bound,order=any,ties=any"


def case_of(arithmetic: str, *, tie_rich: bool = False) -> Case:
    """A dense layer of 400 columns, judged by this arithmetic."""
    case = generate.prefill_indexer(0, form="offset", tie_rich=tie_rich, columns=400)
    return replace(case, arithmetic=arithmetic)


def picks(call: dict[str, Any], logits: Tensor) -> dict[str, Tensor]:
    """A layer's answer from these logits, ties as they fall."""
    chosen = layer.prefill_picks(
        logits=logits,
        row_start=call["row_start"],
        row_end=call["row_end"],
        k=call["topk"],
        topk_indices_offset=call["topk_indices_offset"],
        ties="highest",
    )
    return {"logits": logits, **chosen}


def as_bf16(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
    """A kernel that rounds its logits to bf16 and picks by them."""
    return picks(call, layer.prefill_indexer(**call)["logits"].bfloat16())


@pytest.mark.parametrize("tie_rich", [True, False])
@pytest.mark.parametrize("arithmetic", ["deep_gemm.sm100.bf16_sums", "any_order.bf16"])
def test_a_kernel_of_bf16_is_equal_within_its_bound(arithmetic: str, *, tie_rich: bool) -> None:
    """Every logit lies within, and picks follow the kernel's own ties: some rows are open."""
    verdict = check(case_of(arithmetic, tie_rich=tie_rich), as_bf16, contract=FREE)
    logits, raw = verdict.stages["logits"].counts, verdict.stages["raw_indices"].counts
    assert (verdict.status, logits["within"], logits["different"]) == (Status.EQUAL, 696, 0)
    assert raw["identical"] + raw["reordered"] + raw["open"] == 9
    assert (raw["open"] > 0) == tie_rich
    assert raw["forced_columns"] + raw["excluded_columns"] + raw["open_columns"] == 696


def test_a_kernel_of_other_bits_is_within_the_bound_of_the_formula() -> None:
    """The measured kernel itself lies within the bound of `exact`, and fails by bits there."""
    case = case_of("exact")
    measured = check(case, layer.prefill_indexer, contract=FREE)
    strict = check(case, layer.prefill_indexer, contract="order=any,ties=any")
    assert measured.status is Status.EQUAL
    assert strict.stages["logits"].status is Status.DIFFERENT


def test_a_winner_lost_beyond_the_bound_is_lost() -> None:
    """One pick that its bound cannot excuse is a lost winner, with both intervals."""
    case = case_of("deep_gemm.sm100.bf16_sums")

    def loses(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        right = as_bf16(**call)
        raw, row = right["raw_indices"].clone(), 1
        start, end = int(call["row_start"][row]), int(call["row_end"][row])
        raw[row, 0] = int(right["logits"][row, start:end].float().argmin())
        return {"raw_indices": raw}

    verdict = check(case, loses, contract=FREE)
    assert [(f.rule, f.row) for f in verdict.findings] == [("lost-winner", 1)]
    text = as_text.failure(verdict)
    assert "above the most that a pick can be" in text
    assert "surely beaten" in text


def test_a_logit_beyond_its_bound_names_both_values_and_the_bound() -> None:
    """Cells outside are other bits, whatever the picks."""
    case = case_of("deep_gemm.sm100.bf16_sums")

    def doubled(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        right = as_bf16(**call)
        right["logits"][0, 5] *= 2
        return right

    verdict = check(case, doubled, contract=FREE)
    assert [(f.stage, f.rule, f.row) for f in verdict.findings] == [("logits", "bits", 0)]
    assert "give or take" in as_text.failure(verdict)
    assert "695 of 696 cells lie within their bound" in as_text.failure(verdict)


@pytest.mark.parametrize("arithmetic", PUBLISHED)
def test_a_published_arithmetic_judges_no_bits(arithmetic: str) -> None:
    """Without scores=bound nothing may be concluded, and the sentence says what would help."""
    dtype = PUBLISHED[arithmetic].logits

    def kernel(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        return picks(call, layer.prefill_indexer(**call)["logits"].to(dtype))

    verdict = check(case_of(arithmetic), kernel)
    assert verdict.status is Status.UNDECIDED
    assert {f.reading for f in verdict.findings if f.run == "candidate"} == {
        f"no bits of {arithmetic} are claimed: judge with scores=bound"
    }


def fp4_case(arithmetic: str) -> Case:
    """A dense layer of e2m1 queries and keys with ue8m0 scales."""
    case = generate.prefill_indexer(3, form="offset", tie_rich=False, columns=400)
    random = torch.Generator().manual_seed(3)
    (q, q_sf), (k, k_sf) = (
        mx.quantize(torch.randn(*case.inputs[name].shape, generator=random)) for name in ("q", "k")
    )
    tensors = {name: t for name, t in case.inputs.items() if name != "k_scale"}
    tensors |= {"q": q, "k": k, "q_sf": q_sf, "k_sf": k_sf}
    tensors["weights"] = tensors["weights"].bfloat16()
    return replace(case, inputs=tensors, arithmetic=arithmetic)


def test_an_mxfp4_layer_is_judged_within_its_bound() -> None:
    """Scores in fp64 rounded to bf16 are within; a scale plane read one block late is not."""
    case = fp4_case("deep_gemm.sm100.bf16_sums")

    def kernel(*, late: bool = False, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        planes = {"k_scale": call["k_sf"].roll(int(late), -1), "q_scale": call["q_sf"]}
        names = ("q", "k", "weights", "row_start", "row_end")
        scores, _ = bound.mqa_bound(**{n: call[n] for n in names}, **planes)
        return picks(call, scores.bfloat16())

    right = check(case, kernel, contract=FREE)
    wrong = check(case, lambda **call: kernel(late=True, **call), contract=FREE)
    assert right.status is Status.EQUAL
    assert right.stages["raw_indices"].power
    assert wrong.status is Status.DIFFERENT
    assert {f.stage for f in wrong.findings} >= {"logits", "raw_indices"}


@pytest.mark.parametrize(
    ("drop", "sentence"),
    [
        ("k_sf", "inputs.q_sf and inputs.k_sf come together, or neither does"),
        ("q_sf", "inputs.q_sf and inputs.k_sf come together, or neither does"),
    ],
)
def test_scales_that_do_not_fit_are_told(drop: str, sentence: str) -> None:
    """Planes of q and k come together."""
    case = fp4_case("deep_gemm.sm100")
    tensors = {name: tensor for name, tensor in case.inputs.items() if name != drop}
    verdict = check(replace(case, inputs=tensors), lambda **_: None, contract=FREE)
    assert [f.reading for f in verdict.findings] == [sentence]


def test_no_bits_are_known_of_ue8m0_scales() -> None:
    """A bit model asked of MX scales says so."""
    case = fp4_case("deep_gemm.sm90")
    logits = torch.zeros(9, 400)
    verdict = check(case, lambda **call: picks(call, logits))
    assert "no bits are known of ue8m0 scales: judge with scores=bound" in {
        f.reading for f in verdict.findings
    }
    assert call_of(case)["q"].dtype is torch.uint8


def test_a_bound_needs_an_arithmetic_and_no_baseline() -> None:
    """Otherwise it would be printed as if it were in force."""
    case = case_of("exact")
    nameless = check(replace(case, arithmetic=None), as_bf16, contract=FREE)
    assert [f.reading for f in nameless.findings] == [
        "scores=bound is derived from an arithmetic, and the case names none"
    ]
    with pytest.raises(UsageError, match="leave the baseline out"):
        check(case, as_bf16, baseline=layer.prefill_indexer, contract=FREE)
