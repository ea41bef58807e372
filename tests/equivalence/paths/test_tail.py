"""Only tail rows go on: cut before or after the layer, they are the same, and judged alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import batches
import pytest
import torch
from batches import BATCHES, DRAWN, call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.case import Case, take_rows
from equivalence.errors import InvalidCase, UsageError
from equivalence.judge import check
from equivalence.paths import tail
from equivalence.paths.chunked import chunked, original
from equivalence.planted import reused
from equivalence.verdict import Status
from refimpl.bits import as_int

MISSING = "the tail of a request takes row_to_request: which rows are its own"


def owners(*requests: int) -> Tensor:
    """The request of each row."""
    return torch.tensor(requests, dtype=torch.int32)


def slow_tail(requests: list[int], most: int) -> list[int]:
    """The rows after which fewer than `most` rows of the same request come."""
    return [i for i, own in enumerate(requests) if requests[i + 1 :].count(own) < most]


@given(requests=st.lists(st.integers(-1, 3), max_size=20), most=st.integers(1, 6))
def test_the_tail_is_the_last_rows_of_each_request(requests: list[int], most: int) -> None:
    """In any order of requests, as counted row by row."""
    rows = tail.tail_rows(row_to_request=owners(*requests), most=most)
    assert (rows.dtype, rows.tolist()) == (torch.int64, slow_tail(requests, most))


@pytest.mark.parametrize(
    ("extends", "kept"),
    [
        ([127], range(127)),
        ([128], range(128)),
        ([129], range(1, 129)),
        ([300, 1, 0, 130], [*range(172, 300), 300, *range(303, 431)]),
        ([], []),
    ],
)
def test_128_rows_of_a_request_go_on(extends: list[int], kept: Any) -> None:  # noqa: ANN401 - numbers
    """min(128, extend): all of a shorter extend."""
    counts = torch.tensor(extends, dtype=torch.int64)
    requests = torch.arange(len(extends)).repeat_interleave(counts).int()
    assert tail.tail_rows(row_to_request=requests).tolist() == list(kept)


@given(
    batch=DRAWN,
    most=st.integers(1, 5),
    ratio=st.sampled_from([1, 2]),
    path=st.sampled_from([original, partial(chunked, style="vllm", budget_bytes=200)]),
)
def test_both_ways_give_the_same_tail(batch: Any, most: int, ratio: int, path: Any) -> None:  # noqa: ANN401 - lengths; a candidate
    """Row for row, logits, picks and slots, and they are rows of the whole layer."""
    case = batches.case(batch, ratio=ratio)
    rows = tail.tail_rows(row_to_request=case.inputs["row_to_request"], most=most)
    want = call(case, original, keep_logits=True)
    for way in (tail.whole, tail.only):
        got = call(case, way, most=most, path=path, keep_logits=True)
        assert set(got) == set(want)
        for name, tensor in want.items():
            assert got[name].shape == tensor.shape
            assert torch.equal(as_int(got[name][rows]), as_int(tensor[rows]))


@pytest.mark.parametrize("way", [tail.whole, tail.only])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_the_judge_calls_both_ways_equal(way: Any, batch: Any) -> None:  # noqa: ANN401 - likewise
    """With the other rows unwritten by design, or of the case that holds the tail alone."""
    case = batches.case(batch, topk=2)
    rows = tail.tail_rows(row_to_request=case.inputs["row_to_request"], most=3)
    candidate = partial(way, most=3, keep_logits=True)
    for judged in (tail.tail_case(case, most=3), take_rows(case, rows)):
        verdict = check(judged, candidate)
        assert (verdict.status, verdict.findings) == (Status.EQUAL, ())
        assert verdict.stages["raw_indices"].counts["rows"] == len(rows)


def test_the_other_rows_are_wrong_where_nothing_declares_them() -> None:
    """They were never written, and the judge says so of just these."""
    case = batches.case([(5, 9), (2, 7)])
    verdict = check(case, partial(tail.only, most=2))
    assert verdict.status is Status.DIFFERENT
    assert {finding.rule for finding in verdict.findings} == {"unwritten"}
    assert verdict.failing == [0, 1, 2]


def test_a_way_that_leaves_a_tail_row_out_is_different() -> None:
    """One row fewer than the case declares."""
    case = tail.tail_case(batches.case([(5, 9), (4, 7)]), most=3)
    verdict = check(case, partial(tail.only, most=2))
    assert (verdict.status, verdict.failing) == (Status.DIFFERENT, [2, 6])


def test_all_rows_but_the_tail_are_unwritten_by_design() -> None:
    """A padding row that does not go on is no exception; what goes on keeps its class."""
    case = batches.case([(4, 9), (2, 7)])
    kind = torch.tensor([1, 0, 1, 0, 0, 0], dtype=torch.int8)
    cut = tail.tail_case(replace(case, row_class=kind), most=2)
    assert cut.row_class is not None
    assert cut.row_class.tolist() == [2, 2, 1, 0, 0, 0]
    assert kind.tolist() == [1, 0, 1, 0, 0, 0]
    fresh = tail.tail_case(case, most=1).row_class
    assert fresh is not None
    assert (fresh.dtype, fresh.tolist()) == (torch.int8, [2, 2, 2, 0, 2, 0])


def test_without_row_to_request_each_row_is_a_request() -> None:
    """Row i reads table row i, so every row is the last of its own."""
    case = batches.case([(4, 9), (2, 7)])
    table = case.inputs["block_table"][case.inputs["row_to_request"].long()]
    inputs = {n: t for n, t in case.inputs.items() if n != "row_to_request"}
    alone = replace(case, inputs={**inputs, "block_table": table})
    want = call(case, original)
    got = call(alone, tail.only, most=1)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_an_offset_goes_with_its_row() -> None:
    """Ragged picks of tail rows have the offsets of these rows."""
    case = batches.case([(4, 9), (3, 7)], form="offset")
    owner = {"row_to_request": owners(0, 0, 0, 0, 1, 1, 1)}
    case = replace(case, inputs={**case.inputs, **owner})
    verdict = check(tail.tail_case(case, most=2), partial(tail.only, most=2))
    assert (verdict.status, set(verdict.stages)) == (
        Status.EQUAL,
        {"raw_indices", "ragged_indices"},
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_tail_off_by_one_is_different(seed: int) -> None:
    """Each tail row has the picks of the row before it; the honest way beside it is equal."""
    case = tail.tail_case(batches.case([(6, 12), (5, 11)], seed=seed, tie_rich=False), most=3)
    verdict = check(case, partial(reused.tail_off_by_one, most=3))
    assert verdict.status is Status.DIFFERENT
    fault = reused.FAULTS["tail off by one"]
    assert fault.candidate is reused.tail_off_by_one
    assert {finding.rule for finding in verdict.findings} <= fault.rules
    assert set(verdict.failing) <= {3, 4, 5, 8, 9, 10}
    assert check(case, partial(tail.only, most=3)).status is Status.EQUAL


def unowned() -> Case:
    """A case that does not say which request a row is of."""
    return batches.case([(3, 9)], form="slot_map")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: call(unowned(), tail.only), UsageError, MISSING),
        (lambda: call(unowned(), tail.whole), UsageError, MISSING),
        (lambda: tail.tail_case(unowned()), InvalidCase, MISSING),
        (
            lambda: call(batches.case([(3, 9)]), tail.only, most=0),
            UsageError,
            "most is 0: it is a whole number, 1 or more",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(make: Any, kind: Any, message: str) -> None:  # noqa: ANN401 - a function; an exception
    """It says what is missing or wrong."""
    with pytest.raises(kind) as raised:
        make()
    assert str(raised.value) == message
