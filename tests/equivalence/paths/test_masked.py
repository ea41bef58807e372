"""Layers that publish a mask or pick inside one give the reference's bits, however rows are cut."""

from dataclasses import replace
from functools import partial
from typing import Any

import batches
import pytest
import torch
from batches import BATCHES, DRAWN, Way, call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import tail, workspace
from equivalence.paths.chunked import chunked, original
from equivalence.paths.parts import Logits
from equivalence.paths.pipelined import pipelined
from equivalence.verdict import Status
from refimpl import fast, forms, layer, masks
from refimpl.bits import as_int

FORMS: tuple[forms.Form, ...] = ("bool", "packed", "unordered", "ascending")
WAYS: dict[str, Way] = {
    "original": original,
    "chunked": partial(chunked, style="vllm", budget_bytes=200),
    "pipelined": partial(pipelined, style="vllm", budget_bytes=400),
    "workspace": partial(workspace.reused, budget_bytes=1 << 10),
}
LONG = [(5, 37), (4, 30)]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


def source(case: Case, *, topk_blocks: int, block_size: int = 8, most: int | None = None) -> Case:
    """A layer that publishes, of each request only the last `most` rows."""
    inputs = dict(case.inputs)
    if most is not None:
        rows = tail.tail_rows(row_to_request=inputs["row_to_request"], most=most)
        inputs["rows"] = rows.int()
    params = {**case.params, "topk_blocks": topk_blocks, "block_size": block_size}
    return replace(case, inputs=inputs, params=params)


def consumer(case: Case, *, form: forms.Form, topk_blocks: int, block_size: int = 8) -> Case:
    """A layer that picks inside a mask of other scores."""
    random = torch.Generator().manual_seed(9)
    shape = len(case.inputs["q"]), len(case.inputs["k"])
    mask = masks.publish(
        scores=torch.randint(9, shape, generator=random).float(),
        row_start=case.inputs["row_start"],
        row_end=case.inputs["row_end"],
        topk_blocks=topk_blocks,
        form=form,
        block_size=block_size,
    )
    name = "block_ids" if mask.dtype is torch.int32 else "mask"
    params = {**case.params, "block_size": block_size}
    return replace(case, inputs={**case.inputs, name: mask}, params=params)


def reference(case: Case, **changes: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params
    """The outputs of the reference."""
    given_: dict[str, Any] = {**case.inputs, **case.params, **changes}
    return layer.prefill_indexer(**given_)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return got.keys() == want.keys() and all(
        got[name].dtype is want[name].dtype and torch.equal(as_int(got[name]), as_int(want[name]))
        for name in want
    )


@given(
    batch=DRAWN,
    seed=st.integers(0, 99),
    topk_blocks=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 8]),
    most=st.sampled_from([None, 1, 2]),
)
def test_every_way_publishes_the_mask_of_one_call(
    batch: batches.Batch, seed: int, topk_blocks: int, block_size: int, most: int | None
) -> None:
    """One preallocated mask of the published rows; the original's is of all rows."""
    blocks: dict[str, Any] = {"topk_blocks": topk_blocks, "block_size": block_size}
    case = source(batches.case(batch, seed=seed), **blocks, most=most)
    if not len(case.inputs["k"]):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refimpl.blocks.CELLS", 100)
        told = {name: call(case, way, keep_logits=True) for name, way in WAYS.items()}
    want = reference(case)
    assert same(told.pop("original"), want | {"mask": reference(case, rows=None)["mask"]})
    assert {name: same(got, want) for name, got in told.items()} == dict.fromkeys(told, True)


@given(
    batch=DRAWN,
    seed=st.integers(0, 99),
    topk_blocks=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 8]),
    form=st.sampled_from(FORMS),
)
def test_every_way_picks_inside_the_mask(
    batch: batches.Batch, seed: int, topk_blocks: int, block_size: int, form: forms.Form
) -> None:
    """Picks, slots and pads are those of the reference; kept logits are those before the mask."""
    blocks: dict[str, Any] = {"topk_blocks": topk_blocks, "block_size": block_size}
    case = consumer(batches.case(batch, seed=seed), form=form, **blocks)
    if not len(case.inputs["k"]):
        return
    want = reference(case)
    told = {name: same(call(case, way, keep_logits=True), want) for name, way in WAYS.items()}
    assert told == dict.fromkeys(WAYS, True)


@pytest.mark.parametrize("selector", ["reference", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_the_judge_calls_both_roles_equal(way: str, selector: str) -> None:
    """By either selector: a short row that is ranked picks inside its mask too."""
    batch = batches.case(LONG, tie_rich=False)
    contract = "strict" if selector == "reference" else "torch.topk"
    cases = [
        source(batch, topk_blocks=2),
        consumer(batch, form="bool", topk_blocks=2),
        consumer(replace(batch, params={**batch.params, "topk": 40}), form="packed", topk_blocks=2),
    ]
    for case in cases:
        verdict = check(case, partial(WAYS[way], selector=selector), contract=contract)
        assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
    got = call(cases[2], WAYS[way], selector=selector)["raw_indices"]
    assert bool((got[:, 16:] == -1).all()) is (selector == "torch")


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_publish_no_mask(way: str) -> None:
    """Of a batch without new rows, of rows that see nothing, and of rows that nobody asks for."""
    none = source(batches.case([(0, 7)]), topk_blocks=2)
    assert call(none, WAYS[way])["mask"].shape == (0, 0)
    blind = source(batches.case([(2, 3)], ratio=4, form="slot_map"), topk_blocks=2)
    assert call(blind, WAYS[way])["mask"].shape == (2, 0)
    silent = source(batches.case(LONG), topk_blocks=2)
    silent = replace(silent, inputs={**silent.inputs, "rows": torch.zeros(0, dtype=torch.int32)})
    assert call(silent, WAYS[way])["mask"].shape == ((9, 40) if way == "original" else (0, 0))


def test_the_observer_is_told_before_the_mask_is_applied() -> None:
    """Scores outside the mask are still there."""
    case = consumer(batches.case(LONG), form="bool", topk_blocks=1)
    told: list[Tensor] = []

    def observe(_: slice, logits: Logits) -> None:
        told.append(logits.values.clone())

    call(case, original, observe=observe)
    assert torch.equal(told[0], reference(case)["logits"])


OTHER = torch.zeros(9, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"mask": OTHER.bool(), "block_ids": OTHER},
            "the layer has mask and block_ids: it picks inside one mask or publishes one",
        ),
        (
            {"block_ids": OTHER, "topk_blocks": 2},
            "the layer has block_ids and topk_blocks: it picks inside one mask or publishes one",
        ),
        ({"topk_blocks": 0}, "topk_blocks is 0: it is a whole number, 1 or more"),
        ({"block_size": 0}, "block_size is 0: it is a whole number, 1 or more"),
        ({"rows": OTHER[:, 0]}, "rows are published rows: they take topk_blocks"),
        (
            {"rows": OTHER[:, 0] + 9, "topk_blocks": 2},
            "rows publish row 9: q has 9 rows",
        ),
        ({"mask": OTHER.bool()[:4]}, "mask has 4 rows: q has 9"),
        ({"block_ids": OTHER[:4]}, "block_ids has 4 rows: q has 9"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_cannot_be_served_is_told(
    way: str, more: dict[str, Any], sentence: str
) -> None:
    """Nothing is left out in silence."""
    with pytest.raises(UsageError) as raised:
        call(batches.case(LONG), WAYS[way], **more)
    assert str(raised.value) == sentence


def test_what_no_dense_path_serves_is_told() -> None:
    """Pinned tokens and scoring ends are named, and so is a tail cut without its mask."""
    case = batches.case(BATCHES["cold"])
    for name in ("init_tokens", "score_end"):
        with pytest.raises(UsageError, match=f"chunked takes no '{name}'"):
            call(case, chunked, **{name: 1})
    with pytest.raises(UsageError, match="mask has 9 rows: q has 2"):
        call(consumer(case, form="bool", topk_blocks=1), tail.only, most=2)
