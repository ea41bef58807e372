"""Planted masks: every fault is illegal to the twin and to the check, every variant legal."""

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import by_twin
import pytest
import torch
import twin_layers
from torch import Tensor

from equivalence.case import Case
from equivalence.checks import masks as checks
from equivalence.checks.published import Published
from equivalence.checks.rows import failing, name
from equivalence.contract import Contract
from equivalence.planted.masks import FAULTS, VARIANTS, plant
from equivalence.planted.plants import Planted
from equivalence.planted.published import right_of
from equivalence.verdict import RULES
from refimpl import forms, masks

INF = torch.inf
FORMS = get_args(forms.Form)
PLACES = 3
SPANS = [(0, 60), (0, 61), (0, 77), (77, 78), (77, 86), (77, 130), (77, 138), (77, 160), (77, 77)]
"""Two requests, the second of which begins amid a block; one row sees nothing."""
KINDS = ("distinct", "tied", "spiked", "minus inf", "nan", "late")


def scores(kind: str, seed: int) -> Tensor:
    """fp32 [9, 176]: the columns behind each window score more than all inside it."""
    random = torch.Generator().manual_seed(seed)
    cells = torch.randn(len(SPANS), 176, generator=random)
    if kind == "tied":
        cells = torch.randint(0, 3, cells.shape, generator=random).float()
    if kind == "spiked":
        cells[:, ::11] += 9
    if kind == "minus inf":
        cells[:, 5:50] = -INF
        cells[:, 82:128] = -INF
    for row, (start, end) in enumerate(SPANS):
        if kind == "nan":
            cells[row, min(start + 19, 175)] = torch.nan
        # The newest blocks are the worst, or the best.
        cells[row, max(start, end - 8) : end] += 40.0 if kind == "late" else -20.0
        cells[row, end:] = 99.0
        cells[row, :start] = 98.0
    return cells


def case(kind: str, seed: int = 0, *, tail: bool = False) -> Case:
    """The windows of SPANS; of the tail, two rows of a request."""
    inputs: dict[str, Any] = {
        "scores": scores(kind, seed),
        "row_start": torch.tensor([start for start, _ in SPANS], dtype=torch.int32),
        "row_end": torch.tensor([end for _, end in SPANS], dtype=torch.int32),
    }
    if tail:
        inputs["rows"] = torch.tensor([1, 2, 6, 7], dtype=torch.int32)
    return Case(op="publish_mask", inputs=inputs, params={"topk_blocks": PLACES}, name=kind)


def right(given: Case, form: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a literal
    """What the reference publishes."""
    mask = masks.publish(**dict[str, Any](given.inputs), topk_blocks=PLACES, form=form)
    return {"mask" if form in {"bool", "packed"} else "block_ids": mask}


def published(given: Case, planted: Planted, contract: str) -> Published:
    """The planted mask as the check takes it, on the rows that the case declares."""
    got = planted.outputs.get("mask", planted.outputs.get("block_ids"))
    assert got is not None
    known = right_of(given, got)
    if len(got) > len(known.rows):
        got = got[known.rows]
    return Published(
        got=got,
        scores=given.inputs["scores"],
        at=known.rows,
        column=known.start.long(),
        visible=known.visible.long(),
        topk_blocks=PLACES,
        contract=Contract.parse(contract),
        ids=known.rows,
    )


def found(part: Published) -> dict[int, str]:
    """The rule that each wrong row breaks."""
    codes = checks.decide(part).codes
    wrong = failing(codes).nonzero()[:, 0].tolist()
    return {int(part.ids[row]): name(int(codes[row])) for row in wrong}


def wrong_to_the_twin(part: Published) -> set[int]:
    """Rows that the twin calls illegal, read from memory in plain lists."""
    wrong = set()
    for row, (cells, ident) in enumerate(zip(part.got, part.ids.tolist(), strict=True)):
        window = by_twin.fp32_bits(part.window(row))
        held = admitted(cells, len(window))
        right_row = held is not None and twin_layers.may_publish(window, PLACES, held)
        if part.contract.ties == "lowest":
            right_row = held == twin_layers.publish(window, PLACES)
        if part.contract.ties == "all":
            best = {b: twin_layers.best_of(window, b) for b in range(-(-len(window) // 8))}
            least = min(best[b] for b in twin_layers.publish(window, PLACES) if b != len(best) - 1)
            right_row = held == frozenset(b for b in best if best[b] >= least or b == len(best) - 1)
        if not right_row:
            wrong.add(ident)
    return wrong


def admitted(cells: Tensor, visible: int) -> frozenset[int] | None:
    """The blocks that a row admits whole; None where it is no mask of whole blocks."""
    count = -(-visible // 8)
    if cells.dtype is torch.int32:
        ids = [i for i in cells.tolist() if i not in {-1, 2**31 - 1}]
        whole = len(set(ids)) == len(ids) and all(0 <= i < count for i in ids)
        return frozenset(ids) if whole else None
    octets = cells.view(torch.uint8).tolist()
    bits = octets if cells.dtype is torch.bool else [o >> i & 1 for o in octets for i in range(8)]
    blocks_of = [bits[b * 8 : min(visible, b * 8 + 8)] for b in range(count)]
    if any(set(block) not in ({0}, {1}) for block in blocks_of):
        return None
    return frozenset(b for b, block in enumerate(blocks_of) if block[0])


@cache
def all_cases() -> list[tuple[Case, dict[str, dict[str, Tensor]]]]:
    """Every kind, and one tail, with what is right in every form."""
    cases = [*map(case, KINDS), case("tied", tail=True)]
    return [(given, {form: right(given, form) for form in FORMS}) for given in cases]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_illegal_in_every_form(fault: str) -> None:
    """It shows in each form it is of; the rows that the twin calls wrong break its rules alone."""
    its = FAULTS[fault]
    assert its.rules <= set(RULES)
    assert its.rules
    shown = set()
    for given, rights in all_cases():
        for form in its.forms:
            if given.name == "nan" and "nan" not in its.contract:
                continue
            planted = plant(fault, given, rights[form])
            if planted is None:
                continue
            if its.rules == {"dtype"}:
                assert planted.outputs["mask"].is_floating_point()
                shown.add(form)
                continue
            part = published(given, planted, its.contract)
            rules = found(part)
            assert set(rules.values()) <= its.rules, (given.name, form, rules)
            assert set(rules) == wrong_to_the_twin(part), (given.name, form, rules)
            assert set(rules) <= set(planted.rows)
            shown |= {form} if rules else set()
    assert shown == set(its.forms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_legal_in_every_form(variant: str) -> None:
    """It changes bytes in each form it is of, and neither the twin nor the check minds."""
    its = VARIANTS[variant]
    assert not its.rules
    shown = set()
    for given, rights in all_cases():
        for form in its.forms:
            if given.name == "nan" or (its.contract.endswith("all") and given.name != "tied"):
                continue
            planted = plant(variant, given, rights[form])
            if planted is None:
                continue
            part = published(given, planted, its.contract)
            assert found(part) == {}, (given.name, form)
            if its.contract.endswith("all"):
                assert wrong_to_the_twin(part.take(part.visible > 24)) == set()
            else:
                assert wrong_to_the_twin(part) == set()
            shown.add(form)
    assert shown == set(its.forms)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_mask_is_legal(kind: str, form: Any) -> None:  # noqa: ANN401 - a literal
    """Else what is planted on it would prove nothing."""
    given = case(kind)
    planted = Planted(outputs=right(given, form), rows=())
    part = published(given, planted, "nan=first" if kind == "nan" else "strict")
    assert found(part) == {}
    assert wrong_to_the_twin(part) == set()


def test_there_are_twenty_faults_and_more() -> None:
    """Each says what it shows and what it needs; no name is of both."""
    assert len(FAULTS) >= 20
    assert not set(FAULTS) & set(VARIANTS)
    assert all(each.shows and each.needs for each in (*FAULTS.values(), *VARIANTS.values()))


def test_one_bit_of_a_million_is_seen() -> None:
    """100 rows of 10,000 columns: the check names the one row, by a rule of the fault."""
    rows, columns, places = 100, 10_000, 64
    random = torch.Generator().manual_seed(0)
    start = torch.zeros(rows, dtype=torch.int32)
    inputs: dict[str, Any] = {
        "scores": torch.randn(rows, columns, generator=random),
        "row_start": start,
        "row_end": torch.full_like(start, columns),
    }
    given = Case(op="publish_mask", inputs=inputs, params={"topk_blocks": places})
    mask = masks.publish(**inputs, topk_blocks=places)
    planted = plant("one-bit-flipped", given, {"mask": mask}, 3)
    assert planted is not None
    assert int((planted.outputs["mask"] != mask).sum()) == 1
    rules = found(replace(published(given, planted, "strict"), topk_blocks=places))
    assert tuple(rules) == planted.rows
    assert set(rules.values()) <= FAULTS["one-bit-flipped"].rules


@pytest.mark.parametrize("wrong", ["row-of-zeros", "one-bit-flipped"])
def test_a_form_that_a_fault_is_not_of_has_no_plant(wrong: str) -> None:
    """Nor has a mask without rows."""
    given = case("tied")
    some = plant(wrong, given, right(given, "unordered"))
    assert (some is None) == (wrong == "one-bit-flipped")
    none = replace(given, inputs={**given.inputs, "rows": torch.zeros(0, dtype=torch.int32)})
    assert plant(wrong, none, right(none, "bool")) is None
