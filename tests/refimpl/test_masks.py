"""Blocks, published masks and their forms, against the twin's and by examples."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import by_twin
import pytest
import torch
import twin
import twin_masks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl import bits, blocks, forms, masks, topk

INF, NAN = torch.inf, torch.nan
FORMS = get_args(forms.Form)
PADS = {"unordered": -1, "ascending": twin_masks.INT32_MAX}
SCORES = st.sampled_from([-INF, -2.0, -0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, INF])


class Batch(NamedTuple):
    """Scores with their windows."""

    scores: Tensor
    row_start: Tensor
    row_end: Tensor

    @property
    def given(self) -> dict[str, Any]:
        """The keywords of a call."""
        return self._asdict()

    @property
    def visible(self) -> Tensor:
        """Columns each row sees."""
        return (self.row_end - self.row_start).clamp(min=0).int()

    @property
    def windows(self) -> list[list[int]]:
        """fp32 bits of each row's window."""
        return [
            by_twin.fp32_bits(row[int(start) : max(int(start), int(end))])
            for row, start, end in zip(self.scores, self.row_start, self.row_end, strict=True)
        ]


@st.composite
def drawn(draw: Any, *, nan: bool = True) -> Batch:  # noqa: ANN401 - hypothesis' draw
    """A few ragged rows, some of them empty or backward, with ties, -inf and NaN."""
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 36))
    score = SCORES | st.just(NAN) if nan else SCORES
    flat = draw(st.lists(score, min_size=rows * columns, max_size=rows * columns))
    edges = st.integers(0, columns)
    edge = st.tuples(edges, edges) | st.sampled_from([(columns + 5, columns + 5), (-3, -20)])
    ends = draw(st.lists(edge, min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Batch(
        torch.tensor(flat, dtype=dtype).view(rows, columns),
        torch.tensor([start for start, _ in ends], dtype=torch.int32),
        torch.tensor([end for _, end in ends], dtype=torch.int32),
    )


def seeded(seed: int, *, nan: bool = True) -> Batch:
    """Six rows that see up to fourteen of twenty columns: hypothesis draws its numbers small."""
    random = torch.Generator().manual_seed(seed)
    palette = torch.tensor([-INF, -2.0, -0.0, 0.0, 1.0, 1.0, 2.0, 3.0, NAN])
    at = torch.randint(len(palette) - (not nan), (6, 20), generator=random)
    start = torch.randint(0, 7, (6,), generator=random, dtype=torch.int32)
    return Batch(
        palette[at], start, start + torch.randint(0, 15, (6,), generator=random, dtype=torch.int32)
    )


def batches(*, nan: bool = True) -> st.SearchStrategy[Batch]:
    """Drawn or seeded."""
    return drawn(nan=nan) | st.integers(0, 1 << 30).map(lambda seed: seeded(seed, nan=nan))


RULES = st.builds(
    twin_masks.Rules,
    topk_blocks=st.integers(1, 5),
    block_size=st.sampled_from([8, 8, 1, 2, 3]),
    nan=st.sampled_from(get_args(blocks.Nan)),
    short_rows=st.sampled_from(["identity", "any"]),
    zero_sign=st.sampled_from(["distinct", "equal"]),
    ties=st.sampled_from(["lowest", "highest", "all"]),
)


@st.composite
def block_masks(draw: Any) -> tuple[list[set[int]], list[int], int]:  # noqa: ANN401 - hypothesis' draw
    """The blocks some rows keep, the columns they see, and the columns of a block."""
    size = draw(st.sampled_from([8, 8, 1, 3]))
    visible = draw(st.lists(st.integers(0, 30) | st.just(-9), max_size=4))
    kept = [{b for b in range(-(-seen // size)) if draw(st.booleans())} for seen in visible]
    return kept, visible, size


def want_form(
    kept: list[Any], visible: list[int], form: str, *, size: int, columns: int, ids: int
) -> Tensor:
    """The twin's rows as a tensor of a form."""
    rows: list[Any] = [
        twin_masks.bools(k, v, columns, size) for k, v in zip(kept, visible, strict=True)
    ]
    width, dtype = columns, torch.bool
    if form == "packed":
        rows, width, dtype = [twin_masks.octets(row) for row in rows], -(-columns // 8), torch.uint8
    elif form != "bool":
        rows, width, dtype = [twin_masks.ids(k, ids, PADS[form]) for k in kept], ids, torch.int32
    return torch.tensor(rows, dtype=dtype).view(len(rows), width)


def same(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors have one dtype and the same bits, NaN being one class."""
    if got.dtype is not want.dtype or got.shape != want.shape:
        return False
    if got.is_floating_point():
        nan = torch.full_like(got, NAN)
        got, want = (torch.where(x.isnan(), nan, x) for x in (got, want))
    return torch.equal(bits.as_int(got), bits.as_int(want))


def int32(*values: int) -> Tensor:
    """A row of numbers."""
    return torch.tensor(values, dtype=torch.int32)


# --- blocks --------------------------------------------------------------------------------------


@given(batches(), st.sampled_from([8, 1, 3]), st.sampled_from(["propagate", "ignore"]))
def test_a_block_scores_the_largest_of_its_cells(batch: Batch, size: int, nan: Any) -> None:  # noqa: ANN401 - a literal
    """Every block of every window scores as the twin says, and a block that is not there -inf."""
    got = blocks.block_scores(**batch.given, nan=nan, block_size=size)
    width = (
        int(blocks.block_counts(visible=batch.visible, block_size=size).max()) if len(got) else 0
    )
    want = [
        [twin_masks.block_score(cells, nan) for cells in twin_masks.blocks_of(window, size)]
        for window in batch.windows
    ]
    rows = [row + [twin.MINUS_INF] * (width - len(row)) for row in want]
    as_signed = [[b - (b >> 31 << 32) for b in row] for row in rows]
    values = torch.tensor(as_signed, dtype=torch.int32).view(len(rows), width).view(torch.float32)
    assert got.dtype is batch.scores.dtype
    assert same(got.float(), values)


@given(batches(), RULES)
def test_the_legal_blocks_are_those_no_left_out_block_beats(
    batch: Batch, rules: twin_masks.Rules
) -> None:
    """The sets that must and ties allow are the twin's sets found by trial, row by row."""
    nan: Any = "ignore" if rules.nan == "ignore" else "propagate"
    size = rules.block_size
    for row, window in enumerate(batch.windows):
        scores = blocks.block_scores(
            scores=batch.scores[row : row + 1],
            row_start=batch.row_start[row : row + 1],
            row_end=batch.row_end[row : row + 1],
            nan=nan,
            block_size=size,
        )[0]
        legal = blocks.legal_blocks(
            block_scores=scores,
            topk_blocks=rules.topk_blocks,
            ties=rules.ties,  # type: ignore[arg-type] # drawn from its values
            nan=rules.nan,  # type: ignore[arg-type] # drawn from its values
            short_rows=rules.short_rows,  # type: ignore[arg-type] # the same
            zero_sign=rules.zero_sign,  # type: ignore[arg-type] # the same
        )
        must = legal.must.nonzero().flatten().tolist()
        ties = legal.ties.nonzero().flatten().tolist()
        got = {frozenset([*must, *more]) for more in combinations(ties, legal.free)}
        assert got == twin_masks.legal_published(window, rules)
        assert {len(kept) for kept in got} == {legal.need}
        assert not (legal.must & legal.ties).any()
        assert bool(ties) == (legal.free > 0)


@given(batches(), RULES)
def test_rows_together_may_publish_what_each_may_alone(
    batch: Batch, rules: twin_masks.Rules
) -> None:
    """Need, must and ties of a batch are those of its rows."""
    size = rules.block_size
    settings: Any = {key: value for key, value in rules._asdict().items() if key != "block_size"}
    scores = blocks.block_scores(
        **batch.given,
        nan="ignore" if rules.nan == "ignore" else "propagate",
        block_size=size,
    )
    counts = blocks.block_counts(visible=batch.visible, block_size=size)
    got = blocks.legal_rows(block_scores=scores, blocks=counts, **settings)
    for row, count in enumerate(counts.tolist()):
        want = blocks.legal_blocks(block_scores=scores[row, :count], **settings)
        assert int(got.need[row]) == want.need
        for one, other in ((got.must, want.must), (got.ties, want.ties)):
            assert one[row].tolist() == other.tolist() + [False] * (scores.shape[1] - count)


def test_the_cutoff_is_that_of_the_blocks_beside_the_newest() -> None:
    """It is the key of the second of two places, and none where the newest has the only one."""
    scores = torch.tensor([1.0, 2.0, 2.0, -5.0])
    two = blocks.legal_blocks(block_scores=scores, topk_blocks=2)
    one = blocks.legal_blocks(block_scores=scores, topk_blocks=1)
    assert (two.need, two.free, two.cutoff) == (2, 1, int(bits.order_key(scores[1])))
    assert (one.need, one.free, one.cutoff) == (1, 0, None)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 50))
def test_row_blocks_cover_the_rows_within_the_bound(rows: int, width: int, cells: int) -> None:
    """Ranges follow one another, none is empty, and only a single row is larger than the bound."""
    with patch.object(blocks, "CELLS", cells):
        parts = list(blocks.row_blocks(rows, width))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(
        part.stop - part.start == 1 or (part.stop - part.start) * width <= cells for part in parts
    )


# --- publish -------------------------------------------------------------------------------------


@given(batches(), RULES, st.sampled_from([1, 4, 8]), st.sampled_from([1, 50, 1 << 20]))
def test_a_row_publishes_the_twins_blocks_in_every_form(
    batch: Batch, rules: twin_masks.Rules, align: int, cells: int
) -> None:
    """Whole masks of each form, dead columns and pads included, in any row chunking."""
    kept = [twin_masks.published(window, rules) for window in batch.windows]
    visible = batch.visible.tolist()
    longest = max(visible, default=0)
    columns = -(-longest // align) * align
    slots = -(-longest // rules.block_size)
    slots = slots if rules.ties == "all" else min(rules.topk_blocks, slots)
    for form in FORMS:
        with patch.object(blocks, "CELLS", cells):
            got = masks.publish(**batch.given, **rules._asdict(), form=form, align=align)
        want = want_form(kept, visible, form, size=rules.block_size, columns=columns, ids=slots)
        assert same(got, want), form
    for chosen, window in zip(kept, batch.windows, strict=True):
        assert chosen in twin_masks.legal_published(window, rules)


@given(batches(), RULES, st.data())
def test_tail_rows_publish_what_they_publish_among_all_rows(
    batch: Batch, rules: twin_masks.Rules, data: st.DataObject
) -> None:
    """The rows of the tail, published alone, are the full mask's, live column by live column."""
    chosen = data.draw(st.lists(st.integers(0, max(0, len(batch.scores) - 1)), unique=True))
    rows = torch.tensor(sorted(chosen) if len(batch.scores) else [], dtype=torch.int64)
    full = masks.publish(**batch.given, **rules._asdict())[rows]
    seen = batch.visible[rows]
    width = forms.aligned(visible=seen)
    for form in FORMS:
        got = masks.publish(**batch.given, **rules._asdict(), form=form, rows=rows)
        admitted = forms.read(got, visible=seen, columns=width, block_size=rules.block_size)
        assert same(admitted, full[:, :width]), form


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 6))
def test_the_tail_is_the_last_rows_of_each_request(extends: list[int], length: int) -> None:
    """Each request keeps min(tail, extend) rows."""
    got = masks.tail_rows(extend_lens=torch.tensor(extends, dtype=torch.int32), tail=length)
    assert same(got, torch.tensor(twin_masks.tail(extends, length), dtype=torch.int64))


@pytest.mark.parametrize(
    ("scores", "rules", "want"),
    [
        ([5, 4, 3, 0], {}, [0, 3]),
        ([3, 3, 3, 0], {}, [0, 3]),
        ([3, 3, 3, 0], {"ties": "highest"}, [2, 3]),
        ([3, 3, 3, 0], {"ties": "all"}, [0, 1, 2, 3]),
        ([3, 2, 3, 2, 0], {"ties": "all"}, [0, 2, 4]),
        ([-INF, -INF, 2, -INF, 2, 0], {"ties": "all"}, [2, 4, 5]),
        ([-INF, -INF, -INF, -INF], {}, [3]),
        ([-INF, 1, 2], {"topk_blocks": 3}, [0, 1, 2]),
        ([-INF, 1, 2], {"topk_blocks": 3, "short_rows": "any"}, [1, 2]),
        ([1, NAN, 2, 0], {}, [1, 3]),
        ([1, NAN, 2, 0], {"nan": "ignore"}, [2, 3]),
        ([1, NAN, 2, 0], {"nan": "drop"}, [3]),
        ([NAN, NAN, NAN, NAN], {"topk_blocks": 4, "short_rows": "any"}, [0, 1, 2, 3]),
        ([NAN, NAN, NAN, NAN], {"topk_blocks": 4, "short_rows": "any", "nan": "ignore"}, [3]),
        ([NAN, NAN, NAN, NAN], {"topk_blocks": 4, "short_rows": "any", "nan": "drop"}, [3]),
        ([-0.0, 0.0, -1], {}, [1, 2]),
        ([-0.0, 0.0, -1], {"zero_sign": "equal"}, [0, 2]),
    ],
)
def test_two_blocks_are_published_by_their_rule(
    scores: list[float], rules: dict[str, Any], want: list[int]
) -> None:
    """Blocks of one column, two places unless the rules say else; the newest is always there."""
    got = masks.publish(
        scores=torch.tensor([scores], dtype=torch.float32),
        row_start=int32(0),
        row_end=int32(len(scores)),
        form="unordered",
        block_size=1,
        **{"topk_blocks": 2} | rules,
    )
    assert [block for block in got[0].tolist() if block != -1] == want


def test_block_0_begins_at_the_rows_start_and_dirty_cells_are_not_read() -> None:
    """A row of columns 3 to 22 has blocks 3-10, 11-18 and 19-22, whatever stands around them."""
    scores = torch.full((1, 30), 9.0)
    scores[0, 3:23] = 0.0
    scores[0, [0, 25, 29]] = NAN
    scores[0, 11] = 1.0
    got = masks.publish(scores=scores, row_start=int32(3), row_end=int32(23), topk_blocks=2)
    assert got.tolist() == [[False] * 8 + [True] * 12 + [False] * 4]


# --- forms ---------------------------------------------------------------------------------------


@given(block_masks(), st.integers(0, 9), st.sampled_from([1, 40, 1 << 20]))
def test_every_form_becomes_every_other_and_comes_back(
    some: tuple[list[set[int]], list[int], int], spare: int, cells: int
) -> None:
    """Any two forms hold the same mask: each is the twin's, from the other, in any row chunking."""
    kept, visible, size = some
    columns, ids = max(0, *visible, 0) + spare, max(map(len, kept), default=0)
    tensors = {
        form: want_form(kept, visible, form, size=size, columns=columns, ids=ids) for form in FORMS
    }
    seen = torch.tensor(visible, dtype=torch.int32)
    with patch.object(blocks, "CELLS", cells):
        for one, two in product(FORMS, FORMS):
            got = forms.convert(
                tensors[one], visible=seen, form=two, columns=columns, block_size=size
            )
            assert same(got, tensors[two]), (one, two)


@given(st.integers(0, 3), st.integers(0, 20), st.data())
def test_any_bool_mask_survives_packing(rows: int, columns: int, data: st.DataObject) -> None:
    """Masks that are not whole blocks keep every live bit, and dead ones are written False."""
    flat = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(flat, dtype=torch.bool).view(rows, columns)
    seen = data.draw(st.lists(st.integers(-1, columns), min_size=rows, max_size=rows))
    visible = torch.tensor(seen, dtype=torch.int32)
    live = mask & (torch.arange(columns) < visible[:, None])
    packed = forms.convert(mask, visible=visible, form="packed", columns=columns)
    assert packed.tolist() == [twin_masks.octets(row) for row in live.tolist()]
    assert same(forms.convert(packed, visible=visible, form="bool", columns=columns), live)


def test_ids_are_read_in_any_order_with_either_pad() -> None:
    """Pads may stand between ids, and both pads in one table."""
    mask = int32(2, -1, 0, forms.FAR_PAD)[None]
    got = forms.convert(mask, visible=int32(20), form="ascending")
    assert got.tolist() == [[0, 2, forms.FAR_PAD, forms.FAR_PAD]]


def test_dead_columns_are_not_read() -> None:
    """Bits, bytes and part blocks past the window change nothing and come back False."""
    dirty = torch.tensor([[1] * 8 + [0] * 8 + [1, 1, 7, 9, 1, 1, 1, 1]], dtype=torch.uint8)
    visible = int32(18)
    want = [[True] * 8 + [False] * 8 + [True] * 2 + [False] * 6]
    packed = torch.tensor([[0xFF, 0, 0xA7]], dtype=torch.uint8)
    for mask in (dirty.view(torch.bool), packed, int32(2, 0)[None]):
        assert forms.convert(mask, visible=visible, form="bool").tolist() == want
        assert forms.convert(mask, visible=visible, form="ascending").tolist() == [[0, 2]]


def test_sixteen_thousand_rows_of_a_million_columns_take_128_mib_as_ids() -> None:
    """2,048 blocks of four bytes a row, against a byte or a bit a column."""
    sizes = forms.form_bytes(rows=1 << 14, columns=1 << 20, topk_blocks=2048)
    mib = {form: size / (1 << 20) for form, size in sizes.items()}
    assert mib == {"bool": 16384, "packed": 2048, "unordered": 128, "ascending": 128}


@given(batches(), RULES.filter(lambda rules: rules.ties != "all"))
def test_the_bytes_of_a_form_are_those_of_its_tensor(batch: Batch, rules: twin_masks.Rules) -> None:
    """What is counted is what publish allocates."""
    sizes = forms.form_bytes(
        rows=len(batch.scores),
        columns=max(batch.visible.tolist(), default=0),
        topk_blocks=rules.topk_blocks,
        block_size=rules.block_size,
    )
    for form, size in sizes.items():
        got = masks.publish(**batch.given, **rules._asdict(), form=form, align=1)
        assert got.nbytes == size


# --- consumers -----------------------------------------------------------------------------------


ORDER = st.fixed_dictionaries(
    {
        "nan": st.sampled_from(["first", "last"]),
        "zero_sign": st.sampled_from(["distinct", "equal"]),
        "short_rows": st.sampled_from(["identity", "any"]),
    }
)


@given(batches(), RULES, ORDER, st.integers(1, 12), st.sampled_from([1, 50, 1 << 20]))
def test_a_consumer_reads_every_form_alike(
    batch: Batch, rules: twin_masks.Rules, order: dict[str, Any], k: int, cells: int
) -> None:
    """The applied scores and the picks are the twin's, from any form and in any row chunking."""
    size, windows = rules.block_size, batch.windows
    admitted = [
        twin_masks.bools(twin_masks.published(window, rules), len(window), len(window), size)
        for window in windows
    ]
    picks = [
        twin_masks.consumed(window, mask, k, order)
        for window, mask in zip(windows, admitted, strict=True)
    ]
    applied = torch.full_like(batch.scores, -INF)
    for row, (inside, start) in enumerate(zip(admitted, batch.row_start.tolist(), strict=True)):
        for j, ok in enumerate(inside):
            if ok:
                applied[row, start + j] = batch.scores[row, start + j]
    for form in FORMS:
        mask = masks.publish(**batch.given, **rules._asdict(), form=form)
        if form == "unordered":
            mask = mask.flip(1)
        with patch.object(blocks, "CELLS", cells):
            cut = masks.apply(**batch.given, mask=mask, block_size=size)
            got = masks.masked_topk(**batch.given, mask=mask, k=k, block_size=size, **order)
        assert same(cut, applied), form
        assert same(got, torch.tensor(picks, dtype=torch.int32).view(len(picks), k)), form
        contract = order | {"minus_inf": "pad"}
        for window, bools, row in zip(windows, admitted, got.tolist(), strict=True):
            assert twin.is_legal(row, window, len(window), k, mask=bools, contract=contract)


@given(batches(), RULES, st.integers(1, 12), st.data())
def test_the_picks_are_those_of_the_ordinary_topk_over_applied_scores(
    batch: Batch, rules: twin_masks.Rules, k: int, data: st.DataObject
) -> None:
    """Under every freedom, masked_topk is ragged_topk(minus_inf="pad") of apply's scores."""
    freedoms = data.draw(
        st.fixed_dictionaries(
            {
                "order": st.sampled_from(get_args(topk.Order)),
                "ties": st.sampled_from(get_args(topk.Ties)),
                "nan": st.sampled_from(get_args(topk.Nan)),
                "zero_sign": st.sampled_from(get_args(topk.ZeroSign)),
                "short_rows": st.sampled_from(["identity", "any"]),
                "empty_rows": st.sampled_from(["pad", "first"]),
            }
        )
    )
    for form in FORMS:
        mask = masks.publish(**batch.given, **rules._asdict(), form=form)
        size = rules.block_size
        applied = masks.apply(**batch.given, mask=mask, block_size=size)
        want = topk.ragged_topk(
            **batch.given | {"scores": applied}, k=k, minus_inf="pad", **freedoms
        )
        got = masks.masked_topk(**batch.given, mask=mask, k=k, block_size=size, **freedoms)
        assert same(got, want), form


def test_an_unlike_mask_leaves_a_short_row_whole_unless_asked() -> None:
    """Three columns and four slots: the mask of none but column 2 is read only by `any`."""
    given_: dict[str, Any] = {
        "scores": torch.tensor([[3.0, 2.0, 1.0]]),
        "mask": torch.tensor([[False, False, True]]),
        "row_start": int32(0),
        "row_end": int32(3),
    }
    whole = masks.masked_topk(**given_, k=4)
    read = masks.masked_topk(**given_, k=4, short_rows="any")
    assert (whole.tolist(), read.tolist()) == ([[0, 1, 2, -1]], [[2, -1, -1, -1]])


def test_ids_of_pads_alone_select_nothing_of_no_columns() -> None:
    """A launch without a key column has id slots all the same."""
    nothing: dict[str, Any] = {
        "scores": torch.zeros(1, 0),
        "row_start": int32(0),
        "row_end": int32(0),
    }
    got = masks.masked_topk(**nothing, mask=int32(-1, forms.FAR_PAD)[None], k=2)
    assert got.tolist() == [[-1, -1]]


def test_scores_may_be_masked_in_place() -> None:
    """The tensor given as out is the one that comes back."""
    scores = torch.tensor([[5.0, 1.0, 2.0]])
    mask = torch.tensor([[True, False]])
    got = masks.apply(scores=scores, mask=mask, row_start=int32(1), row_end=int32(3), out=scores)
    assert got is scores
    assert scores.tolist() == [[-INF, 1.0, -INF]]


@pytest.mark.parametrize(("nan", "want"), [("pick", [3, -1, 0, -1]), ("pad", [-1, -1, 0, -1])])
def test_a_pick_at_minus_infinity_leaves_a_hole(nan: Any, want: list[int]) -> None:  # noqa: ANN401 - a literal
    """It becomes a pad where it stands; a pad stays one."""
    got = masks.pad_minus_inf(
        raw_indices=int32(3, 1, 0, -1)[None],
        scores=torch.tensor([[7.0, 1.0, -INF, 2.0, NAN]]),
        row_start=int32(1),
        nan=nan,
    )
    assert got.tolist() == [want]


@given(batches(nan=False), RULES, st.integers(1, 12))
def test_padding_the_picks_of_applied_scores_gives_the_consumers_set(
    batch: Batch, rules: twin_masks.Rules, k: int
) -> None:
    """Pick with -inf, then pad: the same picks as never picking it, wherever the holes are."""
    size = rules.block_size
    mask = masks.publish(**batch.given, **rules._asdict())
    applied = masks.apply(**batch.given, mask=mask, block_size=size)
    if not batch.scores.shape[1]:
        return
    raw = topk.ragged_topk(**batch.given | {"scores": applied}, k=k, short_rows="any")
    got = masks.pad_minus_inf(raw_indices=raw, scores=applied, row_start=batch.row_start)
    want = masks.masked_topk(**batch.given, mask=mask, k=k, block_size=size, short_rows="any")
    assert same(got.sort(1).values, want.sort(1).values)


# --- errors --------------------------------------------------------------------------------------

ONE: dict[str, Any] = {"scores": torch.zeros(1, 20), "row_start": int32(0), "row_end": int32(20)}
TWO = int32(20, 12)


def bad_bytes() -> Tensor:
    """A bool mask of two rows with a 2 in it."""
    mask = torch.zeros(2, 24, dtype=torch.uint8)
    mask[1, 5] = 2
    return mask.view(torch.bool)


def part_block() -> Tensor:
    """Row 1 admits columns 8 to 10 of a window of twelve."""
    mask = torch.zeros(2, 24, dtype=torch.bool)
    mask[1, 8:11] = True
    return mask


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: forms.convert(bad_bytes(), visible=TWO, form="packed"),
            "mask row 1 holds byte 2 at column 5: a bool is 0 or 1",
        ),
        (
            lambda: forms.convert(int32(0, 1, 0, 2).view(2, 2), visible=TWO, form="bool"),
            "mask row 1 has block 2 in slot 1: its 12 columns make 2 blocks",
        ),
        (
            lambda: forms.convert(int32(0, 1, 0, -2).view(2, 2), visible=TWO, form="bool"),
            "mask row 1 has block -2 in slot 1: its 12 columns make 2 blocks",
        ),
        (
            lambda: forms.convert(int32(0, 1, -1, 1, 0, 1).view(2, 3), visible=TWO, form="bool"),
            "mask row 1 has block 1 in slots 0 and 2",
        ),
        (
            lambda: masks.masked_topk(**ONE, mask=int32(2, -1, 2)[None], k=4),
            "mask row 0 has block 2 in slots 0 and 2",
        ),
        (
            lambda: forms.convert(part_block(), visible=TWO, form="unordered"),
            "mask row 1 admits 3 of the 4 columns of block 1: ids hold whole blocks",
        ),
        (
            lambda: forms.convert(torch.ones(2, 24) > 0, visible=TWO, form="ascending", ids=2),
            "mask row 0 holds 3 blocks: ids have 2 slots",
        ),
        (
            lambda: forms.convert(torch.ones(2, 16) > 0, visible=TWO, form="packed"),
            "mask has 16 columns: row 0 sees 20",
        ),
        (
            lambda: masks.apply(**ONE, mask=torch.zeros(1, 2, dtype=torch.uint8)),
            "mask has 16 columns: row 0 sees 20",
        ),
        (
            lambda: forms.convert(torch.zeros(2, 24), visible=TWO, form="bool"),
            "mask is torch.float32: a mask is bool, packed uint8 or int32 block ids",
        ),
        (
            lambda: forms.convert(torch.ones(3, 24) > 0, visible=TWO, form="bool"),
            "mask is [3, 24]: 2 rows have a mask of 2 dimensions",
        ),
        (
            lambda: masks.apply(**ONE, mask=torch.ones(2, 24) > 0),
            "mask is [2, 24]: scores have 1 rows",
        ),
        (
            lambda: masks.publish(**ONE, topk_blocks=2, form="bits"),  # type: ignore[arg-type] # that is the point
            "form is 'bits': known are bool, packed, unordered, ascending",
        ),
        (
            lambda: masks.publish(**ONE, topk_blocks=0),
            "topk_blocks is 0: a row publishes its newest block at least",
        ),
        (
            lambda: blocks.legal_blocks(block_scores=torch.zeros(2), topk_blocks=-1),
            "topk_blocks is -1: a row publishes its newest block at least",
        ),
        (
            lambda: masks.publish(**ONE | {"row_end": int32(21)}, topk_blocks=2),
            "row 0 sees columns 0 to 21: scores have 20",
        ),
        (
            lambda: masks.apply(**ONE | {"row_start": int32(-1)}, mask=torch.ones(1, 24) > 0),
            "row 0 sees columns -1 to 20: scores have 20",
        ),
        (
            lambda: blocks.block_scores(**ONE, nan="drop"),  # type: ignore[arg-type] # that is the point
            "nan is 'drop': block scores know 'propagate' and 'ignore'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place_and_values(call: Any, message: str) -> None:  # noqa: ANN401 - a call of some function
    """Whole sentences, whatever the function."""
    with pytest.raises(ValueError, match=r"^") as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: forms.convert(bad_bytes(), visible=TWO, form="packed"),
            "mask row 1 holds byte 2 at column 5: a bool is 0 or 1",
        ),
        (
            lambda: forms.convert(int32(0, 1, 0, 2).view(2, 2), visible=TWO, form="bool"),
            "mask row 1 has block 2 in slot 1: its 12 columns make 2 blocks",
        ),
        (
            lambda: forms.convert(int32(0, 1, 1, 1).view(2, 2), visible=TWO, form="bool"),
            "mask row 1 has block 1 in slots 0 and 1",
        ),
        (
            lambda: forms.convert(part_block(), visible=TWO, form="unordered"),
            "mask row 1 admits 3 of the 4 columns of block 1: ids hold whole blocks",
        ),
        (
            lambda: forms.convert(
                torch.ones(2, 24) > 0, visible=TWO.flip(0), form="unordered", ids=2
            ),
            "mask row 1 holds 3 blocks: ids have 2 slots",
        ),
        (
            lambda: masks.apply(
                scores=torch.zeros(2, 20),
                row_start=int32(0, 0),
                row_end=int32(12, 20),
                mask=torch.ones(2, 16) > 0,
            ),
            "mask has 16 columns: row 1 sees 20",
        ),
        (
            lambda: masks.masked_topk(
                scores=torch.zeros(2, 20),
                row_start=int32(0, 0),
                row_end=int32(12, 20),
                mask=int32(0, 1, 0, 3).view(2, 2),
                k=4,
            ),
            "mask row 1 has block 3 in slot 1: its 20 columns make 3 blocks",
        ),
    ],
)
def test_a_mistake_in_a_later_chunk_of_rows_keeps_its_row_number(
    call: Any,  # noqa: ANN401 - a call of some function
    message: str,
) -> None:
    """Rows are numbered in the mask, not in the chunk, which here is one row."""
    with patch.object(blocks, "CELLS", 1), pytest.raises(ValueError, match=r"^") as caught:
        call()
    assert str(caught.value) == message
