"""Masks of two arms: what is compared of them, what is counted, and that a fault is found."""

from dataclasses import replace
from itertools import count
from typing import Any

import published
import pytest
import tiny
import torch
from torch import Tensor

from equivalence import ab, generate, ops, sides
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.drawn.masks import source
from equivalence.report import as_table
from equivalence.verdict import Status
from equivalence.versus import between, census
from equivalence.versus.forwards import (
    AGAIN,
    ALL,
    CANDIDATE,
    ORIGINAL,
    Agreement,
    Comparison,
    Difference,
)
from refimpl import fast, forms, layer, masks

ROW = 4
"""A row that selects."""
BITS: tuple[forms.Form, ...] = ("bool", "packed")


def compare(first: Any, second: Any, many: int = 4, **options: Any) -> Comparison:  # noqa: ANN401 - callables and options
    """Two publishers over layer-forwards of nine rows."""
    tail = options.pop("tail", None)
    return ab.compare(first, second, published.forwards(many, tail=tail), **options)


def equal(got: Comparison) -> tuple[int, int, int]:
    """Layer-forwards that publish, those where new is the original, and where it is itself."""
    each = got.total.masks.get(ALL, Agreement())
    return each.forwards, each.new_equal, each.control_equal


def cells(got: Comparison) -> set[str]:
    """What the last column says of all forwards."""
    lines = [line for line in as_table.text(got).splitlines() if line.startswith("all ")]
    assert len(lines) == 2
    return {"n/a" if line.endswith("n/a") else " ".join(line.split()[-3:]) for line in lines}


# What is compared


def test_a_bit_of_one_mask_of_fifty_is_found_and_named() -> None:
    """The layer-forward, the row, its rule: 49 of 50 masks are equal."""
    got = compare(published.fixed(), published.spoils(published.flip(ROW, 0), at=31), 50)
    assert equal(got) == (50, 49, 50)
    assert cells(got) == {"49 of 50"}
    assert got.arms == {
        ORIGINAL: Status.EQUAL,
        AGAIN: Status.EQUAL,
        CANDIDATE: Status.DIFFERENT,
    }
    (one,) = got.failing
    assert (one.name, one.arms[CANDIDATE].failing, one.masks) == ("forward 31", (ROW,), ("mask",))
    assert one.new == {"mask": Difference(rows=9, slots=1, sets=1)}
    (found,) = one.verdicts[0].findings
    assert (found.stage, found.row) == ("mask", ROW)
    assert found.rule in {"mask-extra", "mask-missing"}
    assert "forward 31 publish_mask: 1 of 9 rows differ (mask-" in as_table.text(got)


def test_a_packed_bit_is_found_too() -> None:
    """Likewise, in the layer-forward of its number."""
    wrong = published.spoils(published.flip(ROW, 0), at=2, form="packed")
    got = compare(published.fixed("packed"), wrong)
    assert (equal(got), [one.name for one in got.failing]) == ((4, 3, 4), ["forward 2"])
    assert got.failing[0].arms[CANDIDATE].failing == (ROW,)


@pytest.mark.parametrize("form", ["unordered", "ascending"])
def test_ids_are_compared_as_sets(form: forms.Form) -> None:
    """Ids turned round are the same mask; one of them dropped is another."""
    turned = published.spoils(lambda ids: ids.copy_(ids.flip(1)), at=2, form="unordered")
    got = compare(published.fixed(form), turned, contract="order=any")
    assert (equal(got), got.why) == ((4, 4, 4), ())

    def drop(ids: Tensor) -> None:
        ids[ROW, 0] = -1

    got = compare(published.fixed(form), published.spoils(drop, at=2, form="unordered"))
    assert equal(got) == (4, 3, 4)
    assert got.failing[0].arms[CANDIDATE].failing == (ROW,)


@pytest.mark.parametrize("form", BITS)
def test_columns_that_no_row_sees_are_not_compared(form: forms.Form) -> None:
    """Whatever stands past `visible`, and however wide the mask is."""

    def wide(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        (mask,) = published.fixed(form)(**call).values()
        seen = (call["row_end"] - call["row_start"]).clamp(min=0)
        odd = torch.nn.functional.pad(mask, (0, 8))
        cell = torch.arange(odd.shape[1]) * (1 if form == "bool" else 8)
        odd[cell >= seen[:, None]] = True if form == "bool" else 0xA5
        return {"mask": odd}

    got = compare(published.fixed(form), wide)
    assert (got.status, equal(got), got.total.further) == (Status.EQUAL, (4, 4, 4), 0)


def test_only_published_rows_are_compared() -> None:
    """All rows against the tail alone are equal where the other rows are nobody's."""
    every = published.fixed(rows=None)
    for first, second in ((every, published.fixed()), (published.fixed(), every)):
        got = compare(first, second, tail=1)
        assert (got.status, equal(got)) == (Status.EQUAL, (4, 4, 4))
        assert got.forwards[0].new == {"mask": Difference(rows=2, slots=0, sets=0)}
    got = compare(published.fixed(), published.spoils(published.flip(0, 0), at=1), tail=1)
    assert equal(got) == (4, 3, 4)
    assert got.forwards[1].new == {"mask": Difference(rows=2, slots=1, sets=1)}
    (row,) = got.failing[0].arms[CANDIDATE].failing
    assert row == int(next(published.forwards(1, tail=1)).inputs["rows"][0])


def test_published_rows_are_in_the_sample() -> None:
    """Of 256 rows one is published, and it is among the eight that are judged."""
    inputs = {
        "scores": tiny.scores(rows=256, columns=64),
        "row_start": torch.zeros(256, dtype=torch.int32),
        "row_end": torch.full((256,), 64, dtype=torch.int32),
        "rows": torch.tensor([100], dtype=torch.int32),
    }
    case = Case(op="publish_mask", inputs=inputs, params={"topk_blocks": 2})
    bad = (published.spoils(published.flip(0, 0), at=0) for _ in range(2))
    (one,) = ab.compare(next(bad), next(bad), [case], sample=8, control=False).forwards
    assert one.sampled == 8
    assert {arm.failing for arm in one.arms.values()} == {(100,)}


def test_another_form_is_not_the_mask_that_was_published() -> None:
    """The candidate is undecided, and no mask counts as equal."""
    got = compare(published.fixed("bool"), published.fixed("unordered"))
    assert (got.status, got.arms[ORIGINAL], equal(got)) == (
        Status.UNDECIDED,
        Status.EQUAL,
        (4, 0, 4),
    )
    got = compare(published.fixed("bool"), published.fixed("packed"))
    assert (got.status, equal(got)) == (Status.EQUAL, (4, 0, 4))
    assert got.forwards[0].new["mask"] == Difference(rows=9, slots=9, sets=9)


def test_a_mask_of_the_wrong_shape_is_no_mask() -> None:
    """Every published row of it differs."""
    got = compare(published.fixed(), lambda **call: published.fixed()(**call)["mask"][:3], tail=2)
    assert (got.arms[CANDIDATE], equal(got)) == (Status.DIFFERENT, (4, 0, 4))
    assert got.forwards[0].new == {"mask": Difference(rows=4, slots=4, sets=4)}


def test_an_original_that_is_not_deterministic_publishes_other_masks() -> None:
    """Both comparisons are counted, ties are legal, and nothing is called wrong."""
    turns = count()

    def fickle(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        ties = "highest" if next(turns) % 2 else "lowest"
        outputs: dict[str, Tensor] = published.fixed(ties=ties)(**call)
        return outputs

    got = compare(fickle, published.fixed(), 8, contract="ties=any")
    forwards, new, again = equal(got)
    assert (forwards, got.status, again) == (8, Status.EQUAL, 0)
    assert 0 < new < 8
    assert got.control == "the original differs from itself in 8 of 8 layer-forwards"


def test_without_masks_nothing_is_counted() -> None:
    """Blocks that are picked are no mask, and neither are picks."""
    case = generate.qsa_indexer(0)

    def blocks(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        score = ops.find("qsa_indexer").score
        assert score is not None
        return {
            "logits": score(
                replace(case, inputs={n: call[n] for n in case.inputs}), fast.accumulate
            )
        }

    got = ab.compare(blocks, blocks, [case])
    assert (dict(got.total.masks), cells(got), got.forwards[0].masks) == ({}, {"n/a"}, ())


# Layers


def test_picks_in_a_free_order_beside_a_mask_are_the_same_row() -> None:
    """A row whose picks moved together is not minded: no slot of a mask stands beside them."""
    case = source(generate.prefill_indexer(2, tie_rich=False), topk_blocks=2)
    call: dict[str, Any] = {**case.inputs, **case.params}
    one, two = (sides.given(case, layer.prefill_indexer(**call), name) for name in "ab")
    for name in ("raw_indices", "page_indices"):
        two.outputs[name][0] = two.outputs[name][0].flip(0)
    windows = ops.find(case.op).windows(case)
    found = between.differences(case, windows, one, two)
    assert found["raw_indices"].counts == Difference(rows=9, slots=1, sets=0)

    def minded() -> list[bool]:
        free = Contract.parse("order=any")
        return between.minded(case, windows, (one, two), found, contract=free).tolist()

    assert minded() == [False] * 9
    two.outputs["raw_indices"][0] = two.outputs["raw_indices"][0].flip(0)
    assert minded() == [True] + [False] * 8


def test_the_census_looks_inside_the_mask() -> None:
    """A column that the mask leaves out is neither at the cutoff nor below it."""
    scores = torch.tensor([[5.0, 4.0, 4.0, 4.0, 3.0, 2.0]])
    inputs = {
        "scores": scores,
        "row_start": torch.zeros(1, dtype=torch.int32),
        "row_end": torch.full((1,), 6, dtype=torch.int32),
        "mask": torch.tensor([[True, True, False, False, True, False]]),
    }
    case = Case(op="ragged_topk", inputs=inputs, params={"k": 2})
    windows = ops.find(case.op).windows(case)

    def look(case: Case) -> tuple[int, int, int | None, int | None]:
        rows = torch.arange(1)
        got = census.look(case, windows, rows, logits=None, contract=Contract())
        return got.looked_at, got.cut, got.multiplicity.most, got.margin.least

    (looked, cut, tied, margin) = look(case)
    plain = look(replace(case, inputs={n: t for n, t in inputs.items() if n != "mask"}))
    assert (looked, cut, tied, margin) == (1, 0, 1, 1 << 22)
    assert plain == (1, 1, 3, 1 << 22)
    few = tiny.swap(case, mask=torch.tensor([[True, False, False, False, False, False]]))
    assert look(few) == (0, 0, None, None)


def test_a_consumer_that_forgets_its_mask_is_found() -> None:
    """By picks outside it; its layer publishes nothing."""
    case = generate.consumer(3)

    def inside(**given: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        return masks.masked_topk(**given)

    def forgets(**given: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        return masks.masked_topk(**{**given, "mask": torch.ones_like(given["mask"])})

    assert ab.compare(inside, inside, [case]).status is Status.EQUAL
    got = ab.compare(inside, forgets, [case])
    assert got.arms[CANDIDATE] is Status.DIFFERENT
    assert {f.rule for v in got.failing[0].verdicts for f in v.findings} == {"mask-extra"}
    assert cells(got) == {"n/a"}
