"""Layers that publish a mask, pick inside one, pin tokens, or leave rows unscored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import generate
from refimpl import forms, geometry, layer, masks, scoring, selection, topk
from refimpl.bits import as_int

if TYPE_CHECKING:
    from equivalence.case import Case

INF = torch.inf
FORMS = get_args(forms.Form)


def dense(seed: int = 0) -> Case:
    """A prefill of nine rows, of up to 48 columns."""
    return generate.prefill_indexer(seed)


def keywords(case: Case) -> dict[str, Any]:
    """What a candidate is called with."""
    return {**case.inputs, **case.params}


def int32(*values: int) -> Tensor:
    """A row of numbers."""
    return torch.tensor(values, dtype=torch.int32)


def windows(*spans: tuple[int, int]) -> dict[str, Any]:
    """row_start and row_end."""
    return {
        "row_start": int32(*(start for start, _ in spans)),
        "row_end": int32(*(end for _, end in spans)),
    }


def named(form: str, mask: Tensor) -> dict[str, Any]:
    """The keyword of a mask in this form."""
    return {"mask" if form in {"bool", "packed"} else "block_ids": mask}


@st.composite
def rows(draw: Any) -> dict[str, Any]:  # noqa: ANN401 - hypothesis' draw
    """Scores with ties, -inf and NaN, and windows, some of them empty or backward."""
    count, columns = draw(st.integers(0, 4)), draw(st.integers(1, 30))
    score = st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, 1.0, 2.0, INF, torch.nan])
    flat = draw(st.lists(score, min_size=count * columns, max_size=count * columns))
    edge = st.integers(0, columns)
    spans = draw(st.lists(st.tuples(edge, edge), min_size=count, max_size=count))
    return {"scores": torch.tensor(flat).view(count, columns), **windows(*spans)}


# --- pinned tokens -------------------------------------------------------------------------------


@given(batch=rows(), first=st.integers(0, 5), last=st.integers(0, 5))
def test_pinned_columns_are_those_of_the_window(
    batch: dict[str, Any], first: int, last: int
) -> None:
    """The first and the last of each window hold +inf, every other cell its own bits."""
    before = as_int(batch["scores"]).clone()
    got = selection.pin_tokens(**batch, init_tokens=first, local_tokens=last)
    for row, cells in enumerate(got):
        start, end = int(batch["row_start"][row]), int(batch["row_end"][row])
        window = range(start, end)
        pinned = {*window[:first], *(window[-last:] if last else ())}
        for column, cell in enumerate(as_int(cells).tolist()):
            infinity = int(as_int(torch.tensor(INF)))
            assert cell == (infinity if column in pinned else int(before[row, column]))
    assert torch.equal(as_int(batch["scores"]), before)


def test_pinned_columns_are_picked_first() -> None:
    """Two init and one local token of eight columns, whatever they score."""
    scores = torch.tensor([[0.0, -INF, 5.0, 4.0, 3.0, 9.0, torch.nan, 7.0, 99.0]])
    got = selection.select(
        scores=scores, **windows((1, 8)), k=4, init_tokens=2, local_tokens=1, nan="last"
    )
    assert got["raw_indices"].tolist() == [[0, 1, 6, 4]]


def test_no_fewer_than_no_tokens_are_pinned() -> None:
    """Both numbers are told."""
    sentence = "init_tokens is 1 and local_tokens -2: both are 0 or more"
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        selection.pin_tokens(
            scores=torch.zeros(1, 2), **windows((0, 2)), init_tokens=1, local_tokens=-2
        )
    assert str(raised.value) == sentence


def test_a_mask_leaves_pinned_columns_out() -> None:
    """A consumer picks inside its mask, and a source publishes the block of a pinned column."""
    scores = torch.arange(32.0)[None]
    given: dict[str, Any] = {"scores": scores, **windows((0, 32)), "k": 3}
    ids = int32(2, 3)[None]
    inside = selection.select(**given, block_ids=ids, init_tokens=1)
    assert inside["raw_indices"].tolist() == [[31, 30, 29]]
    source = selection.select(**given, topk_blocks=2, form="ascending", init_tokens=1)
    assert source["block_ids"].tolist() == [[0, 3]]
    assert source["raw_indices"].tolist() == [[0, 31, 30]]


# --- sources and consumers -----------------------------------------------------------------------


@given(
    batch=rows(),
    blocks=st.fixed_dictionaries(
        {
            "form": st.sampled_from(FORMS),
            "topk_blocks": st.integers(1, 4),
            "block_size": st.sampled_from([8, 3]),
        }
    ),
    k=st.integers(1, 9),
    ties=st.sampled_from(["lowest", "highest"]),
    rest=st.fixed_dictionaries(
        {
            "minus_inf": st.sampled_from(["pick", "pad"]),
            "zero_sign": st.sampled_from(["distinct", "equal"]),
        }
    ),
)
def test_a_consumer_is_apply_then_topk(
    batch: dict[str, Any], blocks: dict[str, Any], k: int, ties: str, rest: dict[str, Any]
) -> None:
    """In every form; -inf picks are pads, and a row of at most k columns is 0 .. visible-1."""
    kind: dict[str, Any] = {"nan": "last", "ties": ties, **rest}
    form, size = blocks["form"], blocks["block_size"]
    source = selection.select(**batch, k=k, **blocks, **kind)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    published = source.pop(name)
    free = topk.ragged_topk(**batch, k=k, **kind)
    assert {stage: t.tolist() for stage, t in source.items()} == {"raw_indices": free.tolist()}
    want = masks.publish(**batch, **blocks, ties=kind["ties"], zero_sign=kind["zero_sign"])
    assert torch.equal(published, want)
    got = selection.select(**batch, k=k, **named(form, published), block_size=size, **kind)
    applied = masks.apply(**batch, mask=published, block_size=size)
    within = topk.ragged_topk(**{**batch, "scores": applied}, k=k, **{**kind, "minus_inf": "pad"})
    assert {stage: t.tolist() for stage, t in got.items()} == {"raw_indices": within.tolist()}


@pytest.mark.parametrize("columns", ["absolute", "row-relative"])
@pytest.mark.parametrize("form", FORMS)
def test_a_dense_layer_takes_and_gives_masks(columns: str, form: Any) -> None:  # noqa: ANN401 - a literal
    """Blocks count from the row's start, wherever the cells of its logits begin."""
    case = dense(4)
    call = keywords(case) | {"columns": columns}
    call["width"] = 64 if columns == "row-relative" else None
    source = layer.prefill_indexer(**call, topk_blocks=2, form=form)
    absolute = layer.prefill_indexer(**keywords(case), topk_blocks=2, form=form)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    assert torch.equal(source[name], absolute[name])
    scores = absolute["logits"]
    spans: dict[str, Any] = {n: case.inputs[n] for n in ("row_start", "row_end")}
    want = masks.publish(scores=scores, **spans, topk_blocks=2, form=form)
    assert torch.equal(source[name], want)
    consumer = layer.prefill_indexer(**call, **named(form, source[name]))
    picks = masks.masked_topk(scores=scores, mask=want, **spans, k=12)
    assert torch.equal(consumer["raw_indices"], picks)
    assert not torch.equal(consumer["raw_indices"], source["raw_indices"])
    pads = consumer["raw_indices"] == -1
    assert torch.equal(consumer["page_indices"] == -1, pads)


def test_a_dense_layer_publishes_some_rows() -> None:
    """Row i of the mask is that of row rows[i]."""
    call, some = keywords(dense()), int32(1, 4, 8)
    every = layer.prefill_indexer(**call, topk_blocks=2)["mask"]
    few = layer.prefill_indexer(**call, topk_blocks=2, rows=some)["mask"]
    assert torch.equal(few, every[some.long(), : few.shape[1]])


@pytest.mark.parametrize("form", FORMS)
def test_a_paged_layer_takes_and_gives_masks(form: Any) -> None:  # noqa: ANN401 - a literal
    """Row b * next_n + i has the mask row of that number."""
    case = generate.decode_indexer(6)
    call, lengths = keywords(case), case.inputs["context_lens"].reshape(-1)
    source = layer.decode_indexer(**call, topk_blocks=1, form=form)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    spans: dict[str, Any] = {"row_start": torch.zeros_like(lengths), "row_end": lengths}
    want = masks.publish(scores=source["logits"], **spans, topk_blocks=1, form=form)
    assert torch.equal(source[name], want)
    consumer = layer.decode_indexer(**call, **named(form, want))
    picks = masks.masked_topk(scores=source["logits"], mask=want, **spans, k=12)
    assert torch.equal(consumer["raw_indices"], picks)
    assert not torch.equal(consumer["raw_indices"], source["raw_indices"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"mask": True, "block_ids": True}, "mask and block_ids"),
        ({"mask": True, "topk_blocks": 2}, "mask and topk_blocks"),
    ],
)
def test_a_layer_has_one_mask(given: dict[str, Any], names: str) -> None:
    """The sentence names what it was given."""
    whole = {"mask": torch.ones(1, 8, dtype=torch.bool), "block_ids": int32(0)[None]}
    given = {name: whole.get(name, value) for name, value in given.items()}
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        selection.select(scores=torch.zeros(1, 8), **windows((0, 8)), k=1, **given)
    assert str(raised.value) == (
        f"the layer has {names}: it picks inside one mask or publishes one"
    )


# --- rows that are not scored --------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["absolute", "row-relative"])
def test_short_rows_of_the_flat_route_are_picked_unscored(columns: str) -> None:
    """Their logits are -inf throughout, their picks and slots those of the scored layer."""
    call = keywords(dense(2)) | {"columns": columns}
    spans: dict[str, Any] = {name: call[name] for name in ("row_start", "row_end")}
    ends = geometry.score_ends(**spans, k=12)
    short = (spans["row_end"] - spans["row_start"]) <= 12
    assert ends.tolist() == [
        start if few else end
        for start, end, few in zip(*(x.tolist() for x in (*spans.values(), short)), strict=True)
    ]
    assert (ends.dtype, short.tolist().count(True)) == (torch.int32, 4)
    got = layer.prefill_indexer(**call, score_end=ends)
    want = layer.prefill_indexer(**call)
    for stage in ("raw_indices", "page_indices"):
        assert torch.equal(got[stage], want[stage])
    assert bool((got["logits"][short] == -INF).all())
    assert torch.equal(as_int(got["logits"][~short]), as_int(want["logits"][~short]))
    assert not bool((want["logits"][short] == -INF).all())


@pytest.mark.parametrize(
    "rule",
    [{}, {"topk_blocks": 2}, {"topk_blocks": 1, "block_size": 12}],
)
def test_a_row_that_is_chosen_unread_may_lack_scores(rule: dict[str, Any]) -> None:
    """Its k columns and its few blocks are all that it has."""
    call = keywords(dense())
    ends = geometry.score_ends(row_start=call["row_start"], row_end=call["row_end"], k=12)
    got = layer.prefill_indexer(**call, score_end=ends, **rule)
    want = layer.prefill_indexer(**call, **rule)
    assert all(torch.equal(got[stage], want[stage]) for stage in want if stage != "logits")


@pytest.mark.parametrize(
    ("rule", "k"),
    [({}, 13), ({"topk_blocks": 9}, 13), ({"topk_blocks": 1}, 12), ({"short_rows": "any"}, 12)],
)
def test_a_row_that_is_ranked_may_not_lack_scores(rule: dict[str, Any], k: int) -> None:
    """Neither one of k + 1 columns, nor of more blocks than it publishes, nor ranked though short.

    The sentence has the row and both columns.
    """
    call = keywords(dense())
    start, end = call["row_start"], call["row_end"]
    ends = geometry.score_ends(row_start=start, row_end=end, k=k)
    with pytest.raises(ValueError, match=r"^row [0-9]+ is scored up to column") as raised:
        layer.prefill_indexer(**call, score_end=ends, **rule)
    row = int(str(raised.value).split()[1])
    assert str(raised.value) == (
        f"row {row} is scored up to column {int(start[row])} and selects up to {int(end[row])}: "
        "only a row that is chosen unread may lack scores"
    )


# --- ratio 4, and slots of compressed columns ----------------------------------------------------


def test_a_v4_layer_is_the_dense_layer_in_compressed_windows() -> None:
    """At ratio 4 a row sees (pos + 1) // 4 columns; a column has its first token's slot."""
    extend, total = torch.tensor([3, 6]), torch.tensor([50, 90])
    start, end, _ = geometry.ragged_windows(extend_lens=extend, seq_lens=total, ratio=4)
    assert (start.tolist(), end.tolist()) == (
        [0, 0, 0, 12, 12, 12, 12, 12, 12],
        [12, 12, 12, 33, 33, 33, 34, 34, 34],
    )
    call: dict[str, Any] = {name: dense(7).inputs[name] for name in ("q", "weights")}
    keys = dense(7).inputs
    columns = 34
    token_slots = torch.arange(180).view(2, 90) + 400
    slots = geometry.compressed_slots(token_slots=token_slots, seq_lens=total, ratio=4)
    assert slots.tolist() == [100 + j for j in range(12)] + [122 + j for j in range(22)]
    call |= {"k": keys["k"][:columns], "k_scale": keys["k_scale"][:columns]}
    call |= {"row_start": start, "row_end": end}
    got = layer.prefill_indexer(**call, topk=4, k_slots=slots)
    logits = scoring.mqa_logits(**call)
    raw = topk.ragged_topk(scores=logits, row_start=start, row_end=end, k=4)
    assert torch.equal(got["raw_indices"], raw)
    assert torch.equal(got["page_indices"].long(), slots[(raw + start[:, None]).long()])


def test_a_columns_slot_is_that_of_its_first_token() -> None:
    """Slot table entry j * ratio, over the ratio; tokens that make no whole column have none."""
    table = torch.tensor([[10, 11, 20, 21, 30], [40, 41, 99, 99, 99], [60, 61, 62, 63, 99]])
    lengths = int32(5, 1, 4)
    got = geometry.compressed_slots(token_slots=table.int(), seq_lens=lengths, ratio=2)
    assert (got.dtype, got.tolist()) == (torch.int64, [5, 10, 30, 31])
    whole = geometry.compressed_slots(token_slots=table, seq_lens=lengths)
    assert whole.tolist() == [10, 11, 20, 21, 30, 40, 60, 61, 62, 63]


def test_a_plain_layer_has_no_mask() -> None:
    """A DSA layer called without any of it has the outputs it had."""
    got = layer.prefill_indexer(**keywords(dense(3)))
    assert set(got) == {"logits", "raw_indices", "page_indices"}
