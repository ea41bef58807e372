"""Between: wrong rows outside the sample are found whatever order and sets hide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from equivalence import ab, ops
from equivalence.case import BY_DESIGN, Case
from equivalence.verdict import Status
from equivalence.versus.forwards import AGAIN, CANDIDATE, ORIGINAL, Comparison
from refimpl import fast
from refimpl.topk import ragged_topk

ROWS, COLUMNS, SHORT = 96, 32, 41
FREE = "order=any,ties=any"

Outputs = dict[str, Tensor]
Spoil = Callable[[Outputs], None]


def case(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`topk_pages`, 96 rows of two requests; one of them holds fewer columns than k."""
    end = torch.full((ROWS,), COLUMNS, dtype=torch.int32)
    end[SHORT] = 5
    inputs = {
        "scores": tiny.scores(rows=ROWS, columns=COLUMNS),
        "row_start": torch.zeros_like(end),
        "row_end": end,
        "page_table": torch.arange(1, 17, dtype=torch.int32).reshape(2, 8),
        "row_to_request": torch.arange(ROWS, dtype=torch.int32) * 2 // ROWS,
    }
    made = Case(op="topk_pages", inputs=inputs, params={"k": tiny.K, "page_size": 4}, name="free")
    return replace(made, **changes)


def slots_of(raw: Tensor, page_table: Tensor, row_to_request: Tensor, page_size: int) -> Tensor:
    """The slots of columns; pads stay."""
    page = page_table[row_to_request.long()].gather(1, raw.clamp(min=0).long() // page_size)
    return torch.where(raw < 0, raw, page * page_size + raw % page_size).int()


def right(
    *,
    scores: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    page_table: Tensor,
    row_to_request: Tensor,
    k: int,
    page_size: int,
) -> Outputs:
    """What the reference picks, and the slots of it."""
    raw = ragged_topk(scores=scores, row_start=row_start, row_end=row_end, k=k)
    slots = slots_of(raw, page_table, row_to_request, page_size)
    return {"raw_indices": raw, "page_indices": slots}


def spoiling(spoil: Spoil) -> Callable[..., Outputs]:
    """A candidate that is right, then spoilt."""

    def candidate(**given: Any) -> Outputs:  # noqa: ANN401 - inputs and params
        outputs = right(**given)
        spoil(outputs)
        return outputs

    return candidate


def flip(*names: str, row: int, slots: int = tiny.K) -> Spoil:
    """Turn the first slots of a row around in these outputs."""

    def spoil(outputs: Outputs) -> None:
        for name in names:
            outputs[name][row, :slots] = outputs[name][row, :slots].flip(0)

    return spoil


def compare(
    candidate: Callable[..., Any], case: Case, contract: str = FREE, *, sample: int = 1
) -> Comparison:
    """The right original beside a candidate, of whose 96 rows few are in the sample."""
    return ab.compare(right, candidate, [case], contract=contract, sample=sample)


BOTH = ("raw_indices", "page_indices")


@pytest.mark.parametrize(
    ("spoil", "contract", "rule"),
    [
        (flip("page_indices", row=60), FREE, "page-mismatch"),
        (flip(*BOTH, row=SHORT, slots=5), FREE, "order"),
        (flip(*BOTH, row=SHORT), f"{FREE},short_rows=any", "pad"),
    ],
    ids=["slots of other picks", "a short row in another order", "pads before picks"],
)
def test_the_same_sets_in_slots_that_may_not_be_are_judged(
    spoil: Spoil, contract: str, rule: str
) -> None:
    """A free order frees neither short rows nor pads nor slots from the picks beside them."""
    got = compare(spoiling(spoil), case(), contract)
    assert got.arms == {
        ORIGINAL: Status.EQUAL,
        AGAIN: Status.EQUAL,
        CANDIDATE: Status.DIFFERENT,
    }
    assert (got.total.sampled, got.total.further) == (1, 1)
    assert rule in {f.rule for v in got.failing[0].verdicts for f in v.findings}


@pytest.mark.parametrize(
    ("spoil", "contract"),
    [
        (flip(*BOTH, row=60), FREE),
        (flip(*BOTH, row=SHORT, slots=5), f"{FREE},short_rows=any"),
    ],
    ids=["another order", "a short row"],
)
def test_an_order_that_is_free_is_no_difference(spoil: Spoil, contract: str) -> None:
    """Picks and slots that move together are the same row, and nothing is judged again."""
    got = compare(spoiling(spoil), case(), contract)
    assert (got.status, got.why, got.total.further) == (Status.EQUAL, (), 0)


def test_slots_of_picks_that_are_given_have_no_free_order() -> None:
    """Where the picks are an input, each slot stands beside its own."""
    whole = case()
    inputs = {name: whole.inputs[name] for name in ("page_table", "row_to_request")}
    given: dict[str, Any] = {**whole.inputs, **whole.params}
    inputs["raw_indices"] = right(**given)["raw_indices"]
    slots = replace(whole, op="translate_pages", inputs=inputs, params={"page_size": 4})

    def original(raw_indices: Tensor, **rest: Any) -> Tensor:  # noqa: ANN401 - other inputs
        return slots_of(raw_indices, **rest)

    def flipped(**rest: Any) -> Tensor:  # noqa: ANN401 - inputs and params
        found = original(**rest)
        found[60] = found[60].flip(0)
        return found

    got = ab.compare(original, flipped, [slots], contract=FREE, sample=1)
    assert got.arms[CANDIDATE] is Status.DIFFERENT
    assert got.arms[ORIGINAL] is Status.EQUAL


@pytest.mark.parametrize("kept", BOTH)
def test_an_output_that_the_candidate_lacks_leaves_it_undecided(kept: str) -> None:
    """What is given is right, and the rest was never compared."""
    got = compare(lambda **given: {kept: right(**given)[kept]}, case())
    assert got.arms[CANDIDATE] is Status.UNDECIDED
    assert got.status is Status.UNDECIDED
    assert got.why == ("the candidate is undecided in 1 layer-forward",)
    (lost,) = set(BOTH) - {kept}
    readings = {f.reading for v in got.failing[0].verdicts for f in v.findings if f.stage == lost}
    assert readings == {"the original gives it, and the candidate does not"}


@pytest.mark.parametrize("kind", BY_DESIGN)
def test_rows_that_no_kernel_writes_never_differ(kind: int) -> None:
    """Whatever stands in them, they count as neither discordant nor unclassified."""
    classes = torch.zeros(ROWS, dtype=torch.int8)
    classes[20:90] = kind

    def spoil(outputs: Outputs) -> None:
        for tensor in outputs.values():
            tensor[20:90] = 7

    got = compare(spoiling(spoil), case(row_class=classes), sample=16)
    assert (got.status, got.why, got.total.further) == (Status.EQUAL, (), 0)
    assert {(test.only_new, test.only_control) for test in got.evidence} == {(0, 0)}


def test_dead_cells_are_compared_where_the_contract_names_them() -> None:
    """A cell outside its window that is not -inf shows outside the sample."""
    long = tiny.prefill()
    rows = torch.arange(ROWS) % 3
    inputs = {
        name: tensor if name in ("k", "k_scale") else tensor[rows]
        for name, tensor in long.inputs.items()
    }
    given = replace(long, op="mqa_logits", inputs=inputs, params={})

    def original(**given: Any) -> Tensor:  # noqa: ANN401 - inputs
        whole = replace(long, op="mqa_logits", inputs=given, params={})
        score = ops.find("mqa_logits").score
        assert score is not None
        logits = score(whole, fast.accumulate)
        at = torch.arange(logits.shape[1])
        inside = (at >= given["row_start"][:, None]) & (at < given["row_end"][:, None])
        return logits.masked_fill(~inside, -torch.inf)

    def candidate(**given: Any) -> Tensor:  # noqa: ANN401 - inputs
        logits = original(**given)
        logits[61, 0] = 3.0
        return logits

    def status(contract: str) -> Status:
        return ab.compare(original, candidate, [given], contract=contract, sample=8).arms[CANDIDATE]

    assert status("dead=-inf") is Status.DIFFERENT
    assert status("strict") is Status.EQUAL
