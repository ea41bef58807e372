"""Whole layers are their parts, in every form the inputs allow."""

from typing import Any

import torch

from equivalence import generate
from equivalence.case import Case
from refimpl import layer, pages, scoring, topk


def keywords(case: Case) -> dict[str, Any]:
    """What a candidate is called with."""
    return {**case.inputs, **case.params}


def test_the_dense_layer_is_scoring_then_topk_then_slots() -> None:
    """Picks of the layer are the picks of its own logits, and slots are theirs."""
    case = generate.prefill_indexer(3)
    got = layer.prefill_indexer(**keywords(case))
    inputs: dict[str, Any] = dict(case.inputs)
    table, request = inputs.pop("block_table"), inputs.pop("row_to_request")
    logits = scoring.mqa_logits(**inputs)
    raw = topk.ragged_topk(
        scores=logits, row_start=inputs["row_start"], row_end=inputs["row_end"], k=12
    )
    slots = pages.translate_pages(
        raw_indices=raw, page_table=table, page_size=4, row_to_request=request
    )
    want = {"logits": logits, "raw_indices": raw, "page_indices": slots}
    assert {name: torch.equal(got[name], want[name]) for name in got} == dict.fromkeys(want, True)


def test_row_relative_logits_give_the_same_picks() -> None:
    """Where a row's cells begin changes nothing about its picks."""
    case = generate.prefill_indexer(4, form="offset")
    absolute = layer.prefill_indexer(**keywords(case))
    relative = layer.prefill_indexer(**keywords(case), columns="row-relative", width=64)
    assert sorted(relative) == ["logits", "ragged_indices", "raw_indices"]
    assert relative["logits"].shape == (len(case.inputs["q"]), 64)
    for stage in ("raw_indices", "ragged_indices"):
        assert torch.equal(absolute[stage], relative[stage])


def test_a_slot_map_counts_from_the_rows_start() -> None:
    """k_slots is indexed by the column of the concatenated K."""
    case = generate.prefill_indexer(5, form="slot_map")
    got = layer.prefill_indexer(**keywords(case))
    column = got["raw_indices"] + case.inputs["row_start"][:, None]
    want = torch.where(
        got["raw_indices"] == -1, -1, case.inputs["k_slots"][column.clamp(0, 79).long()]
    )
    assert torch.equal(got["page_indices"].long(), want.long())


def test_the_paged_layer_gives_every_query_token_its_own_length() -> None:
    """Row b * next_n + i sees context_lens[b, i] keys of request b."""
    case = generate.decode_indexer(6)
    got = layer.decode_indexer(**keywords(case))
    lengths = case.inputs["context_lens"].reshape(-1)
    visible = (got["logits"] != -torch.inf).sum(1)
    assert visible.tolist() == lengths.tolist()
    owed = (got["raw_indices"] != -1).sum(1)
    assert owed.tolist() == lengths.clamp(max=12).tolist()
    assert (got["page_indices"] != -1).sum(1).tolist() == owed.tolist()
