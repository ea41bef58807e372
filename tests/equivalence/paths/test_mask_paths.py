"""Every way to publish a mask gives the same blocks, in the bytes that its formula says."""

from dataclasses import replace
from functools import partial
from typing import Any

import batches
import pytest
import torch
import twin_layers
from batches import call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence import generate, memory
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import masks as paths
from equivalence.paths.masks import WAYS, peak_bytes, source
from equivalence.verdict import Status
from refimpl import blocks, fast, forms, layer, masks
from refimpl.bits import as_int

ALL_ROWS = ("pieces", "preallocated")
FORM: dict[str, Any] = {"as_packed": "packed", "as_ids": "unordered"}
_ROW_BYTES = 80
"""Numbers of rows, their windows and lengths."""
_CELL_BYTES = 30
"""What choosing the blocks takes of a cell of a row block."""


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls this small are over before anything is compiled for them."""
    monkeypatch.setattr(fast, "_LEAST_CELLS", 1 << 30)


def case(seed: int, *, tail: int | None = None, ratio: int = 1, topk_blocks: int = 2) -> Case:
    """Two prompts of a prefill, scores with ties, and of the tail the rows that are declared."""
    random = torch.Generator().manual_seed(seed)
    batch = batches.case([(4, 60), (3, 43)], seed=seed, ratio=ratio)
    start, end = batch.inputs["row_start"], batch.inputs["row_end"]
    columns = int(end.max())
    scores = torch.randint(-3, 9, (len(start), columns), generator=random).float()
    scores[1, :56] = -torch.inf
    inputs = {
        "scores": scores,
        "row_start": start,
        "row_end": end,
    }
    if tail is not None:
        rows = masks.tail_rows(extend_lens=torch.tensor([4, 3]), tail=tail)
        inputs["rows"] = rows.int()
    return Case(op="publish_mask", inputs=inputs, params={"topk_blocks": topk_blocks})


def reference(given: Case, form: forms.Form = "bool") -> Tensor:
    """The mask of the declared rows."""
    inputs: dict[str, Any] = {**given.inputs, **given.params}
    return masks.publish(**inputs, form=form)


@given(
    given_=st.builds(
        case,
        st.integers(0, 99),
        tail=st.sampled_from([None, 1, 3]),
        ratio=st.sampled_from([1, 2]),
        topk_blocks=st.integers(1, 9),
    ),
    piece_rows=st.integers(1, 8),
    cells=st.sampled_from([200, 1 << 20]),
)
def test_every_way_publishes_the_reference(given_: Case, piece_rows: int, cells: int) -> None:
    """Bit for bit, dead columns too, in any pieces and row blocks; all rows or the tail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CELLS", cells)
        told = {
            name: call(given_, way, **({"piece_rows": piece_rows} if name == "pieces" else {}))
            for name, way in WAYS.items()
        }
    every = reference(replace(given_, inputs={**given_.inputs, "rows": None}))  # type: ignore[dict-item] # as absent
    for name, outputs in told.items():
        (stage, got), *more = outputs.items()
        want = reference(given_, FORM.get(name, "bool"))
        if name in ALL_ROWS:
            want = every
        if name == "full_then_tail":
            rows = given_.inputs.get("rows")
            want = every if rows is None else every[rows.long()]
        assert (stage, more) == ("block_ids" if name == "as_ids" else "mask", [])
        assert got.dtype is want.dtype
        assert torch.equal(as_int(got), as_int(want))


@pytest.mark.parametrize("tail", [None, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_judge_calls_every_way_equal(way: str, tail: int | None) -> None:
    """Strictly; by the engine's own formula where ties are free."""
    given_ = generate.publish_mask(1, tail=tail)
    assert check(given_, WAYS[way]).status is Status.EQUAL
    free = Contract.parse("order=any,ties=any,zero_sign=equal,short_rows=any")
    assert check(given_, partial(WAYS[way], keeper="torch"), contract=free).status is Status.EQUAL


@pytest.mark.parametrize("ascending", [False, True])
def test_ids_have_either_pad(ascending: bool) -> None:  # noqa: FBT001 - both are tried
    """-1, or INT32_MAX behind ascending ids."""
    given_ = case(3, topk_blocks=9)
    got = call(given_, paths.as_ids, ascending=ascending)["block_ids"]
    assert torch.equal(got, reference(given_, "ascending" if ascending else "unordered"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("way", WAYS)
def test_amax_and_topk_publish_a_legal_mask(way: str, seed: int) -> None:
    """The engine's own formula, `keeper="torch"`, breaks ties as it likes."""
    given_ = case(seed)
    (got,) = call(given_, WAYS[way], keeper="torch").values()
    start, end = given_.inputs["row_start"], given_.inputs["row_end"]
    visible = end - start
    kept = forms.whole_blocks(forms.read(got, visible=visible, columns=64), visible=visible)
    for row, held in enumerate(kept):
        window = as_int(given_.inputs["scores"][row, start[row] : end[row]])
        scores = [int(cell) % (1 << 32) for cell in window]
        assert twin_layers.may_publish(scores, 2, held.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("way", WAYS)
def test_rows_without_columns_have_masks_without_any(way: str) -> None:
    """No rows, and rows that see nothing."""
    for rows in (0, 3):
        none = torch.zeros(rows, dtype=torch.int32)
        inputs = {"scores": torch.zeros(rows, 5), "row_start": none, "row_end": none}
        for keeper in ("reference", "torch"):
            (got,) = WAYS[way](**inputs, topk_blocks=2, keeper=keeper).values()
            assert got.shape == (rows, 0)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeper", ["reference", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_measured_is_the_formula_and_a_bounded_scratch(
    way: str, keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks alive at once are those of `peak_bytes`; beyond them is no third of a mask."""
    rows, columns, few = 150, 1000, 40
    monkeypatch.setattr(blocks, "CELLS", columns)
    start = torch.zeros(rows, dtype=torch.int32)
    inputs: dict[str, Any] = {
        "scores": torch.randn(rows, columns),
        "row_start": start,
        "row_end": torch.full_like(start, columns),
        "rows": torch.arange(rows - few, rows, dtype=torch.int32),
        "topk_blocks": 20,
    }
    with memory.measured(None) as meter:
        outputs = WAYS[way](**inputs, keeper=keeper)
    size: dict[str, Any] = {"rows": rows, "columns": columns, "published": few, "topk_blocks": 20}
    beyond = meter.peak - peak_bytes(way=way, **size)
    scratch = _CELL_BYTES * columns + _ROW_BYTES * rows
    assert 0 <= beyond < scratch < rows * columns // 3
    held = sum(tensor.nbytes for tensor in outputs.values())
    assert meter.of(held).outputs == held


def test_the_ways_of_a_long_context_take_what_they_say() -> None:
    """16,384 rows at 1M columns, 2,048 blocks a row, 128 tail rows: 32 GiB down to 1 MiB."""
    size: dict[str, Any] = {
        "rows": 1 << 14,
        "columns": 1 << 20,
        "topk_blocks": 2048,
    }
    whole = {way: peak_bytes(way=way, **size) >> 20 for way in WAYS}
    assert whole == {
        "pieces": 32 << 10,
        "preallocated": 16 << 10,
        "full_then_tail": 32 << 10,
        "tail_only": 16 << 10,
        "as_ids": 128,
        "as_packed": 2 << 10,
    }
    tail = {way: peak_bytes(way=way, **size, published=128) >> 20 for way in WAYS}
    assert tail == {
        "pieces": 32 << 10,
        "preallocated": 16 << 10,
        "full_then_tail": (16 << 10) + 128,
        "tail_only": 128,
        "as_ids": 1,
        "as_packed": 16,
    }


# --- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["absolute", "row-relative"])
@pytest.mark.parametrize("way", WAYS)
def test_a_source_layer_publishes_either_way(way: str, columns: str) -> None:
    """Logits, picks and slots are those of the layer, and so is its mask."""
    given_ = generate.prefill_indexer(4, tie_rich=False)
    whole: dict[str, Any] = {**given_.inputs, **given_.params, "columns": columns}
    whole |= {"topk_blocks": 2, "width": 64 if columns != "absolute" else None}
    free = layer.prefill_indexer(**whole)
    whole |= {"init_tokens": 1, "local_tokens": 1}
    got = source(way=way, **whole)
    want = layer.prefill_indexer(**whole, form=FORM.get(way, "bool"))
    assert not torch.equal(free["mask"], layer.prefill_indexer(**whole)["mask"])
    assert got.keys() == want.keys()
    assert all(torch.equal(as_int(got[name]), as_int(want[name])) for name in want)


def test_a_source_layer_publishes_declared_rows() -> None:
    """`rows` and block_size go to the way."""
    given_ = generate.prefill_indexer(4)
    whole: dict[str, Any] = {**given_.inputs, **given_.params, "topk_blocks": 2, "block_size": 4}
    whole["rows"] = torch.tensor([1, 4], dtype=torch.int32)
    got = source(way=paths.tail_only, **whole)
    assert torch.equal(got["mask"], layer.prefill_indexer(**whole)["mask"])


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(paths.pieces, pieces_rows=3),
            (
                "pieces takes no 'pieces_rows': its settings are piece_rows, keeper, and "
                "publish_mask takes scores, row_start, row_end, topk_blocks, block_size, rows"
            ),
        ),
        (partial(paths.pieces, piece_rows=0), "piece_rows is 0: it is a whole number, 1 or more"),
        (
            partial(paths.tail_only, keeper="triton"),
            "no keeper named 'triton': one of reference, torch",
        ),
        (
            partial(paths.tail_only, block_size=0),
            "block_size is 0: it is a whole number, 1 or more",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(make: Any, message: str) -> None:  # noqa: ANN401 - a way
    """It names the setting, and what there is."""
    with pytest.raises(UsageError) as raised:
        call(case(0), make)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (paths.as_ids, "publish_mask needs 'scores'"),
        (source, "a source layer needs 'topk_blocks'"),
        (partial(source, way="tiles"), f"no way named 'tiles': one of {', '.join(WAYS)}"),
        (
            partial(peak_bytes, way="tiles", rows=1, columns=1, topk_blocks=1),
            f"no way named 'tiles': one of {', '.join(WAYS)}",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(make: Any, message: str) -> None:  # noqa: ANN401 - a way
    """Likewise."""
    with pytest.raises(UsageError) as raised:
        make()
    assert str(raised.value) == message
