"""A plan built once a batch is the plan every layer would build, and never another batch's."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.checks import plans
from equivalence.errors import UsageError
from equivalence.paths.plan import Batch, Plan, Planner, build, per_layer
from equivalence.paths.planner import content_key, judge, planner
from equivalence.planted import reused
from equivalence.planted.reused import address_key, address_planner, changed_in_place, reallocated
from equivalence.report import as_text
from equivalence.verdict import Evidence, Finding, Status, Verdict
from refimpl.pages import translate_pages

STILL = "no batch stood where another had: a key of addresses cannot show"
SEQUENCES = [changed_in_place, reallocated]


def ints(*values: int) -> Tensor:
    """int32, one dimension."""
    return torch.tensor(values, dtype=torch.int32)


def batch(
    lengths: list[tuple[int, int]], *, first_page: int = 1, page_size: int = 4, ratio: int = 1
) -> Batch:
    """Requests of (new, all) tokens, with pages of their own: the last is first_page."""
    pages = max([1, *(-(-total // page_size) for _, total in lengths)])
    count = len(lengths) * pages
    return Batch(
        extend_lens=ints(*(new for new, _ in lengths)),
        seq_lens=ints(*(total for _, total in lengths)),
        page_table=ints(*range(first_page, first_page + count)).flip(0).view(-1, pages),
        page_size=page_size,
        ratio=ratio,
    )


def pages(*table: int) -> Batch:
    """One request of 8 new tokens in two pages of 4."""
    return Batch(
        extend_lens=ints(8), seq_lens=ints(8), page_table=ints(*table).view(1, -1), page_size=4
    )


A29 = [pages(3, 5), pages(5, 3)]
LENGTHS = st.lists(
    st.integers(0, 30).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))),
    max_size=4,
)
DRAWN = st.builds(batch, LENGTHS, page_size=st.integers(1, 5), ratio=st.sampled_from([1, 2, 4]))


def same(one: Plan, two: Plan) -> bool:
    """Whether both plans are the same integers of the same dtypes."""
    pairs = [(one.tensors[name], two.tensors[name]) for name in one.tensors]
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


def readings(verdict: Verdict) -> list[str]:
    """What every finding says."""
    return [finding.reading for finding in verdict.findings]


def gives(*plans: Plan) -> Planner:
    """A planner that gives these plans, whatever the batches."""
    left = iter(plans)
    return lambda _: next(left)


def counting() -> tuple[Planner, list[Batch]]:
    """The builder, and the batches it was asked for."""
    asked: list[Batch] = []

    def counted(one: Batch) -> Plan:
        asked.append(one)
        return build(one)

    return counted, asked


@given(given=DRAWN)
def test_a_plan_is_what_every_layer_would_build(given: Batch) -> None:
    """Integers and dtypes, of batches without requests, rows or columns too."""
    assert same(build(given), per_layer(given))


def test_a_plan_of_two_requests_in_figures() -> None:
    """Extends [3, 2] of [10, 4] tokens in pages of 4."""
    plan = build(batch([(3, 10), (2, 4)]))
    assert {name: tensor.tolist() for name, tensor in plan.tensors.items()} == {
        "row_start": [0, 0, 0, 10, 10],
        "row_end": [8, 9, 10, 13, 14],
        "row_to_request": [0, 0, 0, 1, 1],
        "topk_indices_offset": [0, 0, 0, 12, 12],
        "windows": [[0, 3, 0, 10], [3, 2, 10, 4]],
        "slot_spans": [[0, 24, 4], [4, 20, 4], [8, 16, 2], [10, 12, 4]],
        "span_bounds": [0, 3, 4],
    }


@given(given=DRAWN)
def test_slot_spans_are_the_page_table_column_by_column(given: Batch) -> None:
    """They cover every column once, in order, with the slot that its page gives."""
    plan = build(given)
    got = [
        (column + i, slot + i)
        for column, slot, keys in plan.slot_spans.tolist()
        for i in range(keys)
    ]
    want = []
    for request, (_, _, first, columns) in enumerate(plan.windows.tolist()):
        slots = translate_pages(
            raw_indices=torch.arange(columns, dtype=torch.int32)[None],
            page_table=given.page_table[request : request + 1],
            page_size=given.page_size,
        )
        want += [(first + i, slot) for i, slot in enumerate(slots[0].tolist())]
    assert got == want


@given(given=DRAWN)
def test_a_plan_shares_no_memory_with_its_batch(given: Batch) -> None:
    """What is written into the batch later leaves the plan as it was."""
    plan, again = build(given), build(given)
    for tensor in (given.extend_lens, given.seq_lens, given.page_table):
        tensor.fill_(0)
    assert same(plan, again)


def test_a_batch_is_planned_once() -> None:
    """Sixty layers of a batch, and an equal batch in other tensors, take one plan."""
    counted, asked = counting()
    plan = planner(build=counted)
    first = batch([(3, 10), (2, 4)])
    got = {id(plan(first)) for _ in range(60)} | {id(plan(batch([(3, 10), (2, 4)])))}
    assert (len(got), len(asked)) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        batch([(2, 10), (2, 4)]),
        batch([(3, 11), (2, 4)]),
        batch([(3, 10), (2, 4)], first_page=2),
        batch([(3, 10), (2, 4)], page_size=5),
        replace(batch([(3, 10), (2, 4)]), ratio=2),
        replace(batch([(3, 10), (2, 4)]), page_size=5),
    ],
)
def test_a_batch_that_says_anything_else_has_another_key(other: Batch) -> None:
    """Lengths, pages, the size of a page, the ratio."""
    assert content_key(other) != content_key(batch([(3, 10), (2, 4)]))


def test_the_shape_is_of_the_key() -> None:
    """The same bytes in another shape, or as other integers, are another batch."""
    wide = batch([(1, 1), (1, 1)])
    folded = replace(wide, page_table=wide.page_table.view(1, 2))
    longer = replace(wide, seq_lens=wide.seq_lens.view(torch.int64))
    assert len({content_key(wide), content_key(folded), content_key(longer)}) == 3


def test_a_planner_keeps_the_plans_used_last() -> None:
    """Of three batches and two places, the one not used for longest is planned again."""
    counted, asked = counting()
    plan = planner(build=counted, most=2)
    one, two, three = (batch([(3, total)]) for total in (5, 6, 7))
    for each in (one, two, one, three, one, two, one):
        plan(each)
    assert [int(each.seq_lens[0]) for each in asked] == [5, 6, 7, 6]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_plan_of_the_previous_batch_is_named(
    sequence: Callable[[list[Batch]], Iterator[Batch]],
) -> None:
    """Pages [3, 5], then [5, 3] in the same place: by address stale, by content right."""
    verdict = judge(sequence(A29), address_planner())
    assert verdict.status is Status.DIFFERENT
    place = "slot_spans[0, 1]"
    assert verdict.findings == (
        Finding(
            stage="slot_spans",
            rule="stale-round",
            run="batch 2",
            place="batch 2",
            evidence=(
                Evidence(label="want", place=place, value="20"),
                Evidence(label="got", place=place, value="12"),
            ),
            reading="batch 2 has the plan of batch 1: slot_spans[0, 1] is 12, not 20",
        ),
    )
    fault = reused.FAULTS["plan of the previous batch"]
    assert (fault.planner, fault.rules) == (address_planner, frozenset({"stale-round"}))
    right = judge(sequence(A29), planner())
    assert (right.status, right.findings, right.note) == (Status.EQUAL, (), "")


@pytest.mark.parametrize("sequence", SEQUENCES)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    table=st.permutations(range(1, 7)),
)
def test_by_content_no_sequence_is_ever_stale(
    sequence: Callable[[list[Batch]], Iterator[Batch]], lengths: list[int], table: list[int]
) -> None:
    """Lengths and pages that change and come back, all in one place."""
    drawn = [
        Batch(
            extend_lens=ints(1, 1),
            seq_lens=ints(length, 1),
            page_table=ints(*table[i % 2 :], *table[: i % 2]).view(2, 3),
            page_size=4,
        )
        for i, length in enumerate(lengths)
    ]
    assert judge(sequence(drawn), planner(most=2)).status is not Status.DIFFERENT
    stale = judge(sequence(drawn), address_planner())
    changes = any(not same(build(drawn[0]), build(each)) for each in drawn)
    assert (stale.status is Status.DIFFERENT) == changes


def test_memory_that_was_really_freed_comes_back() -> None:
    """Each batch is freed before the next one is made, until one stands where another did."""

    def freed(seen: set[object]) -> Iterator[Batch]:
        for i in range(1000):
            made = pages(3 + i, 2000 - i)
            at = address_key(made)
            told, made = [made], pages()
            yield told.pop()
            if at in seen:
                break
            seen.add(at)

    verdict = judge(freed(set()), planner(key=address_key, most=1000))
    assert verdict.status is Status.DIFFERENT
    assert [finding.rule for finding in verdict.findings] == ["stale-round"]
    assert verdict.findings[0].run == f"batch {len(verdict.runs)}"
    assert judge(freed(set()), planner(most=1000)).status is Status.EQUAL


def test_one_batch_never_shows_it() -> None:
    """Nor do batches that all have one plan; and batches apart say what they cannot show."""
    note = "no power: no batch has another plan than the first, so none could outlive it"
    for batches in ([A29[0]], [A29[0], A29[0]], []):
        verdict = judge(changed_in_place(batches), address_planner())
        assert (verdict.status, verdict.note) == (Status.UNDECIDED, note)
    for batches in (A29, [*A29, *A29]):
        apart = judge(batches, address_planner())
        assert (apart.status, apart.note) == (Status.EQUAL, STILL)


def test_the_nearest_batch_is_named() -> None:
    """Batches 1 and 3 have one plan, and the fourth gets it: it is that of batch 3."""
    given = [pages(3, 5), pages(5, 3), pages(3, 5), pages(7, 1)]
    verdict = judge(given, gives(*map(build, given[:3]), build(given[0])))
    assert readings(verdict) == ["batch 4 has the plan of batch 3: slot_spans[0, 1] is 12, not 28"]


def test_one_stale_tensor_is_named_alone() -> None:
    """The rest of the plan is the batch's own."""
    first, second = batch([(3, 10)]), batch([(2, 9)], first_page=5)
    mixed = replace(build(second), slot_spans=build(first).slot_spans)
    verdict = judge([first, second], gives(build(first), mixed))
    assert readings(verdict) == [
        "batch 2 has the slot_spans of batch 1: slot_spans[0, 1] is 12, not 28"
    ]
    assert verdict.stages["slot_spans"].rules == {"stale-round": 1}


@pytest.mark.parametrize(
    ("change", "rule", "reading"),
    [
        (
            lambda plan: replace(plan, row_end=plan.row_end + ints(0, 0, 1)),
            "bits",
            "row_end[2] is 11, not 10",
        ),
        (
            lambda plan: replace(plan, row_end=plan.row_end[:2]),
            "shape",
            "row_end is int32 [2], not int32 [3]",
        ),
        (
            lambda plan: replace(plan, row_end=plan.row_end.long()),
            "dtype",
            "row_end is int64 [3], not int32 [3]",
        ),
    ],
)
def test_a_wrong_plan_is_told_by_its_first_number(
    change: Callable[[Plan], Plan], rule: str, reading: str
) -> None:
    """Or by its shape, or its dtype."""
    given = [batch([(3, 10)])]
    verdict = judge(given, lambda one: change(build(one)))
    assert [(f.stage, f.rule, f.reading) for f in verdict.findings] == [("row_end", rule, reading)]
    assert verdict.status is Status.DIFFERENT


def test_every_tensor_is_compared() -> None:
    """One number changed in any tensor of the plan is found there, and only there."""
    given = batch([(3, 10), (2, 4)])
    for name in build(given).tensors:
        plan = build(given)
        plan.tensors[name].view(-1)[-1] += 1
        verdict = judge([given], gives(plan))
        assert [(f.stage, f.rule) for f in verdict.findings] == [(name, "bits")]


def test_the_report_of_a_stale_plan() -> None:
    """The batch, the tensor, the index, want and got in decimal."""
    text = as_text.failure(judge(changed_in_place(A29), address_planner(), case="two batches"))
    assert text.splitlines()[0] == "two batches index_plan: it differs (stale-round)"
    start = text.index("  batch 2\n")
    assert text[start:].splitlines()[:5] == [
        "  batch 2",
        "  slot_spans   batch 2   stale-round",
        "    want      slot_spans[0, 1]  20",
        "    got       slot_spans[0, 1]  12",
        "    reading   batch 2 has the plan of batch 1: slot_spans[0, 1] is 12, not 20",
    ]


def test_a_planner_that_raises_is_undecided() -> None:
    """The batch it raised at is named, and what came before was judged."""
    told = [build(A29[0])]
    verdict = judge(A29, lambda _: told.pop())
    assert verdict.status is Status.UNDECIDED
    assert [(f.run, f.rule, f.reading) for f in verdict.findings] == [
        ("batch 2", "crash", "IndexError: pop from empty list")
    ]
    assert [run.name for run in verdict.runs] == ["batch 1", "batch 2"]


def test_a_got_of_an_earlier_batch_that_is_right_is_no_finding() -> None:
    """Two batches of one plan: the second one's is its own."""
    want = build(A29[0]).tensors
    planned = [plans.Planned(want=want, got=want), plans.Planned(want=want, got=want)]
    assert list(plans.findings(planned, 1)) == []


@pytest.mark.parametrize("make", [build, per_layer])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            replace(pages(3, 5), seq_lens=ints(8, 8)),
            "extend_lens [1], seq_lens [2] and page_table [1, 2] are not of one batch",
        ),
        (
            replace(pages(3, 5), page_table=ints(3, 5)),
            "extend_lens [1], seq_lens [1] and page_table [2] are not of one batch",
        ),
        (
            replace(batch([(3, 10), (2, 4)]), extend_lens=ints(3, 5)),
            "request 1 extends by 5 of 4 tokens",
        ),
        (
            replace(batch([(3, 10), (2, 4)]), extend_lens=ints(-1, 2)),
            "request 0 extends by -1 of 10 tokens",
        ),
        (
            replace(pages(3, 5), seq_lens=ints(9)),
            "request 0 needs 3 pages of 4 keys; its table has 2",
        ),
        (
            replace(pages(3, 5), page_size=0),
            "page_size is 0: it is a whole number, 1 or more",
        ),
        (
            replace(pages(3, 5), ratio=0),
            "ratio is 0: it is a whole number, 1 or more",
        ),
    ],
)
def test_a_batch_that_cannot_be_planned_is_refused(
    make: Planner, given: Batch, message: str
) -> None:
    """In one sentence with both values, by both ways."""
    with pytest.raises(UsageError) as raised:
        make(given)
    assert str(raised.value) == message


def test_a_planner_keeps_at_least_one_plan() -> None:
    """Fewer is a mistake."""
    with pytest.raises(UsageError) as raised:
        planner(most=0)
    assert str(raised.value) == "most is 0: it is a whole number, 1 or more"
