"""The parts of a path: found by name, alone in what they leave behind, and free of the rows."""

from typing import Any

import batches
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import generate, receipt
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import parts
from equivalence.verdict import Status
from refimpl import fast, scoring
from refimpl.bits import E4M3, as_int
from refimpl.topk import ragged_topk

SCORING = ("q", "k", "k_scale", "weights", "row_start", "row_end")
ROWS = ("q", "weights", "row_start", "row_end")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


def inputs(seed: int = 0, **how: Any) -> dict[str, Any]:  # noqa: ANN401 - of batches.case
    """What a scorer takes, 21 rows of 57 columns."""
    case = batches.case([(9, 30), (12, 27)], seed=seed, **how)
    return {name: case.inputs[name] for name in SCORING}


@given(rows=st.integers(1, 21), first=st.integers(0, 20))
def test_torch_scores_do_not_depend_on_the_rows_of_the_call(rows: int, first: int) -> None:
    """Any run of rows, called alone, has the bits it has among all 21."""
    call = inputs(heads=24, tie_rich=False)
    some = slice(first, first + rows)
    alone = {name: t[some] if name in ROWS else t for name, t in call.items()}
    want = parts.torch_logits(**call).values[some]
    assert torch.equal(as_int(parts.torch_logits(**alone).values), as_int(want))


def test_the_torch_scorer_is_the_formula_and_not_the_kernel() -> None:
    """It is within fp32 roundings of the exact scores, and most of its bits are not Hopper's."""
    call = inputs(tie_rich=False)
    got = parts.torch_logits(**call)
    inside = scoring.mqa_logits(**call).isfinite()
    exact = scoring.mqa_logits(**call, arithmetic="exact")
    gap = (got.values - exact)[inside].abs()
    assert bool((gap <= 1e-5 * exact[inside].abs().max()).all())
    hopper = parts.reference_logits(**call).values
    assert float((as_int(got.values) != as_int(hopper))[inside].float().mean()) > 0.5


def test_the_torch_scorer_works_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows and columns give the bits of one block."""
    call = inputs(tie_rich=False)
    whole = parts.torch_logits(**call).values
    monkeypatch.setattr(parts, "_CELLS", 16 * 20)
    assert torch.equal(as_int(parts.torch_logits(**call).values), as_int(whole))


@pytest.mark.parametrize("seed", range(3))
def test_a_dot_of_the_largest_and_the_smallest_values_is_exact(seed: int) -> None:
    """What 512 products of 448 * 448 leave when they cancel is 512 of 2^-9 * 2^-9, in any order."""
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(seed))
    small = torch.full((512,), 2.0**-9)
    large = torch.full((256,), 448.0)
    call = {
        "q": torch.cat([large, small, -large])[order].to(E4M3)[None, None],
        "k": torch.cat([large, small, large])[order].to(E4M3)[None],
        "k_scale": torch.ones(1),
        "weights": torch.ones(1, 1),
        "row_start": torch.zeros(1, dtype=torch.int32),
        "row_end": torch.ones(1, dtype=torch.int32),
    }
    assert parts.torch_logits(**call).values.tolist() == [[2.0**-9]]


def test_a_nan_is_scored_as_nan_in_its_own_cells() -> None:
    """A NaN key spoils its column, a NaN weight its row, with the bits 0x7FFFFFFF."""
    call = inputs()
    call["k"].view(torch.uint8)[5, 3] = 0x7F
    call["weights"][2, 1] = torch.nan
    got = parts.torch_logits(**call).values
    want = torch.zeros_like(got, dtype=torch.bool)
    want[:, 5] = want[2] = True
    assert torch.equal(got.isnan(), want)
    assert set(as_int(got)[want].tolist()) == {0x7FFFFFFF}


@pytest.mark.parametrize(
    "like", [{}, {"minus_inf": True}, {"signed_zeros": True, "plateau": 0.0}, {"nan": True}]
)
def test_selectors_keep_their_contracts(like: dict[str, Any]) -> None:
    """The reference is strict; torch.topk has any ties, one zero, NaN first, and ranks short rows.

    The strict contract leaves rows with a NaN undecided.
    """

    def candidate(part: str) -> Any:  # noqa: ANN401 - a candidate of ragged_topk
        def pick(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
            out = row_start.new_empty((len(scores), k))
            visible = row_end - row_start
            parts.selector(part)(scores=scores, column=row_start, visible=visible, out=out)
            return out

        return pick

    for seed in range(4):
        case = generate.ragged_topk(seed, scores=generate.Scores(**like))
        strict = check(case, candidate("reference"))
        assert strict.status is (Status.UNDECIDED if like.get("nan") else Status.EQUAL)
        assert set(strict.stages["raw_indices"].rules) <= {"nan"}
        assert check(case, candidate("torch"), contract="torch.topk").status is Status.EQUAL
    assert check(case, candidate("torch")).status is Status.DIFFERENT


@pytest.mark.parametrize("part", ["reference", "torch"])
def test_selectors_work_in_blocks_and_past_the_columns(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows at a time give the picks of all at once; k may pass the columns."""
    scores = torch.randn(7, 10, generator=torch.Generator().manual_seed(1))
    column = torch.tensor([0, 0, 3, 4, 9, 2, 10], dtype=torch.int32)
    visible = torch.tensor([10, 1, 7, 2, 1, 6, 0], dtype=torch.int32)
    want = ragged_topk(
        scores=scores, row_start=column, row_end=column + visible, k=12, short_rows="any"
    )
    monkeypatch.setattr(parts, "_CELLS", 20)
    out = torch.full((7, 12), 77, dtype=torch.int32)
    parts.selector(part)(scores=scores, column=column, visible=visible, out=out)
    if part == "reference":
        want = ragged_topk(scores=scores, row_start=column, row_end=column + visible, k=12)
    assert torch.equal(out, want)


def test_every_part_says_that_it_ran() -> None:
    """Receipts name the function and the rows, so that a fallback shows."""
    call = inputs()
    with receipt.collected() as left:
        for name in ("reference", "torch"):
            logits = parts.scorer(name)(**call)
            out = torch.empty(21, 4, dtype=torch.int32)
            visible = call["row_end"] - call["row_start"]
            parts.selector(name)(
                scores=logits.values, column=logits.column, visible=visible, out=out
            )
    assert [(r.kernel, r.rows, dict(r.arguments)) for r in left] == [
        ("refimpl.mqa_logits", (21,), {"arithmetic": "deep_gemm.sm90"}),
        ("refimpl.ragged_topk", (21,), {}),
        ("torch.mqa_logits", (21,), {}),
        ("torch.topk", (21,), {"k": 4}),
    ]


def test_names_resolve_and_functions_are_themselves() -> None:
    """Every name is in its table; looking a name up imports no engine."""
    assert parts.scorer("torch") is parts.torch_logits
    assert parts.selector(parts.torch_topk) is parts.torch_topk
    assert set(parts.SCORERS) == {"reference", "torch", "deep_gemm"}
    assert set(parts.SELECTORS) == {"reference", "torch", "sgl_kernel"}
    assert parts.scorer("deep_gemm") is parts.SCORERS["deep_gemm"]


@pytest.mark.parametrize(
    ("find", "part", "sentence"),
    [
        (
            parts.scorer,
            "deepgemm",
            "no scorer named 'deepgemm': one of reference, torch, deep_gemm",
        ),
        (parts.selector, "", "no selector named '': one of reference, torch, sgl_kernel"),
        (
            parts.selector,
            3,
            "selector is 3: it is a function or one of reference, torch, sgl_kernel",
        ),
    ],
)
def test_an_unknown_part_is_refused(find: Any, part: Any, sentence: str) -> None:  # noqa: ANN401 - a wrong one
    """The sentence lists the names."""
    with pytest.raises(UsageError) as raised:
        find(part)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("scorer", "rows", "heads", "columns", "cells"),
    [
        ("torch", 5, 32, 300, 1500),
        ("deep_gemm", 5, 32, 300, 8 * 768),
        ("deep_gemm", 1099, 64, 487_936, 1100 * 488_192),
        ("deep_gemm", 0, 64, 10, 0),
    ],
)
def test_a_scorer_lays_scores_out_its_own_way(
    scorer: str, rows: int, heads: int, columns: int, cells: int
) -> None:
    """DeepGEMM adds 256 columns, rounds up to 256, and rounds rows up to 128 heads."""
    storage = parts.STORAGES.get(scorer, parts.Storage())
    assert storage.cells(rows=rows, columns=columns, heads=heads) == cells
