"""Packed rows are the expansion of the block ids beside them, or of the ids they decode to."""

import pytest
import torch
import twin_qsa
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.checks import rows
from equivalence.checks.packed import Packed, blocks_of, decide_alone, decide_joint
from equivalence.verdict import Evidence, Finding

POISON = -7
# Position 30 sees 7 blocks and has an open group of 28, 29, 30.
IDS, POSITION, VISIBLE = (5, 2, 6), 30, 7
RIGHT = [*range(20, 24), *range(8, 12), *range(24, 28), 28, 29, 30, 15]
HOLED_IDS = (5, -1, 6)
HOLED = [*range(20, 24), *[-1] * 4, *range(24, 28), 28, 29, 30, 15]


def packed(
    *cells: list[int], position: int = POSITION, visible: int = VISIBLE, size: int = 4
) -> Packed:
    """Rows of one position, numbered from 40 on."""
    many = len(cells)
    return Packed(
        values=torch.tensor(cells, dtype=torch.int32).reshape(many, -1),
        positions=torch.full((many,), position, dtype=torch.int32),
        visible=torch.full((many,), visible, dtype=torch.int32),
        ids=torch.arange(many) + 40,
        block_size=size,
        poison=POISON,
    )


def ids_of(*ids: tuple[int, ...]) -> Tensor:
    """Block ids as a check gets them."""
    return torch.tensor(ids)


def named(decided: rows.Decided) -> list[str]:
    """The class or rule of every row."""
    return [rows.name(code) for code in decided.codes.tolist()]


def edited(row: list[int], **slots: int) -> list[int]:
    """The row with slots `s7` replaced; `s_1` is the last."""
    row = list(row)
    for slot, value in slots.items():
        row[int(slot[1:].replace("_", "-"))] = value
    return row


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[Packed, Tensor]:
    """Right rows and the ids they were made from, each block once; some are missing."""
    size, n = draw(st.sampled_from([2, 4])), draw(st.integers(1, 5))
    positions = draw(st.lists(st.integers(-1, 40), min_size=1, max_size=4))
    visible = [(p + 1) // size for p in positions]
    ids = []
    for seen in visible:
        order = draw(st.permutations(range(seen)))[:n]
        kept = [b if draw(st.integers(0, 4)) else -1 for b in order]
        ids.append(kept + [-1] * (n - len(kept)))
    cells = [twin_qsa.packed_row(*row, size) for row in zip(ids, positions, visible, strict=True)]
    values = torch.tensor(cells, dtype=torch.int32)
    made = Packed(
        values=values,
        positions=torch.tensor(positions, dtype=torch.int32),
        visible=torch.tensor(visible, dtype=torch.int32),
        ids=torch.arange(len(cells)),
        block_size=size,
        poison=POISON,
    )
    return made, torch.tensor(ids)


@given(some_rows())
def test_right_rows_are_identical_and_give_their_ids_back(
    given_rows: tuple[Packed, Tensor],
) -> None:
    """Beside their ids and alone; a missing block is a missing id."""
    made, ids = given_rows
    assert set(named(decide_joint(made, ids))) == {"identical"}
    alone, decoded = decide_alone(made)
    assert set(named(alone)) == {"identical"}
    assert torch.equal(decoded, ids)
    assert decoded.dtype is torch.int64
    assert alone.power is bool((made.values[:, -1] > 0).any())


@given(data=st.data())
def test_one_changed_cell_fails_its_row_alone(data: st.DataObject) -> None:
    """Whatever the cell and the value, beside its ids or alone, and no other row does."""
    made, ids = data.draw(some_rows())
    row = data.draw(st.integers(0, len(ids) - 1))
    slot = data.draw(st.integers(0, made.values.shape[1] - 1))
    old = int(made.values[row, slot])
    made.values[row, slot] = data.draw(st.integers(-8, 50).filter(lambda v: v != old))
    failing = rows.failing(decide_joint(made, ids).codes)
    assert failing.nonzero()[:, 0].tolist() == [row]
    assert rows.failing(decide_alone(made)[0].codes).nonzero()[:, 0].tolist() == [row]


MUTANTS: list[tuple[list[int], str, str]] = [
    (edited(RIGHT, s5=99), "page-mismatch", ""),
    (edited(RIGHT, s5=-1), "hole", ""),
    (edited(RIGHT, s5=POISON), "unwritten", ""),
    (
        [*RIGHT[:12], -1, -1, -1, 12],
        "hole",
        "the open group's tail is missing",
    ),
    (
        [*RIGHT[:12], -1, -1, -1, 15],
        "hole",
        "the open group's tail is missing",
    ),
    (
        [28, 29, 30, *RIGHT[:12], 15],
        "page-mismatch",
        "the open group's tail stands before the blocks",
    ),
    (
        [*RIGHT[4:8], *RIGHT[:4], *RIGHT[8:]],
        "page-mismatch",
        "the same tokens in another order than the blocks",
    ),
    (
        [t + 4 for t in RIGHT[:12]] + RIGHT[12:],
        "page-mismatch",
        "every wrong token is off by +4",
    ),
    (
        [*RIGHT[:12], 27, 28, 29, 15],
        "page-mismatch",
        "every wrong token is off by -1",
    ),
    (
        [5, 2, 6, *[-1] * 9, 28, 29, 30, 15],
        "hole",
        "blocks stand where their tokens should",
    ),
    (edited(RIGHT, s_1=12), "bits", "the last column is a count: 12 here, want 15"),
    (edited(RIGHT, s_1=-1), "bits", "the last column is a count: -1 here, want 15"),
    (
        edited(RIGHT, s_1=30),
        "bits",
        "the count column holds a token id: 30 here, want 15",
    ),
    (edited(RIGHT, s_1=POISON), "unwritten", "the last column is a count: -7 here, want 15"),
    ([POISON] * 16, "unwritten", ""),
]


@pytest.mark.parametrize(("row", "rule", "reading"), MUTANTS)
def test_mutants_beside_their_ids(row: list[int], rule: str, reading: str) -> None:
    """Each fails by its rule and says what it looks like; the right row beside it does not."""
    decided = decide_joint(packed(RIGHT, row), ids_of(IDS, IDS))
    assert named(decided) == ["identical", rule]
    assert decided.explain(1).reading == reading


ALONE: list[tuple[list[int], str, str]] = [
    (edited(RIGHT, s5=99), "page-mismatch", ""),
    (edited(RIGHT, s5=-1), "hole", ""),
    (edited(RIGHT, s0=-1, s1=-1), "hole", ""),
    (edited(RIGHT, s13=POISON), "unwritten", ""),
    ([*RIGHT[:12], -1, -1, -1, 12], "hole", "the open group's tail is missing"),
    (
        [28, 29, 30, *RIGHT[:12], 15],
        "page-mismatch",
        "the open group's tail stands before the blocks",
    ),
    ([19, 20, 21, 22, *RIGHT[4:]], "page-mismatch", "every wrong token is off by -1"),
    (
        [21, 20, 22, 23, *RIGHT[4:]],
        "page-mismatch",
        "the same tokens in another order than the blocks",
    ),
    (edited(RIGHT, s_1=16), "bits", "the count column holds a token id: 16 here, want 15"),
]


@pytest.mark.parametrize(("row", "rule", "reading"), ALONE)
def test_mutants_alone(row: list[int], rule: str, reading: str) -> None:
    """A group that is no block, a wrong open group and a wrong count need no ids to be seen."""
    decided, _ = decide_alone(packed(row, RIGHT))
    assert named(decided) == [rule, "identical"]
    assert decided.explain(0).reading == reading


@pytest.mark.parametrize(
    "row", [[*RIGHT[4:8], *RIGHT[:4], *RIGHT[8:]], [*range(4, 8), *RIGHT[4:]], HOLED]
)
def test_other_blocks_alone_are_for_the_check_of_picks(row: list[int]) -> None:
    """Another order, another block or a missing one is a sound row that decodes to other ids."""
    decided, ids = decide_alone(packed(row))
    assert named(decided) == ["identical"]
    assert not torch.equal(ids, ids_of(IDS))
    assert named(decide_joint(packed(row), ids)) == ["identical"]
    assert torch.equal(packed(row).values, packed(row).expanded(ids))


@pytest.mark.parametrize(
    ("row", "rule", "reading"),
    [
        (HOLED, "identical", ""),
        (RIGHT, "page-mismatch", ""),
        (
            [*range(20, 24), *range(24, 31), *[-1] * 4, 15],
            "hole",
            "the holes are closed up: a block that is -1 leaves its slots at -1",
        ),
        (
            [*range(20, 24), *range(24, 31), *[-1] * 4, 11],
            "hole",
            "the holes are closed up: a block that is -1 leaves its slots at -1",
        ),
        (edited(HOLED, s_1=11), "bits", "the last column is a count: 11 here, want 15"),
        (edited(HOLED, s4=4, s5=5), "page-mismatch", ""),
    ],
)
def test_a_missing_block_leaves_holes_inside_the_counted_prefix(
    row: list[int], rule: str, reading: str
) -> None:
    """Four -1, and a count that does not know of them."""
    decided = decide_joint(packed(row), ids_of(HOLED_IDS))
    assert named(decided) == [rule]
    if rule != "identical":
        assert decided.explain(0).reading == reading


@pytest.mark.parametrize(
    ("row", "position", "visible", "rule"),
    [
        ([*range(8), 8, 9, *[-1] * 5, 10], 9, 2, "identical"),
        ([*range(8), 8, 9, 10, *[-1] * 4, 10], 9, 2, "pad"),
        ([*range(8), 8, 9, *[-1] * 4, 9, 10], 9, 2, "pad"),
        ([*range(8), 8, 9, *[POISON] * 5, 10], 9, 2, "unwritten"),
        ([*range(8), 8, 9, *[-1] * 5, 11], 9, 2, "bits"),
        ([*[-1] * 15, 0], -1, 0, "identical"),
        ([0, *[-1] * 14, 0], -1, 0, "pad"),
        ([*[-1] * 15, 1], -1, 0, "bits"),
        ([0, 1, 2, *[-1] * 12, 3], 2, 0, "identical"),
        ([0, 1, -1, *[-1] * 12, 2], 2, 0, "hole"),
    ],
)
def test_short_rows_and_padding_rows(
    row: list[int], position: int, visible: int, rule: str
) -> None:
    """Beside the ids and alone; nothing stands after the counted prefix."""
    made = packed(row, position=position, visible=visible)
    ids = torch.arange(3)
    ids = torch.where(ids < visible, ids, -1)[None]
    assert named(decide_joint(made, ids)) == [rule]
    decided, decoded = decide_alone(made)
    assert named(decided) == [rule]
    assert torch.equal(decoded, ids)


def test_wrong_ids_do_not_make_their_expansion_wrong() -> None:
    """A block twice, one past the row's and one that was not written are the ids' own faults."""
    ids = ids_of((5, 5, 6), (5, 90, 6), (5, POISON, 6))
    cells = [twin_qsa.packed_row(row, POSITION, VISIBLE) for row in ids.tolist()]
    decided = decide_joint(packed(*cells), ids)
    assert named(decided) == ["identical"] * 3
    alone, decoded = decide_alone(packed(*cells))
    assert named(alone) == ["identical"] * 3
    assert torch.equal(decoded, ids.where(ids != POISON, -1))


def test_a_right_row_takes_the_class_of_its_ids() -> None:
    """Where those fail or are undecided it is identical; a wrong row keeps its rule."""
    codes = [rows.TIED, rows.REORDERED, rows.UNDECIDED, rows.code("lost-winner"), rows.TIED]
    cells = [RIGHT] * 4 + [edited(RIGHT, s_1=0)]
    decided = decide_joint(
        packed(*cells), ids_of(*[IDS] * 5), torch.tensor(codes, dtype=torch.int8)
    )
    assert named(decided) == ["tied", "reordered", "identical", "identical", "bits"]


def test_a_finding_shows_slots_and_what_they_are() -> None:
    """The row's number, the first four wrong slots and how many more."""
    wrong = edited(RIGHT, s0=0, s6=1, s14=2, s_1=3, s1=7)
    assert decide_joint(packed(RIGHT, wrong), ids_of(IDS, IDS)).explain(1) == Finding(
        stage="packed",
        rule="page-mismatch",
        row=41,
        place="5 of 16 slots",
        evidence=(
            Evidence(label="slot", place="0   block 0", value="want 20   got 0"),
            Evidence(label="slot", place="1   block 0", value="want 21   got 7"),
            Evidence(label="slot", place="6   block 1", value="want 10   got 1"),
            Evidence(label="slot", place="14   the open group", value="want 30   got 2"),
            Evidence(label="slot", place="and 1 more"),
        ),
    )
    after = edited([*range(8), 8, 9, *[-1] * 5, 10], s12=3, s_1=13)
    found = decide_alone(packed(after, position=9, visible=2))[0].explain(0)
    assert [line.place for line in found.evidence] == [
        "12   after the counted prefix",
        "15   the count",
    ]


def test_rows_without_a_token_have_no_power() -> None:
    """Padding alone could not have been wrong; no rows neither."""
    padding = [*[-1] * 15, 0]
    alone, _ = decide_alone(packed(padding, position=-1, visible=0))
    assert (alone.power, decide_joint(packed(RIGHT), ids_of(IDS)).power) == (False, True)
    none = Packed(
        values=torch.zeros(0, 16, dtype=torch.int32),
        positions=torch.zeros(0, dtype=torch.int32),
        visible=torch.zeros(0, dtype=torch.int32),
        ids=torch.zeros(0, dtype=torch.int64),
    )
    decided, ids = decide_alone(none)
    assert (decided.power, decided.codes.shape, ids.shape) == (False, (0,), (0, 3))


def test_the_engine_s_rows() -> None:
    """2,052 columns: a count of 2,048 where a tail of three makes it 2,051."""
    ids = torch.randperm(700, generator=torch.Generator().manual_seed(0))[None, :512]
    right = twin_qsa.packed_row(ids[0].tolist(), 2802, 700)
    made = packed(right, edited(right, s_1=2048), position=2802, visible=700)
    decided = decide_joint(made, ids.expand(2, -1))
    assert named(decided) == ["identical", "bits"]
    assert decided.explain(1).reading == "the last column is a count: 2048 here, want 2051"
    assert torch.equal(blocks_of(made), ids.expand(2, -1))


def test_what_is_no_token_is_no_block() -> None:
    """A row that was never written decodes to missing blocks."""
    decided, ids = decide_alone(packed([POISON] * 16))
    assert (named(decided), ids.tolist()) == (["unwritten"], [[-1] * 3])
