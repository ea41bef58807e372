"""Several ranks give the layer of one rank, whichever way rows and keys are split."""

from dataclasses import replace
from functools import partial
from typing import Any

import batches
import by_twin
import pytest
import torch
from batches import BATCHES, DRAWN, call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths.chunked import chunked, original
from equivalence.paths.sharded import context_parallel, key_sharded
from equivalence.planted.ranks import GATHERS, MERGES
from equivalence.planted.reference import right_outputs
from equivalence.verdict import Status
from refimpl import fast, layer
from refimpl import ranks as sharing
from refimpl.bits import as_int

SPLITS = ("interleave", "zigzag")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all outputs have equal bits."""
    return got.keys() == want.keys() and all(
        torch.equal(as_int(got[name]), as_int(want[name])) for name in want
    )


def keywords(case: Case) -> dict[str, Any]:
    """What a candidate is called with."""
    return {**case.inputs, **case.params}


def named(form: str, mask: Tensor) -> dict[str, Any]:
    """The keyword of a mask in this form."""
    return {"mask" if form in {"bool", "packed"} else "block_ids": mask}


# --- context parallel ----------------------------------------------------------------------------


@given(
    case=st.builds(batches.case, DRAWN, form=st.sampled_from(["page_table", "slot_map", "offset"])),
    ranks=st.integers(1, 8),
    split=st.sampled_from(SPLITS),
)
def test_rows_of_ranks_are_the_rows_of_one(case: Case, ranks: int, split: str) -> None:
    """Logits, picks, slots and offsets, also where a rank has no row at all."""
    how: dict[str, Any] = {"path": original, "scorer": "torch", "keep_logits": True}
    want = call(case, original, scorer="torch", keep_logits=True)
    assert same(call(case, context_parallel, ranks=ranks, split=split, **how), want)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_the_judge_calls_ranks_equal(batch: Any, split: Any) -> None:  # noqa: ANN401 - lengths; a literal
    """By the reference and in chunks."""
    case = batches.case(batch)
    paths: list[dict[str, Any]] = [{}, {"path": partial(chunked, style="vllm", budget_bytes=200)}]
    for path in paths:
        verdict = check(case, partial(context_parallel, ranks=3, split=split, **path))
        assert (verdict.status, verdict.findings) == (Status.EQUAL, ())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", ["bool", "packed", "unordered"])
@pytest.mark.parametrize("ranks", [3, 9])
def test_masks_of_ranks_are_the_mask_of_one(ranks: int, form: Any, split: str) -> None:  # noqa: ANN401 - a literal
    """Ranks publish their own rows, one each at last, and pick inside their own rows of a mask."""
    given = keywords(generate.prefill_indexer(4))
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    how: dict[str, Any] = {"ranks": ranks, "split": split}
    want = layer.prefill_indexer(**given, topk_blocks=2, form=form)
    got = context_parallel(**given, topk_blocks=2, form=form, **how)
    assert same(got, want)
    inside = named(form, want[name])
    assert same(
        context_parallel(**given, **inside, **how), layer.prefill_indexer(**given, **inside)
    )


@pytest.mark.parametrize("split", SPLITS)
def test_unscored_rows_stay_with_their_rank(split: Any) -> None:  # noqa: ANN401 - a literal
    """score_end is cut with the rows."""
    given = keywords(generate.prefill_indexer(2))
    start, end = given["row_start"], given["row_end"]
    given["score_end"] = torch.where(end - start <= 12, start, end)
    assert same(context_parallel(**given, split=split), layer.prefill_indexer(**given))


# --- key-sharded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("interleave", [1, 2, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tokens_of_ranks_make_the_layer_of_one(ranks: int, interleave: int) -> None:
    """Logits, picks and slots of long, short and empty rows."""
    case = generate.decode_indexer(1, heads=16, head_dim=32)
    got = call(case, key_sharded, ranks=ranks, interleave=interleave)
    assert same(got, right_outputs(case))


@pytest.mark.parametrize("interleave", [1, 2, 64])
def test_the_judge_calls_token_shards_equal(interleave: int) -> None:
    """Strictly, bits and lowest ties."""
    case = generate.decode_indexer(3, heads=16, head_dim=32)
    verdict = check(case, partial(key_sharded, ranks=4, interleave=interleave))
    assert (verdict.status, verdict.findings) == (Status.EQUAL, ())


@pytest.mark.parametrize("form", ["bool", "packed", "unordered", "ascending"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_consumer_has_its_mask_on_every_rank(ranks: int, form: Any) -> None:  # noqa: ANN401 - a literal
    """A rank applies the columns of its own tokens; blocks of 8 lie across ranks."""
    case = generate.decode_indexer(5, heads=16, head_dim=32)
    given = keywords(case)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    mask = layer.decode_indexer(**given, topk_blocks=1, form=form)[name]
    want = layer.decode_indexer(**given, **named(form, mask))
    free = layer.decode_indexer(**given)
    assert not torch.equal(want["raw_indices"], free["raw_indices"])
    assert same(key_sharded(**given, **named(form, mask), ranks=ranks), want)


def test_padding_rows_and_unused_table_entries_are_no_tokens() -> None:
    """A length of -1, and pages past every length that the cache does not have."""
    case = generate.decode_indexer(2, heads=16, head_dim=32)
    given = keywords(case)
    lens = given["context_lens"].clone()
    lens[1] = torch.tensor([-1, 3])
    table = given["block_table"].clone()
    table[1, 1:] = torch.tensor([-1, 9999, -7, 1 << 30])[: table.shape[1] - 1]
    given |= {"context_lens": lens, "block_table": table}
    want = layer.decode_indexer(**given, empty_rows="first")
    assert want["raw_indices"][2].tolist()[:2] == [0, -1]
    assert same(key_sharded(**given, ranks=3, empty_rows="first"), want)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ranks": 0}, "ranks is 0: it is a whole number, 1 or more"),
        ({"interleave": 0}, "interleave is 0: it is a whole number, 1 or more"),
        ({"topk_blocks": 2}, "key_sharded takes no 'topk_blocks': no rank sees every token"),
        ({"init_tokens": 1}, "key_sharded takes no 'init_tokens': no rank sees every token"),
    ],
)
def test_what_no_rank_can_do_is_refused(how: dict[str, Any], message: str) -> None:
    """In one sentence."""
    with pytest.raises(UsageError) as raised:
        call(generate.decode_indexer(1, heads=16, head_dim=32), key_sharded, **how)
    assert str(raised.value) == message


def test_published_rows_are_not_split() -> None:
    """Row numbers of a tail are those of one rank."""
    case = batches.case(BATCHES["cold"])
    case = replace(case, inputs={**case.inputs, "rows": torch.tensor([8], dtype=torch.int32)})
    with pytest.raises(UsageError) as raised:
        call(case, context_parallel)
    assert str(raised.value) == "context_parallel publishes all rows: it takes no 'rows'"


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_with_a_fault_is_different(name: str, split: Any) -> None:  # noqa: ANN401 - a literal
    """Eleven rows on three ranks: picks of wrong rows, by the rows that were moved."""
    fault = GATHERS[name]
    case = batches.case([(11, 40)], tie_rich=False)
    want = call(case, original)["raw_indices"]
    rows = sharing.split_rows(rows=11, ranks=3, kind=split)
    got = fault.candidate(
        shards=sharing.shard_rows(want, rows), row_ids=sharing.row_ids(rows), rows=11
    )
    wrong = (got != want).any(1).nonzero()[:, 0].tolist()
    assert wrong == {"row-twice": [10], "row-of-nobody": [9, 10]}.get(name, list(range(11)))
    how: dict[str, Any] = {"ranks": 3, "split": split, "path": original}
    verdict = check(case, partial(context_parallel, gather=fault.candidate, **how))
    assert verdict.status is Status.DIFFERENT
    assert check(case, partial(context_parallel, **how)).status is Status.EQUAL


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("name", MERGES)
def test_a_merge_with_a_fault_is_illegal(name: str, interleave: int) -> None:
    """The check names the rows that the twin calls illegal, by its rules, though ties are free."""
    fault = MERGES[name]
    case = generate.decode_indexer(4, heads=16, head_dim=32, tie_rich=False)
    free = Contract.parse("order=any,ties=any,zero_sign=equal")
    how: dict[str, Any] = {"ranks": 4, "interleave": interleave}
    verdict = check(case, partial(key_sharded, merge=fault.candidate, **how), contract=free)
    assert verdict.status is Status.DIFFERENT
    rules = {found.rule for found in verdict.findings if found.stage == "raw_indices"}
    assert rules <= fault.rules
    got = call(case, key_sharded, merge=fault.candidate, **how)
    legal = [
        by_twin.legal(case, got, got["logits"], row, free)["raw_indices"]
        for row in range(len(got["logits"]))
    ]
    assert False in legal
    assert verdict.failing == [row for row, right in enumerate(legal) if not right]


@pytest.mark.parametrize("name", [*GATHERS, *MERGES])
def test_the_ops_of_ranks_tell_their_faults(name: str) -> None:
    """Called alone, each is DIFFERENT by its own rules; the reference is EQUAL."""
    fault = {**GATHERS, **MERGES}[name]
    op, right = (
        (generate.gather_rows, sharing.gather_rows)
        if name in GATHERS
        else (generate.merge_topk, sharing.merge_topk)
    )
    verdict = check(op(1), fault.candidate)
    assert verdict.status is Status.DIFFERENT
    assert {found.rule for found in verdict.findings} <= fault.rules
    assert check(op(1), right).status is Status.EQUAL
