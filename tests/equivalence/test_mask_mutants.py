"""Faulty masks are DIFFERENT by their rule, legal ones EQUAL, and the twin says the same."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import call_of
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.draws import Scores
from equivalence.judge import check
from equivalence.planted.masks import FAULTS, VARIANTS, plant
from equivalence.verdict import Status
from refimpl import forms, masks

FORMS: tuple[forms.Form, ...] = ("bool", "packed", "unordered", "ascending")


@cache
def cases() -> tuple[Case, ...]:
    """Tied scores, distinct ones, -inf and NaN blocks, tails."""
    infinite = generate.publish_mask(0, scores=Scores(minus_inf=True))
    return (
        generate.publish_mask(0),
        generate.publish_mask(1, scores=Scores(tie_rich=False)),
        with_values(infinite, -torch.inf, name="minus inf"),
        with_values(generate.publish_mask(2), torch.nan, name="nan"),
        generate.publish_mask(3, tail=2),
        generate.publish_mask(4, scores=Scores(tie_rich=False), topk_blocks=2, tail=3),
    )


def with_values(case: Case, value: float, *, name: str) -> Case:
    """Most columns of two rows are this value, so that whole blocks are."""
    scores = case.inputs["scores"].clone()
    for row in (0, 8):
        start, end = (int(case.inputs[edge][row]) for edge in ("row_start", "row_end"))
        scores[row, start : end - 12] = value
    return replace(case, inputs={**case.inputs, "scores": scores}, name=name)


def right(case: Case, form: forms.Form, contract: str) -> dict[str, Tensor]:
    """What the reference publishes for a case."""
    nan = "ignore" if "nan=last" in contract else "propagate"
    mask = masks.publish(**call_of(case, form=form, nan=nan))
    return {"block_ids" if mask.dtype is torch.int32 else "mask": mask}


def planted(name: str, contract: str) -> Iterator[tuple[Case, dict[str, Tensor]]]:
    """Every case and form in which this mask can be made, and what it is."""
    for case in cases():
        # Under nan=reject what such a row publishes is left open.
        if case.name == "nan" and "nan=" not in contract:
            continue
        for form in FORMS:
            found = plant(name, case, right(case, form, contract))
            if found is not None:
                yield case, dict(found.outputs)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_mask_is_different_by_its_rule(name: str) -> None:
    """In every form that can hold it, by no rule but its own."""
    fault, told = FAULTS[name], 0
    for case, outputs in planted(name, fault.contract):
        verdict = check(case, lambda _given=outputs, **_: _given, contract=fault.contract)
        rules = {f.rule for f in verdict.findings}
        assert verdict.status is Status.DIFFERENT, (name, case.name, outputs)
        assert rules <= fault.rules, (name, case.name)
        assert rules
        told += 1
    assert told, "no case can hold it"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_legal_mask_is_equal(name: str) -> None:
    """In every form that can hold it."""
    variant, told = VARIANTS[name], 0
    for case, outputs in planted(name, variant.contract):
        verdict = check(case, lambda _given=outputs, **_: _given, contract=variant.contract)
        assert verdict.status is Status.EQUAL, (name, case.name, verdict.findings)
        told += 1
    assert told, "no case can hold it"


def test_there_are_twenty_kinds_of_fault() -> None:
    """And eight legal variants."""
    assert len(FAULTS) >= 20
    assert len(VARIANTS) >= 8


def test_one_bit_in_a_million_is_found() -> None:
    """A single bit of 2^20 published positions is DIFFERENT, and its row and block are named."""
    random = torch.Generator().manual_seed(0)
    rows, columns = 16, 1 << 16
    case = Case(
        op="publish_mask",
        inputs={
            "scores": torch.randn(rows, columns, generator=random),
            "row_start": torch.zeros(rows, dtype=torch.int32),
            "row_end": torch.full((rows,), columns, dtype=torch.int32),
        },
        params={"topk_blocks": 512},
    )
    mask = masks.publish(**call_of(case))
    assert mask.numel() == 1 << 20
    mask[11, 40_001] ^= True
    verdict = check(case, lambda **_: mask)
    assert [(f.rule in {"mask-extra", "mask-missing"}, f.row) for f in verdict.findings] == [
        (True, 11)
    ]
    assert "block 5000" in str(verdict.findings[0].evidence)
