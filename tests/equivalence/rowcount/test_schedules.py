"""Schedules: which calls they make of a call, and which they cannot make."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivalence import generate, ops
from equivalence.case import Case
from equivalence.rowcount import schedules
from equivalence.rowcount.dispatch import EDGES, counts_of
from equivalence.rowcount.launch import Launch, launch_of
from equivalence.rowcount.schedules import LeftOut, Schedule


def launch(**changes: object) -> Launch:
    """Six rows of two requests, k 8."""
    base = Launch(
        units=6,
        next_n=1,
        visible=torch.tensor([4, 9, 0, 8, 12, 7]),
        turns=(2,),
        k=8,
        columns=16,
        heads=None,
        ordered=False,
        tables=("scores",),
        per_column="",
        cuda=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # a test names its own fields


def of(case: Case) -> Launch:
    """The launch of a case."""
    return launch_of(case, ops.find(case.op).windows(case))


def told(found: schedules.Found) -> dict[str, object]:
    """Schedules as lists of rows, the others as their reason."""
    return {
        each.name: [rows.tolist() for rows in each.calls]
        if isinstance(each, Schedule)
        else each.reason
        for each in found
    }


def test_edges_name_their_source() -> None:
    """Every edge says whose it is, what is counted and where that is known from."""
    assert {edge.of for edge in EDGES} == {"rows", "columns", "k"}
    assert all(edge.kernel and edge.source and edge.at for edge in EDGES)
    assert counts_of("rows") == [1, 32, 33, 63, 64, 65, 12288, 12289]
    assert counts_of("columns") == [8192, 16384, 16385]
    assert counts_of("k") == [-1, 0, 1]


def test_chunks_cut_rows_in_order() -> None:
    """The last chunk is what is left; sizes of a call or more are left out together."""
    assert told(schedules.chunks(launch(), [4, 1, 4, 6, 12288])) == {
        "chunks of 1 row": [[0], [1], [2], [3], [4], [5]],
        "chunks of 4 rows": [[0, 1, 2, 3], [4, 5]],
        "chunks of 6 12,288 rows": "the call has 6 rows",
    }


def test_decode_rows_come_by_whole_requests() -> None:
    """Three requests of two rows are cut between requests alone."""
    decode = launch(units=3, next_n=2, visible=torch.tensor([4, 9, 1]), turns=())
    assert told(schedules.chunks(decode, [1, 3, 5])) == {
        "chunks of 2 rows": [[0, 1], [2, 3], [4, 5]],
        "chunks of 4 rows": [[0, 1, 2, 3], [4, 5]],
    }
    assert told(schedules.boundaries(decode)) == {
        "request boundaries": "calls are of whole requests"
    }
    backward = told(schedules.permutations(decode, 0))["last row first"]
    assert backward == [[4, 5, 2, 3, 0, 1]]


def test_boundaries_are_cut_at_and_crossed() -> None:
    """One row before a boundary and one after it, a call holds rows of both requests."""
    assert told(schedules.boundaries(launch())) == {
        "cut at each request boundary": [[0, 1], [2, 3, 4, 5]],
        "cut one row before each request boundary": [[0], [1, 2, 3, 4, 5]],
        "cut one row after each request boundary": [[0, 1, 2], [3, 4, 5]],
    }
    assert told(schedules.boundaries(launch(turns=()))) == {
        "request boundaries": "all rows are of one request"
    }


def test_lengths_part_rows_at_k_and_at_column_edges() -> None:
    """The widest row of a call is at one side of an edge."""
    assert told(schedules.lengths(launch())) == {
        "rows of up to 7 columns apart": [[0, 2, 5], [1, 3, 4]],
        "rows of up to 8 columns apart": [[0, 2, 3, 5], [1, 4]],
        "rows of up to 9 columns apart": [[0, 1, 2, 3, 5], [4]],
        "rows of up to 8,192 16,384 16,385 columns apart": "all rows are on one side",
    }
    wide = launch(visible=torch.tensor([16384, 16385, 8192, 8193, 1, 20000]), k=0)
    assert told(schedules.lengths(wide)) == {
        "rows of up to 8,192 columns apart": [[2, 4], [0, 1, 3, 5]],
        "rows of up to 16,384 columns apart": [[0, 2, 3, 4], [1, 5]],
        "rows of up to 16,385 columns apart": [[0, 1, 2, 3, 4], [5]],
    }


def test_plans_are_the_engines_own_where_those_cut() -> None:
    """16,384 rows of 487,936 columns are 15 chunks of 1,100 rows in 2 GiB; else three chunks."""
    large = launch(units=16384, columns=487_936, visible=torch.full((16384,), 487_936), heads=64)
    found = {each.name: each for each in schedules.budgets(large)}
    own = found["plan v4.1 of 2.00 GiB"]
    assert isinstance(own, Schedule)
    assert [len(rows) for rows in own.calls] == [1100] * 14 + [984]
    small = told(schedules.budgets(launch()))
    assert small["plan vllm of 128 bytes"] == [[0, 1], [2, 3], [4, 5]]
    assert small["plan dsa"] == "all rows are one chunk"


def test_companions_are_alone_among_others_and_in_pairs() -> None:
    """The first row, the last, the longest, one above k, the shortest that sees anything."""
    found = told(schedules.companions(launch(), 0))
    assert found == {
        "row 0 alone": [[0]],
        "row 5 alone": [[5]],
        "row 4 alone": [[4]],
        "row 1 alone": [[1]],
        **{name: rows for name, rows in found.items() if name.endswith("among 1 other")},
        "a row among 7 others": "the call has 6 rows",
        "a row among 63 others": "the call has 6 rows",
        "row 0, then row 4": [[0, 4]],
        "row 4, then row 0": [[4, 0]],
    }
    pairs = {name: rows for name, rows in found.items() if name.endswith("among 1 other")}
    assert [name.split()[1] for name in pairs] == ["0", "5", "4", "1"]
    assert all(isinstance(rows, list) and len(rows[0]) == 2 for rows in pairs.values())


def test_rows_that_must_ascend_are_never_permuted() -> None:
    """An op with query_start_loc gets ascending rows, and says what that rules out."""
    case = tiny.qsa()
    plan = schedules.plan_of(of(case))
    assert all(bool((rows.diff() > 0).all()) for each in plan.schedules for rows in each.calls)
    reason = "query_start_loc wants them in order"
    assert LeftOut(name="rows in another order", reason=reason) in plan.left_out


def test_conditions_are_what_inputs_allow() -> None:
    """No table, no wider buffer; a value a column, no column more; no CUDA, no streams."""
    streams = "the inputs are on no CUDA device"
    assert told(schedules.conditions(launch(tables=()))) == {
        "another poison": [[0, 1, 2, 3, 4, 5]],
        "wider buffers": "no scores, mask or page table among the inputs",
        "two streams": streams,
    }
    mapped = list(schedules.conditions(of(generate.topk_pages(0, form="slot_map"))))
    assert [each.wide for each in mapped if isinstance(each, Schedule)] == ["", "stride"]
    assert "64 columns more" in [each.name for each in mapped if isinstance(each, LeftOut)]
    on_cuda = [each for each in schedules.conditions(launch(cuda=True)) if each.name[0] == "t"]
    assert [each.streams for each in on_cuda if isinstance(each, Schedule)] == [True]


def test_a_call_of_one_row_leaves_conditions_and_repeats() -> None:
    """Nothing can be cut; the reasons say so."""
    one = launch(units=1, visible=torch.tensor([9]), turns=())
    plan = schedules.plan_of(one, repeats=3)
    assert [each.name for each in plan.schedules] == [
        "call 2 of the same rows",
        "call 3 of the same rows",
        "another poison",
        "rows 64 columns further apart",
        "64 columns more",
    ]
    assert LeftOut(name="random parts", reason="there are too few rows") in plan.left_out


def test_no_rows_no_schedule() -> None:
    """An empty call cannot be made otherwise."""
    plan = schedules.plan_of(launch(units=0, visible=torch.tensor([], dtype=torch.int64), turns=()))
    assert plan.schedules == ()
    assert plan.left_out == (LeftOut(name="every schedule", reason="the call has no rows"),)


def test_many_calls_are_spread() -> None:
    """Of 1,000 calls of one row 128 are made, first and last too; all where that was asked for."""
    many = launch(units=1000, visible=torch.full((1000,), 9), turns=())
    (each,) = schedules.chunks(many, [1])
    assert isinstance(each, Schedule)
    assert (len(each.calls), each.unmade) == (128, 872)
    assert (each.calls[0].tolist(), each.calls[-1].tolist()) == ([0], [999])
    (asked,) = schedules.plan_of(many, rows=[1]).schedules
    assert (len(asked.calls), asked.unmade) == (1000, 0)


@pytest.mark.parametrize(
    "case",
    [generate.ragged_topk(0), generate.decode_indexer(0), tiny.prefill(), tiny.qsa()],
    ids=lambda case: case.op,
)
def test_given_sizes_are_all_there_is(case: Case) -> None:
    """`rows` asks for chunks of these sizes and for nothing else."""
    plan = schedules.plan_of(of(case), rows=(2, 1000))
    assert [each.name for each in plan.schedules] == ["chunks of 2 rows"]
    assert len(plan.left_out) == 1


@given(
    units=st.integers(1, 70),
    next_n=st.integers(1, 3),
    k=st.integers(0, 40),
    seed=st.integers(0, 5),
    ordered=st.booleans(),
)
def test_calls_of_a_schedule_share_no_row(
    units: int, next_n: int, k: int, seed: int, *, ordered: bool
) -> None:
    """Rows are the call's own, whole units, never empty, and no two schedules are the same."""
    random = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, 50, (units,), generator=random)
    turns = tuple(range(3, units, 5))
    some = launch(units=units, next_n=next_n, k=k, visible=visible, ordered=ordered, turns=turns)
    plan = schedules.plan_of(some, seed=seed)
    again = schedules.plan_of(some, seed=seed)
    keys = set()
    for each, other in zip(plan.schedules, again.schedules, strict=True):
        assert all(len(rows) for rows in each.calls)
        every = torch.cat(each.calls)
        assert len(set(every.tolist())) == len(every)
        assert int(every.min()) >= 0
        assert int(every.max()) < units * next_n
        assert bool((every.reshape(-1, next_n).diff() == 1).all())
        assert all(torch.equal(a, b) for a, b in zip(each.calls, other.calls, strict=True))
        parts = tuple(tuple(rows.tolist()) for rows in each.calls)
        keys.add((parts, each.poison, each.wide, each.again))
    assert len(keys) == len(plan.schedules)
    names = [each.name for each in plan.schedules]
    assert len(set(names)) == len(names)


def test_request_boundaries_come_from_the_inputs() -> None:
    """From row_to_request, from query_start_loc, or from where windows begin."""
    assert of(tiny.pages()).turns == (2,)
    assert of(tiny.qsa()).turns == (2,)
    assert of(generate.ragged_topk(0)).turns == (1, 5, 6)
    assert of(generate.decode_indexer(0)).turns == ()
