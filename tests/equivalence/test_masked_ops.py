"""Ops that publish a mask, apply one or pick under one, judged whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import call_of
from torch import Tensor

from equivalence import generate
from equivalence.case import Case, take_rows
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.planted.reference import right_outputs
from equivalence.report import as_text
from equivalence.verdict import Status, Verdict
from refimpl import forms, masks, topk

FORMS: tuple[forms.Form, ...] = ("bool", "packed", "unordered", "ascending")


def publishing(form: forms.Form, **rules: Any) -> Any:  # noqa: ANN401 - settings and a candidate
    """The reference as a candidate of publish_mask."""

    def publish(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        mask = masks.publish(**call, form=form, **rules)
        return {"block_ids" if mask.dtype is torch.int32 else "mask": mask}

    return publish


def consuming(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
    """The reference as a candidate of a top-k under a mask."""
    mask = call.pop("mask", None)
    return masks.masked_topk(mask=call.pop("block_ids") if mask is None else mask, **call)


def applying(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
    """The reference as a candidate of apply_mask."""
    mask = call.pop("mask", None)
    return masks.apply(mask=call.pop("block_ids") if mask is None else mask, **call)


def told(verdict: Verdict) -> tuple[Status, dict[str, dict[str, int]], dict[int | None, str]]:
    """The status, the rules of each stage, and the rule of each row that is shown."""
    rules = {name: dict(stage.rules) for name, stage in verdict.stages.items()}
    return verdict.status, rules, {found.row: found.rule for found in verdict.findings}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", [None, 2])
def test_the_reference_publishes_what_the_judge_wants(form: forms.Form, tail: int | None) -> None:
    """In every form, all rows or the last of each request, every row is identical."""
    case = generate.publish_mask(3, tail=tail)
    (stage,) = check(case, publishing(form)).stages.values()
    rows = 4 if tail else 9
    assert (stage.status, stage.counts["rows"], stage.counts["identical"]) == (
        Status.EQUAL,
        rows,
        rows,
    )
    assert stage.counts["selecting"] == (2 if tail else 5)


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_may_be_published_where_only_a_tail_must(form: forms.Form) -> None:
    """The tail of a full mask is compared, and what other rows hold is not."""
    case = generate.publish_mask(3, tail=2)
    full = publishing(form)(**{**call_of(case), "rows": None})
    (name,) = full
    others = torch.ones(9, dtype=torch.bool)
    others[case.inputs["rows"].long()] = False
    spoilt = full[name].clone()
    spoilt[others] = 0
    assert check(case, lambda **_: {name: spoilt}).status is Status.EQUAL
    spoilt[case.inputs["rows"][-1]] = 0
    assert told(check(case, lambda **_: {name: spoilt}))[0] is Status.DIFFERENT


def test_fewer_rows_than_declared_are_another_shape() -> None:
    """A tail where all rows must be published cannot be compared."""
    tail = generate.publish_mask(3, tail=2)
    whole = generate.publish_mask(3)
    mask = publishing("bool")(**call_of(tail))
    status, _, rules = told(check(whole, lambda **_: mask))
    assert (status, rules) == (Status.DIFFERENT, {None: "shape"})


@pytest.mark.parametrize("ties", ["lowest", "highest"])
def test_another_tie_at_the_block_boundary_needs_leave(ties: topk.Ties) -> None:
    """It is wrong-tie for a strict contract, and tied where ties are free."""
    case = generate.publish_mask(3)
    candidate = publishing("packed", ties=ties)
    strict, free = (check(case, candidate, contract=text) for text in ("strict", "ties=any"))
    assert (strict.status, free.status) == (
        Status.EQUAL if ties == "lowest" else Status.DIFFERENT,
        Status.EQUAL,
    )
    assert {f.rule for f in strict.findings} <= {"wrong-tie"}
    assert (free.stages["mask"].counts["tied"] > 0) == (ties == "highest")


def test_a_mask_of_the_whole_tie_set_needs_another_contract() -> None:
    """At least k blocks are too many for a strict one, and all of them are wanted by ties=all."""
    case = generate.publish_mask(3)
    whole, exact = publishing("bool", ties="all"), publishing("bool")
    assert {f.rule for f in check(case, whole).findings} == {"mask-extra"}
    assert check(case, whole, contract="ties=all").status is Status.EQUAL
    assert {f.rule for f in check(case, exact, contract="ties=all").findings} == {"mask-missing"}


@pytest.mark.parametrize("key", ["ties=all", "nan=drop"])
def test_freedoms_of_masks_are_refused_where_none_is_published(key: str) -> None:
    """One sentence names the freedom and the op."""
    sentence = f"{key} speaks of masks: this ragged_topk publishes none"
    with pytest.raises(UsageError, match=sentence):
        check(generate.ragged_topk(0), lambda **_: None, contract=key)


def test_where_every_block_fits_nothing_was_shown() -> None:
    """A mask that could not have left a block out has no power, and says so."""
    case = generate.publish_mask(3)
    case = replace(case, params={"topk_blocks": 64})
    verdict = check(case, publishing("bool"))
    assert (verdict.status, verdict.note) == (
        Status.UNDECIDED,
        "no power: no row of mask had a choice to get wrong",
    )


def test_a_row_that_was_never_written_is_told() -> None:
    """A byte of the buffer's poison is no bool, and is called unwritten."""
    case = generate.publish_mask(3)

    def forgets(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        right = masks.publish(**call)
        out = torch.empty_like(right)
        out[:5] = right[:5]
        return out

    status, rules, _ = told(check(case, forgets))
    assert (status, set(rules["mask"])) == (Status.DIFFERENT, {"unwritten"})


def test_two_calls_of_one_publisher_are_compared() -> None:
    """The control arm counts rows of masks."""
    verdict = check(generate.publish_mask(3, tail=2), publishing("bool"), repeats=2)
    same = {"rows": 4, "identical": 4, "reordered": 0, "other_set": 0}
    assert (verdict.status, verdict.control) == (Status.EQUAL, {"mask": same})


def test_some_rows_of_a_published_tail_are_a_case_of_their_own() -> None:
    """The list of published rows is cut with them, and row numbers stay those of the call."""
    case = generate.publish_mask(3, tail=2)
    listed = case.inputs["rows"].tolist()
    part = take_rows(case, torch.tensor([listed[1], listed[2], 3]).sort().values)
    place = sorted([listed[1], listed[2], 3])
    assert part.inputs["rows"].tolist() == [place.index(row) for row in (listed[1], listed[2])]
    bad = publishing("bool")(**call_of(part))["mask"]
    bad[0, :8] ^= True
    rows = sorted([listed[1], listed[2], 3])
    status, _, found = told(check(case, lambda **_: bad, rows=rows))
    assert (status, list(found)) == (Status.DIFFERENT, [listed[1]])


@pytest.mark.parametrize("form", FORMS)
def test_a_consumer_picks_inside_the_mask(form: forms.Form) -> None:
    """The reference is identical; picks of all columns fail as mask-extra, with their slots."""
    case = generate.consumer(1, form=form)
    assert check(case, consuming).stages["raw_indices"].counts["identical"] == 9

    def anywhere(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int, **_: Any) -> Tensor:  # noqa: ANN401 - the mask
        return topk.ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)

    verdict = check(case, anywhere, contract="order=any,ties=any")
    assert {found.rule for found in verdict.findings} == {"mask-extra"}
    assert "outside the mask" in as_text.failure(verdict)


def test_picks_of_an_inverse_mask_say_so() -> None:
    """Where every pick is outside, the sentence names the polarity."""
    case = generate.consumer(1)
    inverse = {**case.inputs, "mask": ~case.inputs["mask"]}

    def inverted(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        return consuming(**{**call, "mask": inverse["mask"]}, short_rows="any")

    readings = {f.reading for f in check(case, inverted).findings if f.rule == "mask-extra"}
    assert readings == {"every pick is outside the mask: its polarity may be inverse"}


@pytest.mark.parametrize("form", FORMS)
def test_an_applied_mask_is_compared_in_the_windows(form: forms.Form) -> None:
    """What stands outside them counts where the contract says so."""
    case = generate.apply_mask(1, form=form)

    def dirty(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        out = applying(**call)
        out[0, -1] = 5.0
        return out

    statuses = [
        check(case, applying, contract="dead=-inf").status,
        check(case, dirty).status,
        check(case, dirty, contract="dead=-inf").status,
    ]
    assert statuses == [Status.EQUAL, Status.EQUAL, Status.DIFFERENT]


def test_a_mask_applied_in_place_needs_leave() -> None:
    """VLLM's way is right under its own contract and writes into its input under a strict one."""
    case = generate.apply_mask(1)

    def in_place(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        return applying(**call, out=call["scores"])

    name = "vllm.kernels.attention.dsa.candidate_blocks.apply_candidate_mask"
    assert check(case, in_place, contract=name).status is Status.EQUAL
    assert {f.rule for f in check(case, in_place).findings} == {"wrote-outside"}


BAD: dict[str, tuple[Callable[[Case], Case], str]] = {
    "two forms": (
        lambda c: replace(c, inputs={**c.inputs, "block_ids": torch.zeros(9, 4).int()}),
        "inputs have mask and block_ids; a mask has one form",
    ),
    "a byte": (
        lambda c: replace(
            c,
            inputs={**c.inputs, "mask": (c.inputs["mask"].view(torch.uint8) * 2).view(torch.bool)},
        ),
        "inputs: mask row 0 holds byte 2 at column 16: a bool is 0 or 1",
    ),
    "too narrow": (
        lambda c: replace(c, inputs={**c.inputs, "mask": c.inputs["mask"][:, :100]}),
        "inputs: mask has 100 columns: row 0 sees 153",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mask_that_cannot_be_is_an_invalid_record(name: str) -> None:
    """One sentence says what it holds."""
    spoil, sentence = BAD[name]
    verdict = check(spoil(generate.consumer(1)), consuming)
    assert [(f.rule, f.reading) for f in verdict.findings] == [("invalid-record", sentence)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": torch.tensor([3, 2])}, "inputs.rows does not ascend: 3 stands before 2"),
        ({"rows": torch.tensor([2, 9])}, "inputs.rows has row 9; the call has 9 rows, from 0 on"),
    ],
)
def test_published_rows_that_cannot_be_are_told(change: dict[str, Tensor], sentence: str) -> None:
    """They ascend and are rows of the call."""
    case = generate.publish_mask(3)
    change = {name: tensor.int() for name, tensor in change.items()}
    verdict = check(replace(case, inputs={**case.inputs, **change}), publishing("bool"))
    assert [found.reading for found in verdict.findings] == [sentence]


def source(tail: int | None = None) -> Case:
    """A dense layer that publishes four blocks."""
    case = generate.prefill_indexer(0, topk=12, columns=200)
    tensors = dict(case.inputs)
    if tail:
        tensors["rows"] = torch.tensor([1, 8], dtype=torch.int32)
    return replace(case, inputs=tensors, params={**case.params, "topk_blocks": 2})


def layer(case: Case, **rules: Any) -> dict[str, Tensor]:  # noqa: ANN401 - rules of the mask
    """What the reference gives for a source layer, its mask among it."""
    right = right_outputs(case)
    right["mask"] = masks.publish(
        scores=right["logits"],
        row_start=case.inputs["row_start"],
        row_end=case.inputs["row_end"],
        topk_blocks=2,
        rows=case.inputs.get("rows"),
        **rules,
    )
    return right


@pytest.mark.parametrize("tail", [None, 2])
def test_a_source_layer_is_judged_with_its_mask(tail: int | None) -> None:
    """Logits, mask, picks and slots of one call are each equal; another tie of the mask is not."""
    case = source(tail)
    verdict = check(case, lambda **_: layer(case), contract="reserved_pages=0")
    assert {name: stage.status for name, stage in verdict.stages.items()} == dict.fromkeys(
        ("logits", "raw_indices", "page_indices", "mask"), Status.EQUAL
    )
    other = check(case, lambda **_: layer(case, ties="highest"), contract="reserved_pages=0")
    assert (other.status, {f.stage for f in other.findings}) == (Status.DIFFERENT, {"mask"})
