"""A live call as an op: what is read of it, what it gave, and copies that alias as it did."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ints
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.live import call
from equivalence.live.call import Reading

CASE = tiny.topk()
SCORES, START, END = (CASE.inputs[name] for name in ("scores", "row_start", "row_end"))
PICKS = CASE.recorded[0]["raw_indices"]
TOPK = Reading(op="ragged_topk")


def own_names(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int = 8) -> Tensor:
    """The op's own names, k by default."""
    raise NotImplementedError


def kernel(score: Tensor, lengths: Tensor, *, out: Tensor | None = None) -> Tensor:
    """An engine's names, an output buffer, and no start."""
    raise NotImplementedError


def packed(*buffers: Tensor, **options: object) -> Tensor:
    """No names at all."""
    raise NotImplementedError


def partly(scores: Tensor, *others: Tensor) -> Tensor:
    """One name."""
    raise NotImplementedError


def nothing(*_: object) -> Mapping[str, Any]:
    """What a reader gives that reads nothing."""
    return {}


def read(lengths: Tensor) -> Mapping[str, Any]:
    """A row's window from its length."""
    return {"row_start": torch.zeros_like(lengths), "row_end": lengths}


CALLS: dict[str, tuple[Reading, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "by its names": (TOPK, own_names, (SCORES, START, END, 8), {}),
    "by keyword and default": (TOPK, own_names, (SCORES, START), {"row_end": END}),
    "through a partial": (TOPK, partial(own_names, SCORES, START, k=8), (END,), {}),
    "over a partial": (TOPK, partial(own_names, SCORES, k=9), (START, END), {"k": 8}),
    "with other arguments": (
        TOPK,
        packed,
        (torch.zeros(1),),
        {"scores": SCORES, "row_start": START, "row_end": END, "k": 8, "workspace": SCORES},
    ),
    "by position": (
        Reading(
            op="ragged_topk",
            names={"scores": "0", "row_start": "1", "row_end": "2", "k": "3"},
        ),
        packed,
        (SCORES, START, END, 8),
        {},
    ),
    "by position after a name": (
        Reading(op="ragged_topk", names={"row_start": "1", "row_end": "2"}, params={"k": 8}),
        partly,
        (SCORES, START, END),
        {},
    ),
    "without a signature": (
        Reading(op="ragged_topk", names={"scores": "0", "row_start": "1"}, params={"k": 8}),
        torch.topk,
        (SCORES, START),
        {"row_end": END},
    ),
    "by a function": (
        Reading(
            op="ragged_topk",
            read=lambda score, lengths, out: {
                "scores": score,
                "row_start": lengths[0],
                "row_end": lengths[1],
                "k": out.shape[1],
            },
        ),
        kernel,
        (SCORES, (START, END), PICKS),
        {},
    ),
    "with a param that wins": (
        Reading(op="ragged_topk", params={"k": 8}),
        own_names,
        (SCORES, START, END),
        {"k": 9},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_by_the_names_of_the_op(name: str) -> None:
    """However it is called, the op gets the very tensors and the number of its params."""
    inputs, params = call.inputs_of(*CALLS[name])
    assert {each: id(tensor) for each, tensor in inputs.items()} == {
        "scores": id(SCORES),
        "row_start": id(START),
        "row_end": id(END),
    }
    assert params == {"k": 8}


def test_what_is_none_is_left_out() -> None:
    """An optional input, or a param, that is None is as good as not there."""
    case = tiny.pages()

    def topk_pages(  # noqa: PLR0917 - as kernels are
        scores: Tensor,
        row_start: Tensor,
        row_end: Tensor,
        k: int,
        page_table: Tensor | None = None,
        slot_map: Tensor | None = None,
        page_size: int | None = None,
    ) -> None:
        """An engine's kernel with optional inputs."""

    table = case.inputs["page_table"]
    args = (SCORES, START, END, 8, table)
    inputs, params = call.inputs_of(Reading(op="topk_pages"), topk_pages, args, {})
    assert (sorted(inputs), params) == (
        ["page_table", "row_end", "row_start", "scores"],
        {"k": 8},
    )


REFUSED: dict[str, tuple[Reading, Callable[..., Any], tuple[Any, ...], str]] = {
    "missing": (
        Reading(op="ragged_topk", names={"row_end": "lengths"}, params={"k": 8}),
        kernel,
        (SCORES, END),
        "inputs.scores, inputs.row_start are missing; the call has score, lengths, out",
    ),
    "missing all": (
        Reading(op="ragged_topk", params={"k": 8}),
        packed,
        (),
        "inputs.scores, inputs.row_start, inputs.row_end are missing; the call has nothing",
    ),
    "no tensor": (
        Reading(
            op="ragged_topk", read=lambda **_: {"scores": SCORES, "row_start": START, "row_end": 1}
        ),
        packed,
        (),
        "inputs.row_end is int, not a tensor",
    ),
    "none": (
        TOPK,
        own_names,
        (None, START, END),
        "inputs.scores is missing; the call has scores, row_start, row_end, k",
    ),
    "misfit": (
        TOPK,
        own_names,
        (SCORES,),
        "the call does not fit its function: missing a required argument: 'row_start'",
    ),
    "unknown": (
        Reading(op="ragged_topk", read=lambda *_: {"score": SCORES}),
        kernel,
        (SCORES, END),
        "read gave 'score'; the op has scores, row_start, row_end, mask, block_ids, k, block_size",
    ),
    "read raises": (
        Reading(op="ragged_topk", read=lambda score, _: score["x"]),
        kernel,
        ({}, END),
        "read raised KeyError: 'x'",
    ),
    "read gives no mapping": (
        Reading(op="ragged_topk", read=lambda *_: [SCORES]),  # type: ignore[arg-type]
        kernel,
        (SCORES, END),
        "read gave list, not a mapping by name",
    ),
    "read gives too little": (
        Reading(op="ragged_topk", read=lambda *_: {**read(END), "scores": SCORES}),
        kernel,
        (SCORES, END),
        "params.k is missing; read gave row_start, row_end, scores",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_read_is_a_sentence(name: str) -> None:
    """What is missing or of another kind is named, beside what there is."""
    reading, function, args, sentence = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        call.inputs_of(reading, function, args, {})
    assert str(caught.value) == f"cannot be read as ragged_topk: {sentence}"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"op": "topk"}, "no op named 'topk': one of mqa_logits, paged_mqa_logits, qsa_logits, "),
        (
            {"names": {"out": "x"}},
            "names has 'out'; ragged_topk has scores, row_start, row_end, mask, block_ids, k, ",
        ),
        ({"inplace": {"out": "x"}}, "inplace has 'out'; ragged_topk has raw_indices"),
        ({"params": {"topk": 8}}, "params has 'topk'; ragged_topk has k"),
        ({"arithmetic": "fp64"}, "no arithmetic named 'fp64': one of "),
        ({"contract": "order=none"}, "order cannot be 'none'; "),
    ],
)
def test_a_reading_that_no_call_can_fit_is_refused(fields: dict[str, Any], sentence: str) -> None:
    """A wrong op, name, profile or contract is told before any call."""
    with pytest.raises(UsageError) as caught:
        Reading(**{"op": "ragged_topk", **fields})
    assert str(caught.value).startswith(sentence)


PAGES = Reading(op="topk_pages", inplace={"page_indices": "pages"})
RAW, SLOTS = PICKS, PICKS.clone()


def handed(result: tuple[Tensor, Tensor], _: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The first of two results."""
    return {"raw_indices": result[0]}


def written(_: object, arguments: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The first of two buffers."""
    return {"raw_indices": arguments["buffers"][0]}


@pytest.mark.parametrize(
    ("reading", "result", "arguments", "want"),
    [
        (TOPK, RAW, {}, {"raw_indices": RAW}),
        (TOPK, {"raw_indices": RAW}, {}, {"raw_indices": RAW}),
        (
            PAGES,
            {"raw_indices": RAW, "ragged_indices": None},
            {"pages": None},
            {"raw_indices": RAW},
        ),
        (
            PAGES,
            {"raw_indices": RAW},
            {"pages": SLOTS},
            {"raw_indices": RAW, "page_indices": SLOTS},
        ),
        (PAGES, None, {"pages": SLOTS}, {"page_indices": SLOTS}),
        (PAGES, RAW, {"pages": SLOTS}, {"page_indices": SLOTS}),
        (PAGES, RAW, {"pages": None}, {"page_indices": RAW}),
        (Reading(op="ragged_topk", give=handed), (RAW, SLOTS), {}, {"raw_indices": RAW}),
        (
            Reading(op="ragged_topk", give=written),
            None,
            {"buffers": [RAW, SLOTS]},
            {"raw_indices": RAW},
        ),
    ],
)
def test_outputs_are_what_a_call_returned_and_wrote(
    reading: Reading, result: object, arguments: dict[str, Any], want: dict[str, Tensor]
) -> None:
    """The very tensors come by the output's name; a buffer that was written wins."""
    got = call.outputs_of(reading, result, arguments)
    assert {name: id(t) for name, t in got.items()} == {name: id(t) for name, t in want.items()}


@pytest.mark.parametrize(
    ("reading", "result", "sentence"),
    [
        (
            TOPK,
            (RAW, SLOTS),
            "the call returned tuple; without `give`, it is read from a tensor or a mapping of raw",
        ),
        (TOPK, {"ids": RAW}, "the call gave 'ids' (Tensor), not tensors raw_indices"),
        (TOPK, {"raw_indices": [1]}, "the call gave 'raw_indices' (list), not tensors raw_indices"),
        (TOPK, None, "the call gave nothing, and `inplace` names none of raw_indices"),
        (TOPK, {}, "the call gave nothing, and `inplace` names none of raw_indices"),
        (
            Reading(op="ragged_topk", inplace={"raw_indices": "out"}),
            RAW,
            "inplace.raw_indices is the argument 'out'; the call has lengths",
        ),
        (
            Reading(op="ragged_topk", give=lambda *_: 1 / 0),  # type: ignore[arg-type]
            RAW,
            "give raised ZeroDivisionError: division by zero",
        ),
        (Reading(op="ragged_topk", give=nothing), RAW, "the call gave nothing, and `inplace`"),
    ],
)
def test_outputs_that_cannot_be_read_are_a_sentence(
    reading: Reading, result: object, sentence: str
) -> None:
    """A tuple, an unknown name, a list and nothing are refused."""
    with pytest.raises(UsageError) as caught:
        call.outputs_of(reading, result, {"lengths": END})
    assert str(caught.value).startswith(f"cannot be read as ragged_topk: {sentence}")


def test_a_case_holds_what_was_read() -> None:
    """Inputs, params, the recorded run, and the words of the reading."""
    reading = Reading(op="ragged_topk", contract="order=any")
    case = call.case_of(
        reading, CASE.inputs, CASE.params, recorded=CASE.recorded, provenance={"call": "3"}
    )
    assert (case.op, dict(case.inputs), dict(case.params)) == ("ragged_topk", CASE.inputs, {"k": 8})
    assert (case.recorded, case.contract, case.provenance) == (
        CASE.recorded,
        "order=any",
        {"call": "3"},
    )


def test_a_case_that_does_not_fit_its_op_is_a_sentence() -> None:
    """What `ops.validate` finds is a user's mistake here."""
    with pytest.raises(UsageError) as caught:
        call.case_of(TOPK, {**CASE.inputs, "row_end": END.long()}, CASE.params)
    assert str(caught.value) == (
        "cannot be read as ragged_topk: inputs.row_end is int64; the op wants int32"
    )


class Pair(NamedTuple):
    """A named tuple of an engine."""

    first: Tensor
    second: int


def test_clones_are_new_down_to_any_depth_and_the_rest_is_the_callers_own() -> None:
    """Tensors, lists and dicts are new; a plan, a shape and a tuple without tensors are not."""
    plan, shape = object(), torch.Size([3])
    tensor, named = torch.arange(6.0), Pair(torch.zeros(2), 4)
    args = ([tensor, {"deep": (tensor, plan)}], named, shape, OrderedDict(a=tensor), plan)
    (held, pair, size, ordered, same), kwargs = call.cloned(args, {"x": tensor})
    copy = kwargs["x"]
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert held[0] is copy
    assert held[1]["deep"] == (copy, plan)
    assert held is not args[0]
    assert (type(pair), type(ordered), ordered["a"] is copy) == (Pair, OrderedDict, True)
    assert pair.first is not named.first
    assert size is shape
    assert same is plan
    assert args[0][0] is tensor


def test_a_list_met_twice_stays_one_and_may_hold_itself() -> None:
    """What a callee appends to a list it sees through both names."""
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    (one, two), _ = call.cloned((loop, loop), {})
    assert one is two is one[1]
    assert one is not loop


def test_what_a_callee_writes_never_reaches_the_caller() -> None:
    """Writing into every clone leaves every tensor as it was, and does reach its aliases."""
    pool = torch.arange(24.0).reshape(4, 6)
    wide, left, right, apart = pool[:2], pool[:2, :3], pool[:2, 3:], pool[3]
    before = pool.clone()
    (a, b, c, d), _ = call.cloned((wide, left, right, apart), {})
    b.fill_(-1)
    c.fill_(-2)
    d.fill_(-3)
    assert torch.equal(pool, before)
    assert a.tolist() == [[-1, -1, -1, -2, -2, -2]] * 2
    assert [t.stride() for t in (a, b, c, d)] == [(6, 1), (6, 1), (6, 1), (1,)]


def test_views_of_another_dtype_alias_too() -> None:
    """A cache of bytes and its view as floats stay one memory."""
    cache = torch.zeros(40, dtype=torch.uint8)
    (raw, scale), _ = call.cloned((cache[1:], cache[8:40].view(torch.float32)), {})
    scale.fill_(1.0)
    assert torch.equal(raw[7:39].clone().view(torch.float32), torch.ones(8))
    assert cache.tolist() == [0] * 40


@given(data=st.data())
def test_clones_alias_exactly_as_the_originals(data: st.DataObject) -> None:
    """Writing one value into any view changes the clones where it would change the originals."""
    numbers = st.integers(0, 4)
    pool = torch.arange(64)
    views = [
        pool.as_strided(
            (data.draw(numbers), data.draw(numbers)),
            (data.draw(numbers), data.draw(numbers)),
            data.draw(st.integers(0, 31)),
        )
        for _ in range(3)
    ]
    copies, _ = call.cloned(views, {})
    assert [c.tolist() for c in copies] == [v.tolist() for v in views]
    for view, copy in zip(views, copies, strict=True):
        if view.numel():
            view[0, 0] = copy[0, 0] = -1
    assert [c.tolist() for c in copies] == [v.tolist() for v in views]


def test_shared_memory_counts_once_and_a_small_view_of_a_pool_is_small() -> None:
    """Bytes are those that tensors reach, not those of their storages."""
    pool = torch.zeros(1 << 20)
    row, part = pool[:100], pool[50:60]
    assert call.bytes_of((row,), {}) == 400
    assert call.bytes_of((row, part), {"again": [row, pool[200:300]]}) == 800
    assert call.bytes_of((pool[:40].view(4, 10)[:, :2], ints(), 7), {}) == (30 + 2) * 4
    (copy,), _ = call.cloned((part,), {})
    assert copy.untyped_storage().nbytes() == 40


def test_gradients_and_tensors_that_are_not_strided_are_copied_plainly() -> None:
    """A parameter's clone needs no gradient; a sparse tensor stays sparse."""
    weight = torch.nn.Parameter(torch.ones(2))
    (one, two), _ = call.cloned((weight, torch.eye(2).to_sparse()), {})
    assert (type(one), one.requires_grad, two.layout) == (Tensor, False, torch.sparse_coo)
