"""Declared dialects of a layer: pinned tokens, scores not computed by design, clamped lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import generate
from equivalence.case import Case
from equivalence.judge import check
from equivalence.verdict import Status
from refimpl import geometry, layer


def pinned(case: Case) -> Case:
    """The same layer with its first two and last three columns pinned."""
    return replace(case, params={**case.params, "init_tokens": 2, "local_tokens": 3})


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_pinned_tokens_are_picked_whatever_they_score(name: str) -> None:
    """The reference is identical; a kernel that pins nothing loses winners."""
    prefill = name == "prefill"
    case = pinned(generate.prefill_indexer(0) if prefill else generate.decode_indexer(0))
    candidate = layer.prefill_indexer if prefill else layer.decode_indexer

    def forgets(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        call |= {"init_tokens": 0, "local_tokens": 0}
        return candidate(**call)

    contract = "order=any,ties=any,reserved_pages=0"
    right, wrong = (check(case, one, contract=contract) for one in (candidate, forgets))
    assert (right.status, right.stages["logits"].status) == (Status.EQUAL, Status.EQUAL)
    assert wrong.status is Status.DIFFERENT
    assert {f.rule for f in wrong.findings if f.stage == "raw_indices"} == {"lost-winner"}


def test_rows_that_fit_need_no_scores() -> None:
    """Where score_end says so, garbage in rows of at most k columns is not compared."""
    case = generate.prefill_indexer(0)
    start, end = (case.inputs[name] for name in ("row_start", "row_end"))
    ends = geometry.score_ends(row_start=start, row_end=end, k=12)
    declared = replace(case, inputs={**case.inputs, "score_end": ends})
    short = ((end - start > 0) & (end - start <= 12)).nonzero()[0, 0]

    def lazy(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        right = layer.prefill_indexer(**call)
        right["logits"][short] = 7.0
        return right

    statuses = [
        check(one, candidate, contract="reserved_pages=0").status
        for one in (declared, case)
        for candidate in (layer.prefill_indexer, lazy)
    ]
    assert statuses == [Status.EQUAL, Status.EQUAL, Status.EQUAL, Status.DIFFERENT]


def test_a_clamped_length_picks_the_first_column() -> None:
    """An empty decode row picks column 0 where the contract says so, else a pad."""
    case = generate.decode_indexer(0)

    def clamped(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        return layer.decode_indexer(**call, empty_rows="first")

    assert int((case.inputs["context_lens"] == 0).sum()) == 1
    first, pad = (
        check(case, clamped, contract=f"reserved_pages=0,empty_rows={value}").status
        for value in ("first", "pad")
    )
    assert (first, pad) == (Status.EQUAL, Status.DIFFERENT)


def test_scores_end_no_later_than_their_row() -> None:
    """A row whose scores would end past its window is broken."""
    case = generate.prefill_indexer(0)
    late = case.inputs["row_end"].clone()
    late[3] += 1
    verdict = check(replace(case, inputs={**case.inputs, "score_end": late}), layer.prefill_indexer)
    end = int(case.inputs["row_end"][3])
    assert [f.reading for f in verdict.findings if f.rule == "invalid-record"] == [
        f"score_end {end + 1} is past row_end {end}"
    ]
    assert torch.equal(late[:3], case.inputs["row_end"][:3])
