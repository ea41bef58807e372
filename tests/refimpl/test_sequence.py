"""Layers in sequence share one mask: the twin's picks, in every form, prefill and decode."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_args

import by_twin
import pytest
import torch
import twin_layers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl import forms, geometry, masks, sequence
from refimpl.bits import E4M3, SCALE_BYTES, as_int
from refimpl.sequence import Layer

HEADS, HEAD_DIM, TOKENS, KEYS, PAGE = 16, 32, 5, 7, 8
K = 4
FORMS = get_args(forms.Form)


class Batch(NamedTuple):
    """Requests as texts, the last tokens of each being new."""

    texts: list[list[int]]
    extends: list[int]
    ratio: int = 1
    topk_blocks: int = 2

    @property
    def lengths(self) -> dict[str, Any]:
        """The keywords of a prefill."""
        return {
            "extend_lens": torch.tensor(self.extends, dtype=torch.int64),
            "seq_lens": torch.tensor([len(text) for text in self.texts], dtype=torch.int64),
        }

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(request, position) of each row."""
        return [
            (request, position)
            for request, (text, extend) in enumerate(zip(self.texts, self.extends, strict=True))
            for position in range(len(text) - extend, len(text))
        ]


def made(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer's queries, weights, keys and scales of tokens; half of the weights are negative."""
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=random).to(E4M3)
    keys = torch.randn(KEYS, HEAD_DIM, generator=random).to(E4M3)
    weights = torch.randn(TOKENS, HEADS, generator=random)
    return queries, weights, keys, torch.rand(KEYS, generator=random) + 0.5


def tables(seed: int) -> twin_layers.Tables:
    """The same as the twin reads them."""
    queries, weights, keys, scales = made(seed)
    return twin_layers.Tables(
        tuple(tuple(tuple(head) for head in q) for q in as_int(queries).tolist()),
        tuple(tuple(by_twin.fp32_bits(w)) for w in weights),
        tuple(tuple(k) for k in as_int(keys).tolist()),
        tuple(by_twin.fp32_bits(scales)),
    )


def of_bytes(x: Tensor, at: Any) -> Tensor:  # noqa: ANN401 - an index
    """Rows of fp8, which not every device indexes."""
    return as_int(x)[at].view(x.dtype)


def key_numbers(batch: Batch, seed: int) -> list[list[int]]:
    """Of each request, which key stands in each column."""
    of, r = tables(seed), batch.ratio
    return [
        [of.key_of(text[j * r : (j + 1) * r]) for j in range(len(text) // r)]
        for text in batch.texts
    ]


def inputs(batch: Batch, seed: int, rows: Tensor | None = None) -> dict[str, Any]:
    """What a layer of `run` takes; of some rows where it is a late one."""
    queries, weights, keys, scales = made(seed)
    asked = torch.tensor([batch.texts[r][p] for r, p in batch.positions], dtype=torch.int64)
    asked = asked if rows is None else asked[rows]
    held = torch.tensor(list(chain.from_iterable(key_numbers(batch, seed))), dtype=torch.int64)
    return {
        "q": of_bytes(queries, asked),
        "weights": weights[asked],
        "k": of_bytes(keys, held),
        "k_scale": scales[held],
        "k_slots": 64 + 3 * torch.arange(max(1, len(held))),
    }


def paged(batch: Batch, seed: int, next_n: int) -> dict[str, Any]:
    """What a layer of `run_decode` takes: the same keys in pages."""
    queries, weights, keys, scales = made(seed)
    asked = torch.tensor([batch.texts[r][p] for r, p in batch.positions], dtype=torch.int64)
    numbers = key_numbers(batch, seed)
    most = max(1, *(-(-len(n) // PAGE) for n in numbers))
    table = 1 + torch.randperm(len(numbers) * most, generator=torch.Generator().manual_seed(seed))
    cache = torch.zeros(len(table) + 1, PAGE * (HEAD_DIM + SCALE_BYTES), dtype=torch.uint8)
    for request, mine in enumerate(numbers):
        for column, number in enumerate(mine):
            page = cache[table[request * most + column // PAGE]]
            at = column % PAGE
            page[at * HEAD_DIM : (at + 1) * HEAD_DIM] = as_int(keys)[number]
            page[PAGE * HEAD_DIM + 4 * at :][:4] = scales[number : number + 1].view(torch.uint8)
    return {
        "q": of_bytes(queries, asked).view(-1, next_n, HEADS, HEAD_DIM),
        "weights": weights[asked],
        "kv_cache": cache,
        "block_table": table.view(len(numbers), most).int(),
        "page_size": PAGE,
    }


def five(batch: Batch, **late: Any) -> list[Layer]:  # noqa: ANN401 - fields of a layer
    """A source and four consumers."""
    source = Layer(role="source", topk=K, ratio=batch.ratio, topk_blocks=batch.topk_blocks)
    return [source] + [Layer(role="consumer", topk=K, ratio=batch.ratio, **late)] * 4


def run(batch: Batch, seed: int = 0, **how: Any) -> list[dict[str, Tensor]]:  # noqa: ANN401 - keywords
    """The five layers of a batch."""
    layers = how.pop("layers", five(batch))
    given = how.pop("inputs", [inputs(batch, seed + number) for number in range(len(layers))])
    return sequence.run(layers=layers, inputs=given, **batch.lengths, **how)


def twins(batch: Batch, seed: int = 0) -> list[list[twin_layers.Row]]:
    """What the twin makes of it."""
    return twin_layers.source_then_consumers(
        layers=[tables(seed + number) for number in range(5)],
        texts=batch.texts,
        extends=batch.extends,
        ratio=batch.ratio,
        topk=K,
        topk_blocks=batch.topk_blocks,
    )


def blocks_of(mask: Tensor, visible: list[int]) -> list[frozenset[int]]:
    """The blocks that a bool mask admits whole; a mask of part of a block fails."""
    told = []
    for row, seen in zip(mask.tolist(), visible, strict=True):
        held = {j // 8 for j in range(seen) if row[j]}
        assert [j // 8 in held for j in range(seen)] == row[:seen]
        assert not any(row[seen:])
        told.append(frozenset(held))
    return told


@st.composite
def drawn(draw: Any) -> Batch:  # noqa: ANN401 - hypothesis' draw
    """One or two requests of repeated text, long enough that blocks are left out."""
    ratio = draw(st.sampled_from([1, 2]))
    texts, extends = [], []
    for _ in range(draw(st.integers(1, 2))):
        tokens = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4)
        phrases = draw(st.lists(st.tuples(tokens, st.integers(1, 14 * ratio)), max_size=4))
        texts.append([token for phrase, times in phrases for token in phrase * times][: 50 * ratio])
        extends.append(draw(st.integers(0, min(3, len(texts[-1])))))
    return Batch(texts, extends, ratio, draw(st.integers(1, 4)))


REPEATED = Batch([[0, 1] * 13 + [2, 3] * 9 + [4, 0] * 9, [2, 0] * 17 + [3] * 9], [5, 4], 1, 3)
COMPRESSED = REPEATED._replace(texts=[t + t[::-1] for t in REPEATED.texts], ratio=2)
EXAMPLES = pytest.mark.parametrize("batch", [REPEATED, COMPRESSED], ids=["ratio 1", "ratio 2"])


@given(batch=drawn(), seed=st.integers(0, 2))
def test_a_source_and_four_consumers_are_the_twins(batch: Batch, seed: int) -> None:
    """Logits, mask, picks and slots of every layer, bit for bit, with ties to the lowest column."""
    got, want = run(batch, seed), twins(batch, seed)
    start, _, _ = geometry.ragged_windows(**batch.lengths, ratio=batch.ratio)
    for layer, rows in zip(got, want, strict=True):
        assert layer["raw_indices"].tolist() == [row.picks for row in rows]
        slots = [
            [-1 if j < 0 else 64 + 3 * (first + j) for j in row.picks]
            for row, first in zip(rows, start.tolist(), strict=True)
        ]
        assert layer["page_indices"].tolist() == slots
        for row, cells, first in zip(rows, layer["logits"], start.tolist(), strict=True):
            assert by_twin.fp32_bits(cells[first : first + len(row.scores)]) == row.scores
    seen = [len(row.scores) for row in want[0]]
    assert blocks_of(got[0]["mask"], seen) == [row.blocks for row in want[0]]
    assert [set(layer) for layer in got] == [
        {"logits", "raw_indices", "page_indices", *(["mask"] * (number == 0))}
        for number in range(5)
    ]


@given(batch=drawn(), seed=st.integers(0, 2), ties=st.sampled_from(["lowest", "highest", "any"]))
def test_any_tie_set_is_legal_to_the_twin(batch: Batch, seed: int, ties: str) -> None:
    """Whoever wins a tie, the mask is one that the row may publish, and picks are legal in it."""
    got, want = run(batch, seed, ties=ties), twins(batch, seed)
    seen = [len(row.scores) for row in want[0]]
    published = blocks_of(got[0]["mask"], seen)
    for row, blocks in zip(want[0], published, strict=True):
        assert twin_layers.may_publish(row.scores, batch.topk_blocks, blocks)
    for number, layer in enumerate(got):
        for row, blocks, picks in zip(
            want[number], published, layer["raw_indices"].tolist(), strict=True
        ):
            assert twin_layers.may_pick(row.scores, blocks if number else None, K, picks)


@EXAMPLES
def test_repeated_text_has_ties_that_the_twin_tells_apart(batch: Batch) -> None:
    """Other tie sets are other sets; a block more is illegal, and so is a pick outside."""
    low, high, want = run(batch), run(batch, ties="highest"), twins(batch)
    assert not torch.equal(low[0]["mask"], high[0]["mask"])
    assert all(
        not torch.equal(a["raw_indices"], b["raw_indices"]) for a, b in zip(low, high, strict=True)
    )
    for row in want[0]:
        assert row.blocks is not None
        out = min(set(range(len(row.scores) // 8)) - row.blocks)
        assert not twin_layers.may_publish(row.scores, batch.topk_blocks, row.blocks | {out})
        assert not twin_layers.may_publish(
            row.scores, batch.topk_blocks, row.blocks - {max(row.blocks)} | {out}
        )
        assert not twin_layers.may_pick(row.scores, row.blocks, K, [out * 8, *row.picks[1:]])


@EXAMPLES
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_mask_gives_the_same_picks(batch: Batch, form: Any) -> None:  # noqa: ANN401 - a literal
    """bool, packed, and ids in both orders; only what the source publishes looks different."""
    want, got = run(batch), run(batch, form=form)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    assert {n for n in got[0] if n in {"mask", "block_ids"}} == {name}
    assert got[0][name].dtype is {"bool": torch.bool, "packed": torch.uint8}.get(form, torch.int32)
    for one, other in zip(want, got, strict=True):
        for stage in ("logits", *sequence.PICKS[::2]):
            assert torch.equal(as_int(one[stage]), as_int(other[stage]))


@EXAMPLES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("publish", ["all", "tail"])
def test_late_layers_have_the_tail_rows_of_the_whole_run(
    batch: Batch,
    form: Any,  # noqa: ANN401 - a literal
    publish: Any,  # noqa: ANN401 - a literal
) -> None:
    """Published in full and cut, or of the tail alone: the picks of those rows."""
    rows = masks.tail_rows(extend_lens=batch.lengths["extend_lens"], tail=2)
    assert rows.tolist() == [3, 4, 7, 8]
    given = [inputs(batch, 0), *(inputs(batch, n, rows) for n in range(1, 5))]
    got = run(
        batch,
        layers=five(batch, late=True),
        inputs=given,
        form=form,
        publish=publish,
        tail=2,
    )
    want = run(batch, form=form)
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    full = want[0][name]
    assert torch.equal(got[0][name], full[rows] if publish == "tail" else full)
    assert torch.equal(got[0]["raw_indices"], want[0]["raw_indices"])
    for late, every in zip(got[1:], want[1:], strict=True):
        for stage in late:
            assert torch.equal(as_int(late[stage]), as_int(every[stage][rows]))


@EXAMPLES
def test_a_source_may_be_late_itself(batch: Batch) -> None:
    """Then it publishes the rows it has."""
    rows = masks.tail_rows(extend_lens=batch.lengths["extend_lens"], tail=2)
    layers = [replace(layer, late=True) for layer in five(batch)]
    given = [inputs(batch, n, rows) for n in range(5)]
    want = run(batch)
    for publish in ("all", "tail"):
        got = run(batch, layers=layers, inputs=given, publish=publish, tail=2)
        assert torch.equal(got[0]["mask"], want[0]["mask"][rows])
        assert torch.equal(got[4]["raw_indices"], want[4]["raw_indices"][rows])


@EXAMPLES
def test_layers_that_reuse_have_the_picks_of_another(batch: Batch) -> None:
    """Its tail rows where they are late; a full layer between them sees every column."""
    layers = [
        *five(batch)[:2],
        Layer(role="full", topk=K, ratio=batch.ratio),
        Layer(role="reuse", topk=K, ratio=batch.ratio, of=1),
        Layer(role="reuse", topk=K, ratio=batch.ratio, of=3, late=True),
        Layer(role="reuse", topk=K, ratio=batch.ratio, of=4, late=True),
    ]
    given: list[Any] = [*(inputs(batch, n) for n in range(3)), {}, {}, {}]
    got = run(batch, layers=layers, inputs=given, tail=2)
    rows = masks.tail_rows(extend_lens=batch.lengths["extend_lens"], tail=2)
    picks = {stage: got[1][stage] for stage in ("raw_indices", "page_indices")}
    assert [set(layer) for layer in got[3:]] == [set(picks)] * 3
    for stage, every in picks.items():
        assert torch.equal(got[3][stage], every)
        assert torch.equal(got[4][stage], every[rows])
        assert torch.equal(got[5][stage], every[rows])
    alone = [Layer(role="full", topk=K, ratio=batch.ratio)]
    free = run(batch, layers=alone, inputs=[inputs(batch, 2)])[0]
    assert torch.equal(got[2]["raw_indices"], free["raw_indices"])
    inside = run(batch, inputs=[inputs(batch, n) for n in (0, 2, 2, 2, 2)])[1]
    assert not torch.equal(free["raw_indices"], inside["raw_indices"])


def test_a_consumer_uses_the_mask_published_last() -> None:
    """Two sources, of ratio 1 and of ratio 2: each consumer has the picks that its own leads to."""
    other = REPEATED._replace(ratio=2)
    layers = [*five(REPEATED)[:2], *five(other)[:2]]
    given = [inputs(REPEATED, 0), inputs(REPEATED, 1), inputs(other, 0), inputs(other, 1)]
    got = run(REPEATED, layers=layers, inputs=given)
    for one, alone in zip(got, [*run(REPEATED)[:2], *run(other)[:2]], strict=True):
        assert one.keys() == alone.keys()
        assert all(torch.equal(as_int(one[stage]), as_int(alone[stage])) for stage in one)


@EXAMPLES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("next_n", [1, 2])
def test_decode_has_the_picks_of_prefill(batch: Batch, form: Any, next_n: int) -> None:  # noqa: ANN401 - a literal
    """The same tokens as the last of each request, with paged keys."""
    batch = batch._replace(extends=[next_n, next_n])
    positions = torch.tensor([p for _, p in batch.positions]).view(2, next_n)
    got = sequence.run_decode(
        layers=five(batch, late=True),
        inputs=[paged(batch, number, next_n) for number in range(5)],
        positions=positions,
        form=form,
    )
    want = run(batch, form=form)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one["raw_indices"], other["raw_indices"])
    name = "mask" if form in {"bool", "packed"} else "block_ids"
    assert torch.equal(got[0][name], want[0][name])


def test_an_empty_decode_row_may_pick_the_first_column() -> None:
    """At ratio 2 the first token sees nothing: pads, or column 0 where lengths are clamped to 1."""
    batch = Batch([[1], [0, 1, 2] * 20], [1, 1], 2)
    given = [paged(batch, number, 1) for number in range(5)]
    positions = torch.tensor([[0], [59]])
    rest: dict[str, Any] = {"layers": five(batch), "inputs": given, "positions": positions}
    pads = sequence.run_decode(**rest)
    first = sequence.run_decode(**rest, empty_rows="first")
    for number in range(5):
        slot = int(given[number]["block_table"][0, 0]) * PAGE
        assert pads[number]["raw_indices"][0].tolist() == [-1, -1, -1, -1]
        assert first[number]["raw_indices"][0].tolist() == [0, -1, -1, -1]
        assert first[number]["page_indices"][0].tolist() == [slot, -1, -1, -1]
        assert torch.equal(pads[number]["raw_indices"][1], first[number]["raw_indices"][1])
    assert not bool(pads[0]["mask"][0].any())


SOURCE = Layer(role="source", topk=4, topk_blocks=2)
USER = Layer(role="consumer", topk=4)
AGAIN = Layer(role="reuse", topk=4, of=0)


@pytest.mark.parametrize(
    ("layers", "publish", "message"),
    [
        ([USER], "all", "layer 0 is a consumer: no layer before it publishes a mask"),
        (
            [SOURCE, replace(USER, ratio=2)],
            "all",
            "layer 1 has ratio 2: layer 0 publishes columns of ratio 1",
        ),
        ([SOURCE, USER], "tail", "layer 1 has all rows: layer 0 publishes tail rows alone"),
        ([SOURCE, USER], "none", "publish is 'none': it is 'all' or 'tail'"),
        ([replace(SOURCE, topk_blocks=None)], "all", "layer 0 is source with topk_blocks None"),
        ([replace(USER, topk_blocks=3)], "all", "layer 0 is consumer with topk_blocks 3"),
        (
            [replace(SOURCE, late=True), USER],
            "all",
            "layer 1 has all rows: layer 0 has tail rows alone",
        ),
        ([AGAIN], "all", "layer 0 reuses layer 0: it reuses one before it"),
        (
            [SOURCE, replace(AGAIN, of=None)],
            "all",
            "layer 1 reuses layer None: it reuses one before it",
        ),
        (
            [SOURCE, replace(AGAIN, topk=8)],
            "all",
            "layer 1 has ratio 1 and topk 8: layer 0, which it reuses, has 1 and 4",
        ),
        (
            [replace(USER, role="sink")],  # type: ignore[arg-type] # a wrong one
            "all",
            "layer 0 is 'sink': a layer is full, source, consumer, reuse",
        ),
    ],
)
def test_layers_that_do_not_follow_are_refused(
    layers: list[Layer], publish: str, message: str
) -> None:
    """The sentence names the layer."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        sequence.check(layers=layers, inputs=[{}] * len(layers), publish=publish)
    assert str(raised.value) == message


def test_every_layer_has_inputs() -> None:
    """Both counts are told."""
    with pytest.raises(ValueError, match=r"^there are 2 layers and inputs of 1$"):
        sequence.check(layers=[SOURCE, USER], inputs=[{}])
