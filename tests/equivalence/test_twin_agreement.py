"""The twin, by another hand, and the judge's own references and checks say the same of any row."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import by_twin
import torch
import twin
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence import strategies as cases
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.judge import check
from equivalence.planted.reference import right_outputs
from equivalence.stages import k_of
from equivalence.tally import KEPT
from equivalence.verdict import Status
from refimpl import topk

if TYPE_CHECKING:
    from torch import Tensor

DIFFERENT = Status.DIFFERENT
FEW = settings(max_examples=200)


def said(case: Case, contract: Contract, **outputs: Tensor) -> list[bool | None]:
    """What the judge says of each row of one output: legal or not, None where undecided."""
    verdict = check(replace(case, recorded=(outputs,)), contract=contract)
    (stage,) = verdict.stages.values()
    undecided = {finding.row for finding in verdict.findings if finding.status is not DIFFERENT}
    told = {finding.row for finding in verdict.findings} - undecided
    assert told <= set(stage.failing)
    assert len(told) == sum(min(count, KEPT) for count in stage.rules.values())
    rows = range(len(case.inputs["row_start"]))
    return [None if row in undecided else row not in stage.failing for row in rows]


@st.composite
def mutated(draw: Any, right: Tensor, *, values: range) -> Tensor:  # noqa: ANN401 - hypothesis' draw
    """Right rows, of which some slots were exchanged or overwritten, and some slots added."""
    rows: list[list[int]] = right.tolist()
    extra = draw(st.integers(0, 2))
    anything = st.integers(values.start - 2, values.stop + 1) | st.just(-1)
    for row in rows:
        row.extend([-1] * extra)
        slots = st.integers(0, len(row) - 1)
        for _ in range(draw(st.integers(0, 3))):
            one, two = draw(slots), draw(slots)
            if draw(st.booleans()):
                row[one], row[two] = row[two], row[one]
            else:
                row[one] = draw(anything)
    return torch.tensor(rows, dtype=torch.int32)


@FEW
@given(cases.ragged_topk_cases(nan=True), cases.pick_contracts())
def test_the_reference_gives_a_legal_row(case: Case, contract: Contract) -> None:
    """refimpl.topk.ragged_topk is twin-legal under every contract, and undecided only by NaN."""
    right = right_outputs(case, contract=contract)
    for row in range(len(right["raw_indices"])):
        legal = by_twin.legal(case, right, case.inputs["scores"], row, contract)
        start, visible = by_twin.window(case, row)
        window = case.inputs["scores"][row, start : start + visible]
        if legal["raw_indices"] is None:
            assert contract.nan == "reject"
            assert bool(window.isnan().any())
        else:
            assert legal["raw_indices"] is True


@FEW
@given(cases.ragged_topk_cases(nan=True), cases.pick_contracts())
def test_the_reference_gives_one_form(case: Case, contract: Contract) -> None:
    """Freedoms resolve to one row: `any` is best score first with lowest ties, without holes."""
    right = right_outputs(case, contract=contract)["raw_indices"]
    fixed = replace(
        contract,
        order="score" if contract.order == "any" else contract.order,
        ties="lowest" if contract.ties == "any" else contract.ties,
        holes="reject",
    )
    assert torch.equal(right, right_outputs(case, contract=fixed)["raw_indices"])
    for row in range(len(right)):
        legal = by_twin.legal(case, {"raw_indices": right}, case.inputs["scores"], row, fixed)
        assert legal["raw_indices"] in (True, None)


@FEW
@given(cases.ragged_topk_cases(most_rows=1, nan=True), cases.pick_contracts())
def test_the_legal_set_is_the_twins_cut(case: Case, contract: Contract) -> None:
    """refimpl.topk.legal_set has the twin's winners, tied columns and free places."""
    start, visible = by_twin.window(case, 0)
    window = case.inputs["scores"][0, start : start + visible]
    k = k_of(case)
    free = {**by_twin.freedoms(contract), "ties": "any", "short_rows": "any", "empty_rows": "pad"}
    cut = twin.cut(by_twin.fp32_bits(window), visible, k, free)
    order: dict[str, Any] = {key: free[key] for key in ("minus_inf", "nan", "zero_sign")}
    legal = topk.legal_set(scores=window, k=k, **order)
    if cut is None:
        assert bool(window.isnan().any())
        return
    assert legal.must.nonzero()[:, 0].tolist() == cut.must
    assert legal.ties.nonzero()[:, 0].tolist() == cut.ties
    assert legal.free == cut.free


@settings(max_examples=500)
@given(st.data(), cases.ragged_topk_cases(nan=True), cases.pick_contracts())
def test_picks_are_decided_as_the_twin_decides(
    data: st.DataObject, case: Case, contract: Contract
) -> None:
    """The judge fails a mutated row exactly where the twin calls it illegal."""
    right = right_outputs(case, contract=contract)["raw_indices"]
    columns = range(case.inputs["scores"].shape[1])
    outputs = {"raw_indices": data.draw(mutated(right, values=columns))}
    assert said(case, contract, **outputs) == [
        by_twin.legal(case, outputs, case.inputs["scores"], row, contract)["raw_indices"]
        for row in range(len(right))
    ]


@settings(max_examples=350)
@given(
    st.data(),
    st.booleans().flatmap(lambda shared: cases.topk_pages_cases(nan=True, shared=shared)),
    cases.pick_contracts(order="any"),
)
def test_slots_are_decided_as_the_twin_decides(
    data: st.DataObject, case: Case, contract: Contract
) -> None:
    """The judge fails mutated slots exactly where the twin calls them illegal.

    The twin judges no order of slots, so only the set of an identity row is compared.
    """
    right = right_outputs(case, contract=contract)["page_indices"]
    values = data.draw(mutated(right, values=range(int(right.max().clamp(min=0)) + 1)))
    for row, judged in enumerate(said(case, contract, page_indices=values)):
        outputs, scores = {"page_indices": values}, case.inputs["scores"]
        legal = by_twin.legal(case, outputs, scores, row, contract)["page_indices"]
        if not (contract.short_rows == "identity" and by_twin.window(case, row)[1] <= k_of(case)):
            assert judged == legal
        elif judged:
            assert legal


def images(case: Case, contract: Contract) -> set[tuple[int, ...]] | None:
    """Every legal row of slots of a one-row case, by trial of all sets in all orders."""
    start, visible = by_twin.window(case, 0)
    cells = by_twin.fp32_bits(case.inputs["scores"][0, start : start + visible])
    k = k_of(case)
    rules = by_twin.freedoms(contract)
    sets = twin.legal_sets(cells, visible, k, rules)
    if sets is None:
        return None
    table, size = by_twin.table_of(case, 0)
    rows = [
        list(order) + [-1] * (k - len(order)) for columns in sets for order in permutations(columns)
    ]
    return {
        tuple(twin.translate(row, table, size))
        for row in rows
        if twin.is_legal(row, cells, visible, k, contract=rules)
    }


@settings(max_examples=300)
@given(
    st.data(),
    cases.topk_pages_cases(most_rows=1, most_columns=5, shared=True),
    cases.pick_contracts(holes="reject"),
)
def test_ordered_slots_are_those_of_some_legal_row(
    data: st.DataObject, case: Case, contract: Contract
) -> None:
    """With shared slots and any order, a row of slots is legal where some legal row maps to it."""
    legal = images(case, contract)
    assert legal is not None
    drawn = data.draw(st.sampled_from(sorted(legal)))
    values = data.draw(st.permutations(drawn) | st.just(drawn))
    slots = torch.tensor([values], dtype=torch.int32)
    assert said(case, contract, page_indices=slots) == [tuple(values) in legal]


@given(cases.topk_pages_cases(shared=True))
def test_pages_are_translated_as_the_twin_translates(case: Case) -> None:
    """refimpl.pages.translate_pages equals the twin, slot by slot."""
    right = right_outputs(case)
    for row, (picks, slots) in enumerate(
        zip(right["raw_indices"].tolist(), right["page_indices"].tolist(), strict=True)
    ):
        table, size = by_twin.table_of(case, row)
        assert slots == twin.translate(picks, table, size)


@given(cases.pick_contracts())
def test_the_twin_knows_every_freedom_of_picks(contract: Contract) -> None:
    """The freedoms that decide picks are the twin's keys, value for value."""
    assert set(cases.PICK_FREEDOMS) == set(twin.CONTRACT_VALUES)
    assert twin.row_rules(by_twin.freedoms(contract)) == by_twin.freedoms(contract)


def test_every_small_row_is_decided_alike() -> None:
    """All rows of two slots over four columns of two scores, k 2, under strict and any."""
    contracts = [Contract(), Contract(order="any", ties="any"), Contract(ties="highest")]
    rows = list(product(range(-1, 5), repeat=2))
    values = torch.tensor(rows, dtype=torch.int32)
    for cells, contract in product(product((0.0, 1.0), repeat=4), contracts):
        scores = torch.tensor([cells]).expand(len(rows), 4).contiguous()
        case = Case(
            op="ragged_topk",
            inputs={
                "scores": scores,
                "row_start": torch.zeros(len(rows), dtype=torch.int32),
                "row_end": torch.full((len(rows),), 4, dtype=torch.int32),
            },
            params={"k": 2},
        )
        bits = by_twin.fp32_bits(scores[0])
        assert said(case, contract, raw_indices=values) == [
            twin.is_legal(row, bits, 4, 2, contract=by_twin.freedoms(contract)) for row in rows
        ]
