"""Compositions judged: what forbids them, which page of which rank is wrong, and what it is."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_steps import step
from tiny import call_of, ints
from torch import Tensor

from equivalence import generate, memory, ops, poisons, saved, store
from equivalence.case import Case
from equivalence.checks.composed import wanted, weighing
from equivalence.checks.composed.known import Pages, key_of, rows_in
from equivalence.compose import judging
from equivalence.drawn.compose import SHAPES
from equivalence.errors import InvalidCase, Undecided, UsageError
from equivalence.judge import assert_equivalent, check
from equivalence.paths.ipc.candidate import RanksFailed
from equivalence.planted import compose as planted
from equivalence.report import as_json, as_text
from equivalence.verdict import Status, Verdict
from refimpl import batch as batches
from refimpl import compose

MESSAGES = Path(__file__).parents[3] / "messages"
Call = Any
"""Inputs and params of the op by keyword."""


def one_process(**call: Call) -> dict[str, Tensor]:
    """The reference as a candidate: what one process composes is what every rank holds."""
    case = Case(
        op="compose_pages",
        inputs={n: t for n, t in call.items() if isinstance(t, Tensor)},
        params={n: v for n, v in call.items() if not isinstance(v, Tensor)},
    )
    return planted.right(case)


def one_buffer(*, token_pools: Tensor, token_rows: Tensor, **call: Call) -> Tensor:
    """One dense buffer for all ranks."""
    step = {n: v for n, v in call.items() if not n.startswith("index")}
    return compose.compose_pages(pools=token_pools, rows=token_rows, kind="token", **step)


def readings(verdict: Verdict) -> list[str]:
    """What the findings say."""
    return [found.reading for found in verdict.findings]


def rules(verdict: Verdict) -> set[tuple[str, str]]:
    """Every stage and rule."""
    return {(found.stage, found.rule) for found in verdict.findings}


def with_inputs(case: Case, **inputs: Tensor) -> Case:
    """A case with some inputs replaced."""
    return replace(case, inputs={**case.inputs, **inputs})


def changed(case: Case, name: str, at: int, value: int) -> Case:
    """A case with one entry of a table changed."""
    table = case.inputs[name].clone()
    table[at] = value
    return with_inputs(case, **{name: table})


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_equal(shape: str, *, fp8: bool) -> None:
    """Pages are counted for each rank, layer, kind and slot, and those of each kind have power."""
    case = generate.compose_pages(3, shape=shape, fp8=fp8)
    verdict = assert_equivalent(case, one_process)
    pages = 4 * 3 * len(case.inputs["slot_pages"])
    assert verdict.coverage.rows == 2 * pages
    assert {n: s.counts["identical"] for n, s in verdict.stages.items()} == {
        "token_pages": pages,
        "index_pages": pages,
        "row_locations": 4,
    }
    power = {name: stage.power for name, stage in verdict.stages.items()}
    assert power == {"token_pages": True, "index_pages": True, "row_locations": False}
    assert as_text.summary([verdict]) == (
        f"1 case, 4 rows, {2 * pages} pages: all equal; 0 undecided"
    )


@pytest.mark.parametrize("name", planted.FAULTS)
def test_a_planted_fault_has_its_rule_at_its_place(name: str) -> None:
    """And its reading, and nothing else is found before it."""
    fault = planted.FAULTS[name]
    case = generate.compose_pages(1, shape="carried" if name == "without-carried" else "mixed")
    verdict = judging.judge(case, planted.spoilt(case, fault))
    assert verdict.status is Status.DIFFERENT
    assert any(
        found.rule == fault.rule and fault.place in found.place and fault.reading in found.reading
        for found in verdict.findings
    )
    shared = {found.rule for found in verdict.findings} - {fault.rule}
    assert shared <= {"diverged"} or name == "one-rank"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "interleaved",
            [(0, 8), (32, 36), (8, 16), (36, 40), (16, 24), (40, 44), (24, 32), (44, 48)],
        ),
        ("planar", [(0, 8), (12, 20), (24, 32), (36, 44), (8, 12), (20, 24), (32, 36), (44, 48)]),
    ],
)
def test_a_planted_layout_is_what_it_says(name: str, parts: list[tuple[int, int]]) -> None:
    """Of four tokens with keys of eight bytes and scales of four, on every rank."""
    case = generate.compose_pages(1, shape="mixed", kinds=["index"])
    slot, outputs = planted.slot_of(case, current=True), planted.right(case)
    outputs["index_pages"][:, 0, slot] = torch.arange(48, dtype=torch.uint8)
    want = {n: t.clone() for n, t in outputs.items()}
    turned = [byte for first, end in parts for byte in range(first, end)]
    want["index_pages"][:, 0, slot] = torch.tensor(turned, dtype=torch.uint8)
    planted.FAULTS[name].edit(case, outputs)
    assert all(torch.equal(outputs[n], t) for n, t in want.items())


def test_other_bytes_of_the_same_meaning_are_equal() -> None:
    """Pages as u8 where pools are e4m3, and pages under other numbers."""
    case = generate.compose_pages(2, fp8=True)
    right = planted.right(case)
    outputs = {n: t.view(torch.uint8) for n, t in right.items() if "pages" in n}
    assert judging.judge(case, right | outputs).status is Status.EQUAL
    plain = generate.compose_pages(2)
    turned = torch.cat([ints(0), 1 + torch.randperm(len(plain.inputs["owner"]) - 1).int()])
    back = torch.empty_like(turned).scatter_(0, turned.long(), torch.arange(len(turned)).int())
    pages = plain.inputs["slot_pages"]
    other = with_inputs(
        plain,
        owner=plain.inputs["owner"][turned.long()],
        local_page=plain.inputs["local_page"][turned.long()],
        slot_pages=torch.where(pages > 0, back[pages.clamp(min=0).long()], pages),
    )
    assert not torch.equal(other.inputs["slot_pages"], pages)
    assert judging.judge(other, planted.right(plain)).status is Status.EQUAL


@pytest.mark.parametrize(
    ("name", "at", "value", "rule", "words"),
    [
        ("writer", 0, 3, "two-writers", "a split inside a page"),
        ("writer", 1, -1, "no-writer", "that no rank writes"),
        ("owner", None, -1, "no-writer", "has no owner"),
        ("slot_pages", 0, 0, "page-zero", "relies on page 0"),
        ("local_page", None, 0, "page-zero", "rests on local page 0"),
    ],
)
def test_a_batch_with_a_problem_is_refused(
    name: str, at: int | None, value: int, rule: str, words: str
) -> None:
    """Before anything is called, with its ids; equal bytes by luck do not clear it."""
    case = generate.compose_pages(5, shape="mixed")
    page = int(case.inputs["slot_pages"][0])
    spoilt = changed(case, name, page if at is None else at, value)
    called: list[int] = []

    def candidate(**_: Call) -> dict[str, Tensor]:
        called.append(1)
        return planted.right(case)

    verdict = check(spoilt, candidate)
    assert (verdict.status, called) == (Status.DIFFERENT, [])
    assert ("inputs", rule) in rules(verdict)
    assert any(words in told for told in readings(verdict))
    assert judging.judge(spoilt, planted.right(case)).findings == verdict.findings
    assert all(found.place.startswith("slot ") for found in verdict.findings)


@pytest.mark.parametrize(
    ("name", "at", "value", "words"),
    [
        ("slot_pages", 0, 999, "page 999 is none of"),
        ("owner", None, 7, "is owned by rank 7 of 4"),
        ("local_page", None, 3 * 96, "as a byte offset it is token page 3: a descriptor"),
        ("writer", 0, 9, "token 0 is written by rank 9 of 4"),
        ("prefix_lens", 0, -4, "prefix_lens of request 0 is -4: it is 0 or more"),
        ("extend_lens", 0, 1 << 30, "extend_lens add up to"),
    ],
)
def test_ids_that_do_not_exist_make_the_record_invalid(
    name: str, at: int | None, value: int, words: str
) -> None:
    """Nothing may be concluded, and nothing is called."""
    case = generate.compose_pages(5, shape="mixed")
    page = int(case.inputs["slot_pages"][0])
    verdict = check(changed(case, name, page if at is None else at, value), one_process)
    assert (verdict.status, rules(verdict)) == (
        Status.UNDECIDED,
        {("inputs", "invalid-record")},
    )
    assert any(words in told for told in readings(verdict)), readings(verdict)


def test_more_problems_than_are_told_are_counted() -> None:
    """Eight of a rule, then how many more."""
    case = generate.compose_pages(0, shape="cold")
    writer = torch.arange(len(case.inputs["writer"])) % 4
    verdict = check(with_inputs(case, writer=torch.full_like(writer, -1).int()), one_process)
    assert len(verdict.findings) <= 9
    pages = case.inputs["slot_pages"]
    strange = with_inputs(case, slot_pages=torch.where(pages > 0, pages + 500, pages))
    strange = with_inputs(strange, owner=strange.inputs["owner"], writer=(writer + 9).int())
    told = check(strange, one_process)
    assert len(told.findings) == 8
    long = generate.compose_pages(0, shape="mixed")
    pages = long.inputs["slot_pages"]
    told = check(
        with_inputs(long, slot_pages=torch.where(pages > 0, pages + 500, pages)), one_process
    )
    assert readings(told)[-1] == "5 more of them"
    assert {found.rule for found in told.findings} == {"invalid-record"}


def test_more_current_pages_than_staging_are_refused() -> None:
    """With the pages that find no place."""
    case = generate.compose_pages(0, shape="cold")
    verdict = check(replace(case, params={**case.params, "staging_pages": 2}), one_process)
    assert rules(verdict) == {("inputs", "over-budget")}
    assert "7 current pages do not fit into 2 staging pages" in readings(verdict)[0]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"slot_pages": ints([3, 2], [9, 1])}, "starts and counts of runs are descriptors"),
        ({"local_page": torch.zeros(4, dtype=torch.int64)}, "addresses and byte offsets are"),
        ({"token_rows": None}, "inputs.token_pools and inputs.token_rows come together"),
        (
            dict.fromkeys(("token_rows", "token_pools", "index_rows", "index_pools")),
            "inputs hold no kind of page",
        ),
        ({"token_rows": torch.zeros(3, 18, 25, dtype=torch.uint8)}, "page_size 4 and rows of 25"),
        ({"token_rows": torch.zeros(3, 18, 24).to(torch.float8_e4m3fn)}, "bytes of one dtype"),
        (
            {
                "index_rows": torch.zeros(3, 18, 4, dtype=torch.uint8),
                "index_pools": torch.zeros(3, 4, 13, 16, dtype=torch.uint8),
            },
            "no key beside the scale",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_an_invalid_record(
    inputs: dict[str, Tensor | None], sentence: str
) -> None:
    """In one sentence that names the tensor."""
    case = generate.compose_pages(5, shape="mixed")
    if "index_pools" in inputs and inputs["index_pools"] is not None:
        pools = case.inputs["index_pools"]
        inputs["index_pools"] = torch.zeros(*pools.shape[:3], 16, dtype=torch.uint8)
    held = {n: t for n, t in {**case.inputs, **inputs}.items() if t is not None}
    verdict = check(replace(case, inputs=held), one_process)
    assert rules(verdict) == {("inputs", "invalid-record")}
    assert sentence in readings(verdict)[0]


def test_a_case_says_how_many_ranks_it_is_of() -> None:
    """Pools of other ranks, a class of rows and pages of a missing kind do not fit."""
    case = generate.compose_pages(0, kinds=["token"])
    for spoilt, sentence in (
        (replace(case, params={**case.params, "cp": 3}), "hold pools of 4 ranks; params.cp is 3"),
        (replace(case, row_class=torch.zeros(4, dtype=torch.int8)), "row_class has no meaning"),
        (replace(case, params={"page_size": 4}), "params.cp is missing"),
        (replace(case, params={"cp": 4, "staging_pages": -1}), "params.staging_pages is -1"),
    ):
        assert sentence in readings(check(spoilt, one_process))[0]
    index = planted.right(generate.compose_pages(0, kinds=["index"]))
    with pytest.raises(InvalidCase, match=r"recorded\.0\.index_pages need inputs\.index_pools"):
        ops.validate(replace(case, recorded=(index,)))
    verdict = check(case, lambda **call: {**one_process(**call), **index})
    assert ("index_pages", "not-compared") in rules(verdict)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("stage", ["token_pages", "index_pages", "row_locations"])
def test_one_wrong_number_anywhere_is_different(stage: str, at: int) -> None:
    """The first and the last byte of a page; the first and the last location."""
    case = generate.compose_pages(0)
    outputs = planted.right(case)
    outputs[stage][1, ..., at] += 1
    verdict = judging.judge(case, outputs)
    counts = {name: looked.counts["different"] for name, looked in verdict.stages.items()}
    pages = 3 * len(case.inputs["slot_pages"])
    wrong = 1 if stage == "row_locations" else pages
    assert counts == {**dict.fromkeys(counts, 0), stage: wrong}


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_slot_is_compared_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, shape: str, pages: int
) -> None:
    """Padding at the end included."""
    case = generate.compose_pages(0, shape=shape, kinds=["token"], padding=3)
    outputs = planted.right(case)
    monkeypatch.setattr(wanted, "_PIECE_BYTES", pages * outputs["token_pages"].shape[-1])
    assert judging.judge(case, outputs).status is Status.EQUAL
    outputs["token_pages"][2, 1, :, 5] ^= 1
    verdict = judging.judge(case, outputs)
    assert verdict.failing == list(range(len(case.inputs["slot_pages"])))
    assert verdict.stages["token_pages"].counts["different"] == len(verdict.failing)


def test_one_buffer_is_not_every_ranks() -> None:
    """A candidate of one process is refused by its shape, with a sentence."""
    case = generate.compose_pages(0, kinds=["token"])
    verdict = check(case, one_buffer)
    assert ("token_pages", "shape") in rules(verdict)
    assert "one buffer: every rank's is wanted, [cp, layers, slots, page bytes]" in readings(
        verdict
    )


def test_pages_of_another_shape_are_told_once() -> None:
    """By their shape, and not again as pages that were not given."""
    case = generate.compose_pages(0)
    right = planted.right(case)
    verdict = judging.judge(case, {**right, "token_pages": right["token_pages"][:, :, 1:]})
    assert [(found.stage, found.rule) for found in verdict.findings] == [("token_pages", "shape")]


def test_a_kind_that_was_left_out_is_not_equal() -> None:
    """Nothing may be concluded from the other one."""
    case = generate.compose_pages(0)
    verdict = check(case, lambda **call: one_process(**call)["token_pages"])
    assert (verdict.status, rules(verdict)) == (
        Status.UNDECIDED,
        {("index_pages", "not-compared"), ("row_locations", "not-compared")},
    )


def test_locations_of_any_strides_are_judged() -> None:
    """A single one, wrong on one rank, between others."""
    case = generate.compose_pages(3, shape="cold")
    one = with_inputs(
        case,
        slot_pages=case.inputs["slot_pages"][:1],
        writer=case.inputs["writer"][:1],
        prefix_lens=torch.zeros(1, dtype=torch.int32),
        extend_lens=torch.ones(1, dtype=torch.int32),
        token_rows=case.inputs["token_rows"][:, :1],
        index_rows=case.inputs["index_rows"][:, :1],
    )

    def strided(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - as the op
        outputs = one_process(**call)
        wide = torch.zeros(4, 2, dtype=torch.int32)
        wide[2] = 5
        return {**outputs, "row_locations": wide[:, :1]}

    verdict = check(one, strided)
    assert verdict.status is Status.DIFFERENT
    assert {(found.stage, found.rule) for found in verdict.findings} == {
        ("row_locations", "out-of-window"),
        ("row_locations", "diverged"),
    }


def test_zeros_alone_have_no_power() -> None:
    """A rank that composes nothing holds them too; right locations do not clear it."""
    case = generate.compose_pages(3)
    zeros = {
        f"{kind}_{what}": torch.zeros_like(case.inputs[f"{kind}_{what}"])
        for kind in ("token", "index")
        for what in ("pools", "rows")
    }
    with pytest.raises(Undecided, match="no power"):
        assert_equivalent(with_inputs(case, **zeros), one_process)


def test_nothing_to_move_has_no_power() -> None:
    """One rank that extends nothing cannot be wrong differently."""
    case = generate.compose_pages(0, shape="cold", cp=1)
    stages = check(case, one_process).stages
    assert [stages[f"{kind}_pages"].power for kind in ("token", "index")] == [True, True]
    lens = case.inputs["extend_lens"]
    still = with_inputs(
        case,
        prefix_lens=lens,
        extend_lens=torch.zeros_like(lens),
        writer=case.inputs["writer"][:0],
        token_rows=case.inputs["token_rows"][:, :0],
        index_rows=case.inputs["index_rows"][:, :0],
    )
    verdict = check(still, one_process)
    assert verdict.status is Status.UNDECIDED
    assert verdict.note.startswith("no power")
    two = replace(generate.compose_pages(0, shape="hits", cp=2))
    assert check(two, one_process).status is Status.EQUAL


def test_no_slot_at_all_is_undecided() -> None:
    """No page was compared."""
    case = generate.compose_pages(0, kinds=["token"])
    empty = with_inputs(
        case,
        slot_pages=ints(),
        writer=ints(),
        prefix_lens=ints(),
        extend_lens=ints(),
        token_rows=case.inputs["token_rows"][:, :0],
    )
    assert check(empty, one_process).status is Status.UNDECIDED


@pytest.mark.parametrize(
    ("holders", "reading"),
    [
        ((1, 1, 2, 1), "ranks 0 1 3 hold one page, rank 2 another, neither the reference's"),
        ((0, 0, 2, 0), "ranks 0 1 3 hold the reference's page, rank 2 another"),
        (
            (1, 2, 3, 1),
            "ranks 0 3 hold one page, rank 1 another, rank 2 another, none of them the reference's",
        ),
        ((1, 1, 1, 1), ""),
    ],
)
def test_ranks_are_compared_with_each_other(holders: tuple[int, ...], reading: str) -> None:
    """Groups of ranks are named, also where each equals nothing."""
    case = generate.compose_pages(0, kinds=["token"])
    outputs = planted.right(case)
    for rank, change in enumerate(holders):
        outputs["token_pages"][rank, 1, 3, 9] += change
        outputs["row_locations"][rank, 5] += 100 * change
    verdict = judging.judge(case, outputs)
    told = [found for found in verdict.findings if found.rule == "diverged"]
    assert [found.reading for found in told] == (
        [reading, reading.replace("page", "table of locations")] if reading else []
    )
    wrong = sum(change > 0 for change in holders)
    assert verdict.stages["token_pages"].rules["bits"] == wrong
    assert verdict.stages["row_locations"].rules["out-of-window"] == wrong


def test_strays_are_told_with_their_place() -> None:
    """Region, kind, layer or half, page and byte."""
    case = generate.compose_pages(0)
    rows = [[2, 1, 0, 5, 7, 3], [1, 0, 1, 0, 0, 96], [2, 0, 3, 1, 4, 1], [-1] * 6]
    strays = torch.full((4, 4, 6), -1, dtype=torch.int32)
    assert judging.judge(case, {**planted.right(case), "strays": strays}).status is Status.EQUAL
    strays[2] = torch.tensor(rows)
    verdict = judging.judge(case, {**planted.right(case), "strays": strays})
    assert [(f.rule, f.place, f.evidence[0].place) for f in verdict.findings] == [
        ("wrote-outside", "rank 2 index pool layer 2 page 5", "byte 7"),
        ("wrote-outside", "rank 2 token staging half 1 page 0", "byte 0"),
        ("wrote-outside", "rank 2 token guard after the dense", "byte 4"),
    ]
    assert verdict.status is Status.DIFFERENT
    for odd in (strays[..., :5], strays[:3]):
        assert ("strays", "shape") in rules(judging.judge(case, {"strays": odd}))
    none = {**planted.right(case), "strays": strays[:, :0]}
    assert judging.judge(case, none).status is Status.EQUAL
    many = strays.new_full((4, 12, 6), 9)
    verdict = judging.judge(case, {**planted.right(case), "strays": many})
    assert verdict.stages["strays"].rules == {"wrote-outside": 48}
    assert verdict.stages["strays"].counts == {"rows": 4, "identical": 0, "different": 4}
    assert verdict.findings[0].place == "rank 0 number 9 number 9 half 9 page 9"


def test_a_page_of_a_step_before_is_recognised() -> None:
    """By its turns, and a plan of the step before by the page that it named."""
    *before, now = generate.compose_sequence(3, steps=3)
    outputs = planted.right(now)
    last = weighing.reference(before[-1])["token_pages"].view(torch.uint8)
    slot = planted.slot_of(now, current=True)
    old = planted.slot_of(before[-1], current=True)
    outputs["token_pages"][1, 0, slot] = last[0, 1, old]
    verdict = judging.judge(now, outputs, earlier=before)
    assert verdict.findings[0].rule == "stale-round"
    assert readings(verdict)[0].startswith("holds the page of 2 turns before (layer 1 of the step")
    assert judging.judge(now, outputs).findings[0].rule == "page-mismatch"
    first, second = (generate.compose_pages(seed, shape="mixed") for seed in (7, 8))
    outputs["token_pages"][1, 0, slot] = planted.right(first)["token_pages"][0, 2, 6]
    told = readings(judging.judge(now, outputs, earlier=[first, second]))[0]
    assert told.startswith("holds the page of 4 turns before (layer 2 of 2 steps before, slot 6)")
    other = generate.compose_pages(8, shape="mixed", kinds=["index"])
    assert readings(judging.judge(now, outputs, earlier=[first, other]))[0] == told


def test_a_step_before_may_have_fewer_slots() -> None:
    """It had nothing in the next one."""
    first, *_, now = generate.compose_sequence(3, steps=3)
    slot = len(first.inputs["slot_pages"])
    outputs = planted.right(now)
    outputs["token_pages"][1, 0, slot] = outputs["token_pages"][1, 0, slot - 1]
    page = int(now.inputs["slot_pages"][slot - 1])
    told = readings(judging.judge(now, outputs, earlier=[first]))[0]
    assert told == f"holds page {page}, which slot {slot - 1} has"


def test_a_plan_of_the_step_before_is_recognised() -> None:
    """Batch 1 has pages 3 and 5, batch 2 the same turned round: A29."""
    one = generate.compose_pages(1, shape="mixed")
    pages = one.inputs["slot_pages"].clone()
    pages[[0, 1]] = pages[[1, 0]]
    two = with_inputs(one, slot_pages=pages)
    verdict = judging.judge(two, planted.right(one), earlier=[one])
    assert verdict.findings[0].rule == "page-mismatch"
    assert readings(verdict)[0] == (
        f"holds page {int(pages[1])}, which slot 1 has, "
        "as the step before had it in this slot: a plan of the step before"
    )


def test_an_earlier_step_has_to_be_one() -> None:
    """Another op, or a step that may not be composed, is the caller's mistake."""
    case = generate.compose_pages(0)
    with pytest.raises(UsageError, match="is a case of gather_rows"):
        judging.judge(case, planted.right(case), earlier=[generate.gather_rows(0)])
    for spoilt, words in ((changed(case, "writer", 0, 3), "may not be composed"),):
        with pytest.raises(UsageError, match=words):
            judging.judge(case, planted.right(case), earlier=[spoilt])
    with pytest.raises(UsageError, match=r"the earlier step .* composed: params\.cp is missing"):
        judging.judge(case, planted.right(case), earlier=[replace(case, params={})])
    verdict = judging.judge(replace(case, params={}), planted.right(case))
    assert readings(verdict) == ["params.cp is missing"]


def wide(pages: int, *, width: int = 4096) -> Case:
    """One request whose prefix pages stand in order in one pool, past 2^16 bytes."""
    random = torch.Generator().manual_seed(0)
    count = torch.arange(pages + 1, dtype=torch.int32)
    pools = torch.randint(1, 256, (1, 2, pages + 1, width), generator=random, dtype=torch.uint8)
    return Case(
        op="compose_pages",
        inputs={
            "token_pools": pools,
            "token_rows": torch.zeros(1, 0, width // 4, dtype=torch.uint8),
            "slot_pages": count[1:],
            "owner": torch.ones(pages + 1, dtype=torch.int32),
            "local_page": count,
            "writer": ints(),
            "prefix_lens": ints(4 * pages),
            "extend_lens": ints(0),
        },
        params={"cp": 2, "page_size": 4},
    )


def test_offsets_that_wrap_are_recognised() -> None:
    """Zeros from a page on, and the bytes at the wrapped offset: A15."""
    case = wide(24, width=4100)
    outputs = planted.right(case)
    # Local page 16 is the first beyond 2^16 bytes.
    outputs["token_pages"][:, :, 15:] = 0
    verdict = judging.judge(case, outputs)
    assert {f.rule for f in verdict.findings} == {"page-zero"}
    assert readings(verdict)[0] == (
        "from local page 16 of rank 1 on every page is zero: fits a 16-bit wrap, at byte 65,536"
    )
    outputs = planted.right(case)
    flat = case.inputs["token_pools"][0, 1].flatten()
    outputs["token_pages"][0, 0, 19] = flat[20 * 4100 - 65536 :][:4100]
    verdict = judging.judge(case, outputs)
    assert verdict.findings[0].rule == "page-mismatch"
    assert readings(verdict)[0] == (
        "local page 20 of rank 1 begins at byte 82,000, and these are its bytes from 16,464 on:"
        " a 16-bit wrap"
    )


@pytest.mark.parametrize(
    ("first", "fits"), [(15, ""), (16, ": fits a 16-bit wrap, at byte 65,536"), (17, "")]
)
def test_zeros_fit_a_wrap_where_it_lies_between(first: int, fits: str) -> None:
    """Page 15 of 4,096 bytes ends at 2^16, and page 16 begins there."""
    case = wide(24, width=4096)
    outputs = planted.right(case)
    outputs["token_pages"][:, :, first - 1 :] = 0
    told = f"from local page {first} of rank 1 on every page is zero{fits}"
    assert readings(judging.judge(case, outputs))[0] == told


def test_a_page_that_is_written_was_read_at_no_offset() -> None:
    """It is no page of a pool, whatever stands at the wrapped one."""
    case = with_inputs(
        wide(25, width=4100),
        prefix_lens=ints(4 * 24),
        extend_lens=ints(4),
        writer=ints(1, 1, 1, 1),
        token_rows=torch.ones(1, 4, 1025, dtype=torch.uint8),
    )
    outputs = planted.right(case)
    flat = case.inputs["token_pools"][0, 1].flatten()
    outputs["token_pages"][0, 0, 24] = flat[25 * 4100 - 65536 :][:4100]
    found = judging.judge(case, outputs).findings[0]
    assert (found.rule, found.reading) == ("bits", "")


def test_pages_that_no_slot_has_are_recognised() -> None:
    """Of the same layer or another, and a pool's dummy."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    pools, slot = case.inputs["token_pools"], planted.slot_of(case, current=False)
    named = {
        (int(o), int(at)): page
        for page, (o, at) in enumerate(
            zip(case.inputs["owner"], case.inputs["local_page"], strict=True)
        )
    }
    used = set(case.inputs["slot_pages"].tolist())
    mine = int(case.inputs["local_page"][int(case.inputs["slot_pages"][slot])])
    spare = next(p for (_, at), p in named.items() if p not in used and p and at != mine)
    place = next(place for place, page in named.items() if page == spare)
    for page, told in (
        (pools[1, place[0], place[1]], f"holds page {spare}, which no slot has"),
        (pools[1, 2, 0], "holds local page 0 of rank 2, a dummy"),
        (pools[0, 2, 0], "holds local page 0 of rank 2 of layer 0"),
        (planted.right(case)["token_pages"][0, 0, 4], "of layer 0, in slot 4"),
    ):
        outputs = planted.right(case)
        outputs["token_pages"][0, 1, slot] = page
        assert told in readings(judging.judge(case, outputs))[0]


def test_tokens_of_other_pages_and_ranks_are_recognised() -> None:
    """A token of a prefix page, tokens of another rank, tokens without any writer's bytes."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    width, right = case.inputs["token_rows"].shape[-1], planted.right(case)["token_pages"]
    slot = planted.slot_of(case, current=False)
    outputs = planted.right(case)
    outputs["token_pages"][0, 0, slot, :width] = right[0, 0, slot + 1, width : 2 * width]
    told = readings(judging.judge(case, outputs))[0]
    assert told.startswith("token 0 holds the bytes of token 1 of page ")
    now, rows = planted.slot_of(case, current=True), case.inputs["token_rows"][0]
    for tokens, words in (
        ([6, 7], "tokens 0-1 hold the rows 6 tokens after, of rank"),
        ([9, 5], "tokens 0-1 hold the rows of new tokens 9 5, of rank"),
        ([8], "token 0 holds the row 8 tokens after"),
    ):
        outputs = planted.right(case)
        outputs["token_pages"][0, 0, now, : len(tokens) * width] = rows[tokens].flatten()
        assert words in readings(judging.judge(case, outputs))[0]
    outputs = planted.right(case)
    outputs["token_pages"][0, 0, now, width : 2 * width] = poisons.BYTE[1]
    verdict = judging.judge(case, outputs)
    assert verdict.findings[0].rule == "unwritten"
    assert "every byte of token 1 is A7, the buffer's poison: never written" in readings(verdict)[0]
    outputs = planted.right(case)
    outputs["token_pages"][0, 0, slot, :width] *= 2
    assert "added up twice" in readings(judging.judge(case, outputs))[0]


def test_a_zero_page_of_a_buffer_of_zeros_is_a_zero_page() -> None:
    """Zero is no poison: what is right may hold it too."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    outputs = planted.right(case)
    outputs["token_pages"][0, 1, 4] = 0
    for poison, rule in ((0, "page-zero"), (poisons.BYTE[0], "page-zero")):
        held = replace(case, recorded=(outputs,), provenance={"poison.token_pages": str(poison)})
        assert check(held).findings[0].rule == rule


def test_locations_name_what_is_wrong_with_them() -> None:
    """Poison, another token of the same page, a shift by tokens, and what no slot has."""
    case = generate.compose_pages(0, kinds=["token"])
    cells = 4 * len(case.inputs["slot_pages"])
    edits: tuple[tuple[Callable[[Tensor], object], str, str], ...] = (
        (lambda t: t[2].fill_(poisons.INDEX[0]), "unwritten", ""),
        (lambda t: t[2, :2].copy_(t[2, :2].flip(0)), "bits", ""),
        (lambda t: t[2, 4:6].add_(-4), "page-mismatch", "off by -1 page"),
        (lambda t: t[2, 4:6].add_(-3), "page-mismatch", "off by -3"),
        (lambda t: t[2, :1].fill_(-5), "out-of-window", "off by -5"),
        (lambda t: t[2, :1].fill_(cells), "out-of-window", f"off by +{cells // 4} pages"),
        (lambda t: t[2, :1].fill_(cells - 1), "page-mismatch", f"off by +{cells - 1}"),
    )
    for edit, rule, words in edits:
        outputs = planted.right(case)
        edit(outputs["row_locations"])
        found = judging.judge(case, outputs).findings[0]
        assert (found.stage, found.rule) == ("row_locations", rule)
        assert words in found.reading


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (1, "+1 page"),
        (-1, "-1 page"),
        (11, "+11 pages"),
        (-21, "-21 pages"),
        (1001, "+1,001 pages"),
    ],
)
def test_a_shift_of_whole_pages_is_told_in_pages(pages: int, words: str) -> None:
    """One of them is a page, and eleven are pages."""
    case = generate.compose_pages(0, kinds=["token"], page_size=4)
    outputs = planted.right(case)
    outputs["row_locations"][2] += pages * 4
    assert readings(judging.judge(case, outputs))[0] == f"every wrong one is off by {words}"


def test_recorded_results_of_all_ranks_replay_in_one_process(
    tmp_path: Path, tell: Callable[..., tuple[int, str, str]]
) -> None:
    """From a file, by the command line, with counts of pages; lint and show know the op."""
    case = generate.compose_pages(1, shape="mixed")
    wrong = planted.spoilt(case, planted.FAULTS["two-layers-before"])
    path = tmp_path / "step.safetensors"
    poison = {"poison.token_pages": str(poisons.BYTE[0])}
    store.save(replace(case, recorded=(planted.right(case), wrong), provenance=poison), path)
    code, out, _ = tell("replay", path, "--json", tmp_path / "out.json")
    assert code == 1
    assert "1 of 720 pages differ (stale-round, diverged)" in out
    stage = json.loads((tmp_path / "out.json").read_text())["cases"][0]["stages"]["token_pages"]
    assert (stage["rows"], stage["different"], stage["failing"]) == (360, 1, [3])
    code, out, _ = tell("replay", path, "--rows", "1")
    assert code == 2
    code, out, _ = tell("lint", path)
    assert code == 0, out
    assert "compose_pages" in tell("show", path)[1]
    back = as_json.verdict_of(as_json.case_data(check(store.load(path))))
    assert as_text.failure(back) == as_text.failure(check(store.load(path)))
    bad = tmp_path / "bad.safetensors"
    store.save(changed(case, "writer", 0, 3), bad)
    code, out, _ = tell("lint", bad)
    assert (code, "two-writers: page" in out) == (1, True)
    with pytest.raises(InvalidCase, match="it is a byte"):
        ops.validate(replace(case, provenance={"poison.token_pages": "256"}))


def test_repeats_are_runs_of_their_own_and_a_failing_case_is_kept(tmp_path: Path) -> None:
    """The second call alone is wrong; the case is saved whole, and fails again."""
    case = generate.compose_pages(1, shape="mixed")
    calls: list[int] = []

    def flaky(**call: Call) -> dict[str, Tensor]:
        calls.append(1)
        outputs = one_process(**call)
        outputs["index_pages"][0, 0, 2, 3] += len(calls) - 1
        return outputs

    verdict = check(case, flaky, repeats=2)
    assert len(calls) == 2
    assert [run.stages["index_pages"].counts["different"] for run in verdict.runs] == [0, 1]
    kept = saved.save_failing(verdict, case, tmp_path)
    assert kept is not None
    assert kept[1].startswith("all rows: compose_pages cannot be cut")
    again = check(store.load(kept[0]), flaky)
    assert again.failing == [2]


def test_a_candidate_that_writes_into_its_pools_is_told() -> None:
    """Inputs are the ranks' memory."""
    case = generate.compose_pages(0, kinds=["token"])

    def spoils(**call: Call) -> dict[str, Tensor]:
        outputs = one_process(**call)
        call["token_pools"][0, 1, 0, 0] += 1
        return outputs

    verdict = check(case, spoils)
    assert ("inputs", "wrote-outside") in rules(verdict)


@pytest.mark.parametrize(
    ("said", "rule"),
    [("timeout", "timeout"), ("out-of-memory", "out-of-memory"), ("bits", "crash")],
)
def test_ranks_say_how_they_failed(said: str, rule: str) -> None:
    """What ranks fail by is the rule; nothing that they say is a difference."""

    def fails(**_: Call) -> Tensor:
        raise RanksFailed("rank 1 is late", rule=said, rank=1)

    verdict = check(generate.compose_pages(0, kinds=["token"]), fails)
    assert rules(verdict) == {("candidate", rule)}
    assert verdict.status is Status.UNDECIDED


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_are_found_without_composing_their_prefix(shape: str) -> None:
    """Their digests are those of the whole reference, of both kinds and every layer."""
    case = generate.compose_pages(6, shape=shape)
    step, reference = wanted.of_case(case), weighing.reference(case)
    for kind in step.kinds.values():
        pages = Pages(step=step, kind=kind)
        for layer in range(len(kind.pools)):
            want: dict[bytes, list[int]] = {}
            for slot, page in enumerate(rows_in(reference[f"{kind.name}_pages"][0, layer])):
                if step.batch.slot_pages[slot] > batches.NOTHING:
                    want.setdefault(key_of(page), []).append(slot)
            assert pages.slots(layer) == want


def test_many_wrong_pages_are_read_in_linear_time() -> None:
    """Four times as many take about four times as long, not sixteen."""

    def took(pages: int) -> float:
        case = wide(pages, width=8)
        outputs = planted.right(case)
        outputs["token_pages"] ^= 255
        times = []
        for _ in range(3):
            start = time.process_time()
            verdict = judging.judge(case, outputs)
            times.append(time.process_time() - start)
            assert verdict.stages["token_pages"].rules == {"bits": 2 * pages}
        return min(times)

    assert took(4000) < 8 * took(1000)


@pytest.mark.parametrize("pages", [1, 1000])
@pytest.mark.parametrize(("byte", "rule"), [(0, "page-zero"), (poisons.BYTE[0], "unwritten")])
def test_the_only_wrong_page_is_that_of_its_rank_and_layer(
    monkeypatch: pytest.MonkeyPatch, pages: int, byte: int, rule: str
) -> None:
    """Ranks that hold the same bytes have readings of their own, in pieces of any size."""
    monkeypatch.setattr(wanted, "_PIECE_BYTES", 96 * pages)
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    now = batches.current_slots(wanted.of_case(case).batch).tolist()
    outputs = planted.right(case)
    outputs["token_pages"][0, 0, now] = byte
    outputs["token_pages"][1, 0, now[0]] = byte
    outputs["token_pages"][1, 1, now[1]] = byte
    told = [
        (found.place.split(" token ")[0], "the only wrong one" in found.reading)
        for found in judging.judge(case, outputs).findings
        if found.rule == rule and found.row == now[0]
    ]
    assert told == [("rank 0 layer 0", False), ("rank 1 layer 0", True)]


def test_the_one_current_page_is_not_the_first_of_several() -> None:
    """Nothing says that a row was left out."""
    case = step([(8, 3)], cp=2, kinds=["token"]).case
    outputs = planted.right(case)
    outputs["token_pages"].view(torch.uint8)[0, 0, 2] = 0
    assert readings(judging.judge(case, outputs))[0] == "every byte is zero"


@pytest.mark.parametrize(
    ("layer", "other", "reading"),
    [
        (1, 2, "next turn's page (layer 2): its half was reused at distance 1"),
        (1, 3, "page of 2 turns later (layer 3): its half was written again before it was read"),
        (1, 4, "page of 3 turns later (layer 4)"),
        (1, 5, "page of 4 turns later (layer 5)"),
        (5, 4, "page of 1 turn before (layer 4), which has the other parity half"),
        (
            5,
            3,
            "page of 2 turns before (layer 3): the same parity half, read before it was written",
        ),
        (5, 2, "page of 3 turns before (layer 2), which has the other parity half"),
    ],
)
def test_turns_are_told_by_their_halves(layer: int, other: int, reading: str) -> None:
    """One and two later have a cause; before, each half has its own."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"], layers=6)
    slot, outputs = planted.slot_of(case, current=True), planted.right(case)
    outputs["token_pages"][0, layer, slot] = outputs["token_pages"][0, other, slot]
    assert readings(judging.judge(case, outputs))[0] == f"holds the {reading}"


def test_halves_are_blamed_for_current_pages_alone() -> None:
    """A prefix page of another layer was never staged."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    for current in (False, True):
        slot, outputs = planted.slot_of(case, current=current), planted.right(case)
        outputs["token_pages"][0, 1, slot] = outputs["token_pages"][0, 2, slot]
        found = judging.judge(case, outputs).findings[0]
        told = "holds the next turn's page (layer 2): its half was reused at distance 1"
        assert found.rule == "stale-round"
        assert found.reading == (told if current else "holds the page of layer 2")


def test_the_nearest_turn_is_told() -> None:
    """Of several layers and steps that have the bytes; of two as near, the one before."""
    case = generate.compose_pages(1, shape="mixed", kinds=["token"])
    slot = planted.slot_of(case, current=True)
    token = (batches.row_locations(wanted.of_case(case).batch) // 4 == slot).nonzero()[:, 0]
    rows, pools = (case.inputs[f"token_{name}"].clone() for name in ("rows", "pools"))
    one = rows.new_tensor(range(1, 1 + rows.shape[-1]))

    def told(same: list[int], at: int, earlier: list[int]) -> str:
        now, before = (
            with_inputs(case, token_rows=_filled(rows, layers), token_pools=pools)
            for layers in (same, earlier)
        )
        outputs = planted.right(now)
        outputs["token_pages"][0, at, slot] = planted.right(
            with_inputs(case, token_rows=_filled(rows, [0]), token_pools=pools)
        )["token_pages"][0, 0, slot]
        return readings(judging.judge(now, outputs, earlier=[before]))[0]

    def _filled(rows: Tensor, layers: list[int]) -> Tensor:
        filled = rows.clone()
        for layer in layers:
            filled[layer, token] = one
        return filled

    assert "1 turn before (layer 1)" in told([0, 1], 2, [])
    assert "1 turn before (layer 0)" in told([0, 2], 1, [])
    assert "1 turn before (layer 2 of the step before)" in told([2], 0, [1, 2])
    assert "1 turn before (layer 2 of the step before)" in told([1], 0, [2])


def test_the_judge_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 256 MiB beyond inputs and results of twice that each; another copy is seen."""
    most = 256 << 20
    case = wide(7000, width=64 * 656)
    outputs = planted.right(case)
    outputs["token_pages"][1, 0, ::7, 5] ^= 1
    assert min(outputs["token_pages"].nbytes, case.inputs["token_pools"].nbytes) > 2 * most

    def peak() -> int:
        with memory.measured(None) as meter:
            verdict = judging.judge(case, outputs)
        assert verdict.stages["token_pages"].rules["bits"] == 1000
        return meter.peak

    assert peak() < most
    whole = wanted.of_case

    def copied(case: Case) -> wanted.Step:
        pools = case.inputs["token_pools"].clone()
        return whole(with_inputs(case, token_pools=pools))

    monkeypatch.setattr(wanted, "of_case", copied)
    assert peak() > most


def test_messages_read_as_they_are_kept() -> None:
    """Whole messages: a stale page on one rank, a refused batch."""
    case = generate.compose_pages(1, shape="mixed")
    stale = judging.judge(case, planted.spoilt(case, planted.FAULTS["two-layers-before"]))
    refused = check(changed(case, "writer", 1, 0), one_process)
    text = "\n\n".join(as_text.failure(verdict) for verdict in (stale, refused)) + "\n"
    assert text == (MESSAGES / "compose.txt").read_text(encoding="utf-8")


def test_generated_steps_may_be_composed() -> None:
    """Of every shape there is; a shape or a kind that is none is refused."""
    for seed in range(30):
        case = generate.compose_pages(seed, cp=1 + seed % 8, page_size=1 + seed % 5)
        assert not list(weighing.refused(case))
    with pytest.raises(UsageError, match="no shape named 'warm'"):
        generate.compose_pages(0, shape="warm")
    with pytest.raises(UsageError, match="kinds are none"):
        generate.compose_pages(0, kinds=[])
    with pytest.raises(UsageError, match="kinds are 'token': they are a list of token and index"):
        generate.compose_pages(0, kinds="token")
    for wrong in ({"cp": 0}, {"cp": 2.5}, {"page_size": 0}, {"layers": 0}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=f"{name} is {value}: it is a whole number, 1 or more"):
            generate.compose_pages(0, **wrong)
    assert call_of(generate.compose_pages(0))["cp"] == 4
