"""Every planted fault is caught by its own rule, every variant is let through by its contract."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import by_twin
import pytest
import torch

from equivalence import generate, poisons
from equivalence.case import Space
from equivalence.contract import Contract
from equivalence.faults import FAULTS, VARIANTS, Fault, Variant
from equivalence.generate import Scores
from equivalence.judge import check
from equivalence.planted import edits
from equivalence.planted.plants import Planted, changed, judged_as, picks
from equivalence.planted.reference import right_outputs
from equivalence.verdict import RULES, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from equivalence.case import Case
    from equivalence.draws import Form
    from equivalence.verdict import Verdict

Kind = tuple[str, bool, float]

SEED = 7
SCALES = (1.0, 1e-3, 1e-6)
SPECIAL = {"minus_inf": Scores(minus_inf=True), "zeros": Scores(plateau=0.0, signed_zeros=True)}
FORMS: Mapping[str, Form] = {"table": "page_table", "map": "slot_map", "offset": "offset"}
TOPK = ("topk", "table", "map", "offset")
LAYERS = ("prefill", "decode")
PAGED = ("table", "map", *LAYERS)
SCORED = ("mqa", *LAYERS)
TRANSLATED = ("translate", False, 1.0)


def make(kind: Kind) -> Case:
    """The case of a kind."""
    name, tie_rich, scale = kind
    if name in SCORED:
        makers = (generate.mqa_logits, generate.prefill_indexer, generate.decode_indexer)
        return makers[SCORED.index(name)](SEED, tie_rich=tie_rich, scale=scale)
    if name == "translate":
        return generate.translate_pages(SEED)
    special, _, form = name.partition(" ")
    scores = SPECIAL.get(special, Scores(tie_rich=tie_rich, scale=scale))
    if form or name in FORMS:
        return generate.topk_pages(SEED, form=FORMS.get(name, "page_table"), scores=scores)
    return generate.ragged_topk(SEED, scores=scores)


@cache
def ready(kind: Kind, contract: str = "strict") -> tuple[Case, dict[str, Tensor]]:
    """The case of a kind, and its right outputs."""
    case = make(kind)
    return case, right_outputs(case, contract=Contract.parse(contract))


def kinds(*names: str, ties: tuple[bool, ...] = (True, False)) -> set[Kind]:
    """These kinds at every scale."""
    return set(product(names, ties, SCALES))


EVERY = kinds(*TOPK, *LAYERS, "mqa") | {TRANSLATED}
TIED = (True,)

# Where a fault is planted; every other kind says that it does not apply.
APPLIES: dict[str, set[Kind]] = {
    **{fault.name: kinds(*TOPK, *LAYERS) for fault in FAULTS if fault.stage == "raw_indices"},
    **{
        fault.name: kinds(*PAGED) | {TRANSLATED}
        for fault in FAULTS
        if fault.stage == "page_indices"
    },
    **{fault.name: kinds(*SCORED) for fault in FAULTS if fault.stage == "logits"},
    "winner lost to one more tie": kinds(*TOPK, *LAYERS, ties=TIED),
    "fifteen winners lost to ties": kinds(*TOPK, ties=TIED),
    "highest tie": kinds(*TOPK, *LAYERS, ties=TIED),
    "one tie twice": kinds(*TOPK, *LAYERS, ties=TIED),
    "ranked from column 0": kinds(*TOPK, "prefill"),
    "below the window": kinds(*TOPK, "prefill"),
    "counted from another base": kinds(*TOPK, "prefill"),
    "slots of other ties": kinds(*PAGED, ties=TIED),
    "slot through fp32": {TRANSLATED},
    "-0 for +0": kinds(*SCORED, ties=TIED),
}


def named(entry: Fault | Variant) -> str:
    """What pytest calls it."""
    return entry.name


def scores_of(case: Case, right: Mapping[str, Tensor]) -> Tensor | None:
    """What the rows were picked from."""
    return right["logits"] if "logits" in right else case.inputs.get("scores")


def found(verdict: Verdict, stage: str) -> dict[int | None, str]:
    """Row -> rule of one output."""
    return {finding.row: finding.rule for finding in verdict.findings if finding.stage == stage}


def assert_caught(verdict: Verdict, *, stage: str, rule: str, rows: tuple[int, ...]) -> None:
    """One output is wrong in exactly these rows, by exactly this rule."""
    assert verdict.status is Status.DIFFERENT
    stages = verdict.stages
    assert stages[stage].failing == rows
    assert stages[stage].rules == {rule: len(rows)}
    kept = found(verdict, stage)
    assert set(kept.values()) == {rule}
    assert set(kept) <= set(rows)


def assert_illegal(fault: Fault, case: Case, planted: Planted, contract: Contract) -> None:
    """The twin refuses every touched row, in every form that it can judge."""
    right = planted.outputs
    if fault.stage == "logits":
        assert_wrong_cell(case, planted)
        return
    scores = scores_of(case, right)
    alone = {"page_indices": right["page_indices"]} if "page_indices" in right else {}
    for row in planted.rows:
        said = by_twin.legal(case, right, scores, row, contract)
        if fault.stage == "page_indices":
            assert said["page_indices"] is False
            continue
        assert said["raw_indices"] is False
        assert said.get("ragged_indices", False) is False
        # The twin does not judge the order of slots.
        if alone and fault.rule != "order":
            assert by_twin.legal(case, alone, scores, row, contract) == {"page_indices": False}


def assert_wrong_cell(case: Case, planted: Planted) -> None:
    """The twin's own logit differs from the planted one."""
    right = right_outputs(case)["logits"]
    (row,) = planted.rows
    wrong = planted.outputs["logits"][row]
    column = int((wrong.view(torch.int32) != right[row].view(torch.int32)).nonzero()[0, 0])
    start, visible = by_twin.window(case, row)
    inside = start <= column < start + visible
    want = by_twin.logit(case, row, column) if inside else by_twin.fp32_bits(right[row])[column]
    assert want == by_twin.fp32_bits(right[row])[column]
    assert want != by_twin.fp32_bits(wrong)[column]


def contracts(fault: Fault, kind: Kind) -> set[str]:
    """What a fault is judged by; layers, whose scores cost time, by the loosest alone."""
    return {fault.contract} if kind[0] in SCORED else {"strict", fault.contract}


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault_is_caught_by_its_own_rule(fault: Fault) -> None:
    """The twin refuses each touched row, then the judge names it, strictly and with freedom."""
    loose = Contract.parse(fault.contract)
    for kind in sorted(APPLIES[fault.name]):
        case, right = ready(kind)
        planted = fault.plant(case, right, SEED)
        assert planted is not None, kind
        assert_illegal(fault, case, planted, loose)
        for contract in contracts(fault, kind):
            assert_caught(
                check(judged_as(case, planted), contract=contract),
                stage=fault.stage,
                rule=fault.rule,
                rows=planted.rows,
            )


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.stage == "raw_indices"], ids=named
)
def test_wrong_picks_are_caught_in_slots_and_offsets_alone(fault: Fault) -> None:
    """A launch that writes slots alone, or offset indices alone, fails by the same rule."""
    for kind in sorted(APPLIES[fault.name] & kinds(*PAGED, "offset")):
        case, right = ready(kind)
        planted = fault.plant(case, right, SEED)
        assert planted is not None, kind
        stage = "ragged_indices" if kind[0] == "offset" else "page_indices"
        assert_caught(
            check(judged_as(case, planted, stages=[stage]), contract=fault.contract),
            stage=stage,
            rule=fault.rule,
            rows=planted.rows,
        )


def test_a_fault_applies_exactly_where_it_has_what_it_needs() -> None:
    """847 plants; every other pair of fault and kind says that it does not apply."""
    applied = {
        fault.name: {kind for kind in EVERY if fault.plant(*ready(kind), SEED) is not None}
        for fault in FAULTS
    }
    assert applied == APPLIES
    assert sum(map(len, applied.values())) == 847


def test_right_outputs_are_equal() -> None:
    """What the reference gives is EQUAL in every kind, all of it identical."""
    for kind in sorted(EVERY):
        case, right = ready(kind)
        verdict = check(judged_as(case, Planted(outputs=right, rows=())))
        assert verdict.status is Status.EQUAL, kind
        assert verdict.findings == ()


@pytest.mark.parametrize("tie_rich", [True, False], ids=["ties", "no ties"])
def test_a_candidate_is_caught_as_a_record_is(tie_rich: bool) -> None:  # noqa: FBT001 - pytest's way
    """The same wrong rows, given by a candidate, break the same rules."""
    kind = ("table", tie_rich, 1.0)
    case, right = ready(kind)
    for fault in FAULTS:
        # A candidate that fills in the poison itself has written every slot.
        if kind not in APPLIES[fault.name] or fault.rule == "unwritten":
            continue
        planted = fault.plant(case, right, SEED)
        assert planted is not None
        outputs = dict(planted.outputs)
        verdict = check(case, lambda outputs=outputs, **_: outputs, contract=fault.contract)
        assert_caught(verdict, stage=fault.stage, rule=fault.rule, rows=planted.rows)


def allocated(like: Tensor, how: str) -> Tensor:
    """Memory as kernels get it."""
    return {
        "empty": lambda: torch.empty(like.shape, dtype=like.dtype, device=like.device),
        "empty_like": lambda: torch.empty_like(like),
        "new_empty": lambda: like.new_empty(like.shape),
    }[how]()


@pytest.mark.parametrize("how", ["empty", "empty_like", "new_empty"])
@pytest.mark.parametrize("kind", [("topk", True, 1.0), ("mqa", True, 1.0)], ids=["picks", "logits"])
def test_a_row_left_unwritten_by_a_candidate_is_seen(kind: Kind, how: str) -> None:
    """The poison of fresh memory survives in a row that the launch skips."""
    case, right = ready(kind)
    ((stage, whole),) = right.items()

    def skips(**_: object) -> Tensor:
        out = allocated(whole, how)
        out[:3], out[4:] = whole[:3], whole[4:]
        return out

    def writes_nothing(**_: object) -> Tensor:
        return allocated(whole, how)

    assert_caught(check(case, skips), stage=stage, rule="unwritten", rows=(3,))
    rows = tuple(
        row for row in range(len(whole)) if stage == "raw_indices" or by_twin.window(case, row)[1]
    )
    assert_caught(check(case, writes_nothing), stage=stage, rule="unwritten", rows=rows)


def test_slots_left_unwritten_by_a_candidate_are_seen() -> None:
    """Pads that a launch skips keep the poison, in picks and in the slots beside them."""
    case, right = ready(("table", False, 1.0))

    def skips_pads(**_: object) -> dict[str, Tensor]:
        out = {name: torch.empty_like(tensor) for name, tensor in right.items()}
        for name, tensor in out.items():
            tensor[right[name] != -1] = right[name][right[name] != -1]
        return out

    verdict = check(case, skips_pads, contract="order=any,ties=any")
    for stage in ("raw_indices", "page_indices"):
        assert_caught(verdict, stage=stage, rule="unwritten", rows=(5, 6, 7))


@pytest.mark.parametrize("which", [0, 1])
def test_a_value_like_the_poison_is_not_called_unwritten(which: int) -> None:
    """A second poison tells a number that a kernel wrote from memory it never touched."""
    case, right = ready(("topk", True, 1.0))

    def writes(**_: object) -> Tensor:
        out = right["raw_indices"].clone()
        out[1, 4] = poisons.INDEX[which]
        return out

    assert_caught(check(case, writes), stage="raw_indices", rule="out-of-window", rows=(1,))
    case, right = ready(("mqa", True, 1.0))

    def scores(**_: object) -> Tensor:
        out = right["logits"].clone()
        out[1, 40] = poisons.SCORE[which]
        return out

    assert_caught(check(case, scores), stage="logits", rule="bits", rows=(1,))


VARIED: dict[str, set[Kind]] = {
    **{
        variant.name: kinds(*TOPK, *LAYERS)
        for variant in VARIANTS
        if variant.stage == "raw_indices"
    },
    **{variant.name: kinds(*SCORED) for variant in VARIANTS if variant.stage == "logits"},
    "other ties": kinds(*TOPK, *LAYERS, ties=TIED),
    "equal scores exchanged": kinds(*TOPK, *LAYERS, ties=TIED),
    "as ties=highest says": kinds(*TOPK, *LAYERS, ties=TIED),
    "other columns at -inf": set(),
    "zeros of the other sign": set(),
    "a pad first": set(),
    "as minus_inf=pad says": set(),
    "as nan=first says": set(),
    "as nan=last says": set(),
    "slots of other ties alone": kinds(*PAGED, ties=TIED),
    "slots in another order alone": kinds(*PAGED),
}
"""Where a variant is made, the special kinds aside."""

MINUS_INF = {("minus_inf", True, 1.0), ("minus_inf pages", True, 1.0)}
ZEROS = {("zeros", True, 1.0), ("zeros pages", True, 1.0)}
SPECIALLY = {
    "other columns at -inf": MINUS_INF,
    "a pad first": MINUS_INF,
    "as minus_inf=pad says": MINUS_INF,
    "zeros of the other sign": ZEROS,
}


def assert_let_through(variant: Variant, kind: Kind) -> None:
    """The twin calls each touched row legal, then the judge does and counts it in its class."""
    contract = Contract.parse(variant.contract)
    case, right = ready(kind, variant.contract)
    varied = variant.vary(case, right, SEED)
    assert varied is not None, kind
    if variant.stage != "logits":
        for row in varied.rows:
            said = by_twin.legal(case, varied.outputs, scores_of(case, right), row, contract)
            assert set(said.values()) == {True}, (kind, row)
    verdict = check(judged_as(case, varied), contract=variant.contract)
    assert verdict.status is Status.EQUAL, kind
    assert verdict.findings == ()
    stage = verdict.stages[variant.stage]
    if variant.row_class != "identical":
        assert stage.counts[variant.row_class] == len(varied.rows)
        assert stage.counts["identical"] == stage.counts["rows"] - len(varied.rows)
    elif variant.stage != "logits":
        assert stage.counts["identical"] == stage.counts["rows"]
    else:
        assert stage.counts["identical"] == stage.counts["compared"]


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_variant_is_let_through_in_its_class(variant: Variant) -> None:
    """The twin calls each touched row legal, then the judge does and counts it in its class."""
    for kind in sorted(VARIED[variant.name] | SPECIALLY.get(variant.name, set())):
        assert_let_through(variant, kind)


def test_a_variant_exists_exactly_where_it_has_what_it_needs() -> None:
    """102 variants at scale 1; every other pair of variant and kind says it does not apply."""
    unscaled = {kind for kind in EVERY if kind[2] == 1.0}
    applied = {
        variant.name: {
            kind
            for kind in unscaled
            if variant.vary(*ready(kind, variant.contract), SEED) is not None
        }
        for variant in VARIANTS
    }
    assert applied == {name: each & unscaled for name, each in VARIED.items()}
    assert sum(map(len, applied.values())) == 102


FORBIDDEN = {
    "another order": "order",
    "other ties": "wrong-tie",
    "short row reversed": "order",
    "slots of other ties alone": "wrong-tie",
    "slots in another order alone": "order",
    "as order=ascending says": "order",
    "as ties=highest says": "wrong-tie",
    "as empty_rows=first says": "pad",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_variant_is_a_difference_without_its_contract(name: str) -> None:
    """What a contract allows is wrong in each touched row under the strict one."""
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    for kind in sorted(VARIED[name]):
        case, right = ready(kind, variant.contract)
        varied = variant.vary(case, right, SEED)
        assert varied is not None
        verdict = check(judged_as(case, varied))
        stage = verdict.stages[variant.stage]
        assert stage.status is Status.DIFFERENT
        assert set(stage.rules) <= {FORBIDDEN[name], "order"}
        # What the reference itself gives under a contract may be right under another too.
        if not name.startswith("as "):
            assert set(varied.rows) <= set(stage.failing)


@pytest.mark.parametrize("pages", [False, True], ids=["picks", "pages"])
@pytest.mark.parametrize("nan", ["first", "last"])
def test_a_nan_ranks_where_the_contract_says(nan: str, pages: bool) -> None:  # noqa: FBT001 - pytest's way
    """nan=first and nan=last decide the rows that nan=reject leaves undecided."""
    maker = generate.topk_pages if pages else generate.ragged_topk
    case = maker(SEED, scores=Scores(nan=True))
    (variant,) = (v for v in VARIANTS if v.contract == f"nan={nan}")
    contract = Contract.parse(variant.contract)
    right = right_outputs(case, contract=contract)
    varied = variant.vary(case, right, SEED)
    assert varied is not None
    for row in varied.rows:
        said = by_twin.legal(case, right, case.inputs["scores"], row, contract)
        assert set(said.values()) == {True}
        strictly = by_twin.legal(case, right, case.inputs["scores"], row, Contract())
        assert strictly["raw_indices"] is None
    assert check(judged_as(case, varied), contract=contract).status is Status.EQUAL
    strict = check(judged_as(case, varied))
    assert strict.status is Status.UNDECIDED
    assert found(strict, "raw_indices") == {0: "nan", 1: "nan"}


def test_the_tables_are_closed() -> None:
    """Every rule is one of verdict.RULES, names are unique, and each entry says what it needs."""
    assert {fault.rule for fault in FAULTS} <= set(RULES)
    for table in (FAULTS, VARIANTS):
        assert max(Counter(entry.name for entry in table).values()) == 1
        assert all(entry.needs for entry in table)
    assert {variant.row_class for variant in VARIANTS} == {"identical", "reordered", "tied"}


def test_a_plant_that_changes_nothing_is_refused() -> None:
    """No fault can be planted that leaves its row as it was."""
    _, right = ready(("topk", True, 1.0))
    with pytest.raises(ValueError, match="row 2 is still right in raw_indices"):
        changed(right, {"raw_indices": right["raw_indices"].clone()}, [2])


def test_plants_follow_the_seed() -> None:
    """One seed touches one row every time, and other seeds reach other rows."""
    case, right = ready(("topk", True, 1.0))
    plant = picks(edits.next_lower)
    rows = {seed: plant(case, right, seed) for seed in range(20)}
    again = plant(case, right, 3)
    assert again is not None
    assert again.rows == (rows[3].rows if rows[3] else None)
    assert {planted.rows for planted in rows.values() if planted} == {(0,), (1,), (2,), (8,)}


def test_outputs_in_another_space_are_planted_alike() -> None:
    """Absolute picks with a pad of their own are wrong by the same rules."""
    case = make(("topk", True, 1.0))
    case = replace(case, spaces={"raw_indices": Space(kind="absolute", pad=-9)})
    right = right_outputs(case)
    assert int(right["raw_indices"].min()) == -9
    for fault in FAULTS:
        planted = fault.plant(case, right, SEED)
        if planted is None:
            continue
        assert_caught(
            check(judged_as(case, planted)),
            stage="raw_indices",
            rule=fault.rule,
            rows=planted.rows,
        )
