"""Rows and picks of several ranks, QSA layers, keys quantised, gathered and moved, judged whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import call_of
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.report import as_text
from equivalence.verdict import Status, Verdict
from refimpl import pages, qsa, quant, ranks

Candidate = Callable[..., Any]
RIGHT: dict[str, tuple[Case, Candidate]] = {
    "gather_rows zigzag": (generate.gather_rows(0), ranks.gather_rows),
    "gather_rows interleave": (generate.gather_rows(1, kind="interleave"), ranks.gather_rows),
    "merge_topk": (generate.merge_topk(0), ranks.merge_topk),
    "merge_topk by 16": (generate.merge_topk(1, interleave=16), ranks.merge_topk),
    "expand_blocks": (generate.expand_blocks(0), qsa.expand_blocks),
    "qsa_indexer": (generate.qsa_indexer(0), qsa.qsa_indexer),
    "quantize_q": (generate.quantize_q(0), quant.quantize_q),
    "quantize_q sglang": (generate.quantize_q(1, style="sglang-q"), quant.quantize_q),
    "quantize_k": (generate.quantize_k(0), quant.quantize_k),
    "gather_keys": (
        generate.gather_keys(0),
        lambda *, rows, **call: pages.gather_batch(**call) if rows else {},
    ),
    "move_tokens": (generate.move_tokens(0), pages.move_tokens),
    "move_tokens, pads -1": (generate.move_tokens(1, pad=-1), pages.move_tokens),
}


def rules(verdict: Verdict) -> tuple[Status, set[tuple[str, str]]]:
    """The status, and every stage and rule."""
    return verdict.status, {(found.stage, found.rule) for found in verdict.findings}


@pytest.mark.parametrize("name", RIGHT)
def test_the_reference_is_equal(name: str) -> None:
    """Every row of every output is identical."""
    case, candidate = RIGHT[name]
    verdict = check(case, candidate)
    assert verdict.status is Status.EQUAL, verdict.findings
    assert all(
        stage.counts.get("different", 0) == 0 and stage.power for stage in verdict.stages.values()
    )


def test_a_row_of_two_ranks_is_a_fault_whatever_was_given() -> None:
    """It is told with both places, and equal bytes do not clear it."""
    case = generate.gather_rows(0)
    ids = case.inputs["row_ids"].clone()
    twice = replace(case, inputs={**case.inputs, "row_ids": ids})
    ids[2, 0] = ids[0, 0]
    right = ranks.gather_rows(**call_of(case))
    verdict = check(twice, lambda **_: right)
    assert rules(verdict)[1] >= {("inputs", "two-writers"), ("inputs", "no-writer")}
    assert verdict.status is Status.DIFFERENT
    assert "equal bytes by luck do not make two owners one" in as_text.failure(verdict)


def test_shifted_rows_are_other_bits() -> None:
    """Ranks in another order give each row that of another."""
    case = generate.gather_rows(0)

    def turned(*, shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
        return ranks.gather_rows(shards=shards.roll(1, 0), row_ids=row_ids, rows=rows)

    assert rules(check(case, turned)) == (Status.DIFFERENT, {("rows", "bits")})


def test_rows_move_by_their_bytes() -> None:
    """Every byte of fp8 is itself: 0x80 is not 0x00, and a NaN equals itself."""
    case = generate.gather_rows(0)
    bytes_ = torch.randint(0, 256, case.inputs["shards"].shape, dtype=torch.uint8)
    case = replace(case, inputs={**case.inputs, "shards": bytes_.view(torch.float8_e4m3fn)})
    right = ranks.gather_rows(**call_of(case))
    assert check(case, lambda **_: right.clone()).status is Status.EQUAL
    wrong = right.view(torch.uint8).clone()
    wrong[4, 3] ^= 0x80
    verdict = check(case, lambda **_: wrong.view(torch.float8_e4m3fn))
    assert [(f.rule, f.row, f.place) for f in verdict.findings] == [("bits", 4, "1 of 16 values")]


def test_a_merge_that_cuts_k_on_every_rank_loses_winners() -> None:
    """K / R picks of each rank are not the best k of all."""
    case = generate.merge_topk(0, tie_rich=False)

    def cut(*, scores: Tensor, picks: Tensor, k: int, **call: Any) -> Tensor:  # noqa: ANN401 - the rest of the call
        few = -(-k // len(picks))
        return ranks.merge_topk(scores=scores[..., :few], picks=picks[..., :few], k=k, **call)

    status, found = rules(check(case, cut, contract="order=any,ties=any"))
    assert status is Status.DIFFERENT
    assert found <= {("raw_indices", "lost-winner"), ("raw_indices", "hole")}


def test_a_merge_of_other_ties_is_tied() -> None:
    """Ties across ranks are free where the contract says so."""
    case = generate.merge_topk(0)

    def highest(**call: Any) -> Tensor:  # noqa: ANN401 - the call
        return ranks.merge_topk(**call, ties="highest")

    assert rules(check(case, highest))[1] == {("raw_indices", "wrong-tie")}
    assert check(case, highest, contract="ties=any").stages["raw_indices"].counts["tied"] > 0


def test_a_token_that_its_rank_does_not_own_is_an_invalid_record() -> None:
    """The sentence names the rank, the row and the slot."""
    case = generate.merge_topk(0)
    picks = case.inputs["picks"].clone()
    picks[1, 0, 0] = 99
    verdict = check(replace(case, inputs={**case.inputs, "picks": picks}), ranks.merge_topk)
    assert [f.reading for f in verdict.findings] == [
        "inputs: rank 1 row 0 slot 0 picks token 99 of its 24"
    ]


def test_packed_rows_alone_are_judged_by_the_blocks_they_hold() -> None:
    """A lost block of packed rows is a lost winner, and a wrong tail is no block's."""
    case = generate.qsa_indexer(0, tie_rich=False)
    right = qsa.qsa_indexer(**call_of(case))
    assert check(case, lambda **_: {"packed": right["packed"]}).status is Status.EQUAL
    ids = right["block_ids"].clone()
    seen = set(ids[-1].tolist())
    ids[-1, 0] = next(b for b in range(int(case.inputs["visible_blocks"][-1])) if b not in seen)
    lost = qsa.expand_blocks(
        block_ids=ids,
        positions=case.inputs["positions"],
        visible_blocks=case.inputs["visible_blocks"],
    )
    wrong = check(case, lambda **_: {"packed": lost})
    assert rules(wrong) == (Status.DIFFERENT, {("packed", "lost-winner")})
    tail = right["packed"].clone()
    tail[-1, :-1][tail[-1, :-1] == int(case.inputs["positions"][-1])] = 3
    assert rules(check(case, lambda **_: {"packed": tail}))[1] == {("packed", "page-mismatch")}


def test_a_padding_row_of_qsa_owes_nothing() -> None:
    """It sees no block, and its count is 0."""
    case = generate.qsa_indexer(0)
    right = qsa.qsa_indexer(**call_of(case))
    assert case.inputs["positions"][0] == -1
    assert right["packed"][0].tolist() == [-1] * (right["packed"].shape[1] - 1) + [0]
    spoilt = {name: tensor.clone() for name, tensor in right.items()}
    spoilt["packed"][0, 0] = 0
    assert rules(check(case, lambda **_: spoilt))[1] == {("packed", "pad")}


def test_a_rounded_scale_is_recognised() -> None:
    """Values divided by the unrounded scale and a scale rounded afterwards name their cause."""
    case = generate.quantize_k(0)
    unrounded = quant.quantize(x=case.inputs["x"], floor=1e-4, scale="exact")
    rounded = quant.quantize_k(x=case.inputs["x"], style="k")["scale"]
    verdict = check(case, lambda **_: {"values": unrounded[0], "scale": rounded})
    status, found = rules(verdict)
    assert (status, found) == (Status.DIFFERENT, {("values", "bits")})
    assert any("rounded" in f.reading for f in verdict.findings)


def test_interleaved_keys_are_recognised() -> None:
    """A planar page read as value and scale of each token drifts from token 1 on."""
    case = generate.gather_keys(0)
    cache, size = case.inputs["kv_cache"], 4
    width = cache.shape[1] // size
    torn = cache.reshape(len(cache), size, width)
    values = torn[:, :, :-4].reshape(len(cache), -1)
    scales = torn[:, :, -4:].reshape(len(cache), -1)
    planar = torch.cat([values, scales], 1)
    call = {name: case.inputs[name] for name in ("block_table", "seq_lens")}
    wrong = pages.gather_batch(kv_cache=planar, **call, page_size=size)
    verdict = check(case, lambda **_: wrong)
    assert rules(verdict)[1] == {("values", "bits"), ("k_scale", "bits")}
    assert any("interleaved" in f.reading for f in verdict.findings)


@pytest.mark.parametrize(("poison", "rule"), [({}, "bits"), ({"poison.values": "83"}, "unwritten")])
def test_rows_that_a_gather_skipped_are_unwritten(poison: dict[str, str], rule: str) -> None:
    """A workspace smaller than what was admitted: A23; without its poison they are other bits."""
    case = generate.gather_keys(0)
    call = {name: case.inputs[name] for name in ("kv_cache", "block_table", "seq_lens")}
    short = pages.gather_batch(**call, page_size=4)
    short["values"].view(torch.uint8)[10:] = 83
    verdict = check(replace(case, recorded=(short,), provenance=poison))
    told = [(found.stage, found.rule, found.row) for found in verdict.findings]
    assert told == [("values", rule, row) for row in (10, 11, 12)]


def test_a_call_that_is_judged_whole_has_no_rows_to_choose() -> None:
    """Rows of a gather cannot be judged as a call of their own."""
    with pytest.raises(UsageError, match="gather_rows is judged whole: it takes no rows"):
        check(generate.gather_rows(0), ranks.gather_rows, rows=[1])
