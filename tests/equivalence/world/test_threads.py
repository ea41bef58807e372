"""Ranks as threads: the same hand as ranks in processes, and one error that names who is gone."""

import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import receipt
from equivalence.errors import UsageError
from equivalence.world.link import Link
from equivalence.world.threads import Threads, run
from equivalence.world.transport import TIMEOUT


def alike(link: Link, *, given: Tensor, more: int) -> dict[str, Tensor]:
    """Sums, the least number, and what the left neighbour exported."""
    receipt.leave("alike", rows=link.rank)
    total = given.clone() + link.rank
    link.all_reduce(total)
    parts = link.export("word", (2, 3))
    parts[link.rank].fill_(link.rank + more)
    link.barrier()
    left = parts[(link.rank - 1) % link.ranks].clone()
    least = link.agree(10 - link.rank)
    return {"total": total, "left": left, "least": torch.tensor(least)}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_add_up_agree_and_read_each_other(ranks: int) -> None:
    """Each has an outcome, and the receipts that it left."""
    outcomes = run(ranks, alike, inputs={"given": torch.tensor([1, 2])}, more=7)
    for rank, outcome in enumerate(outcomes):
        extra = sum(range(ranks))
        assert outcome.outputs["total"].tolist() == [ranks + extra, 2 * ranks + extra]
        assert outcome.outputs["least"].item() == 10 - (ranks - 1)
        assert set(outcome.outputs["left"].flatten().tolist()) == {(rank - 1) % ranks + 7}
        assert [(path.kernel, path.rows) for path in outcome.paths] == [("alike", (rank,))]


def test_bytes_add_up_as_bytes() -> None:
    """Two ranks of 200 make 144."""
    outcomes = run(2, lambda link: link.all_reduce(BYTES[link.rank]))
    assert [outcome.rule for outcome in outcomes] == ["", ""]
    assert [part.tolist() for part in BYTES] == [[144, 3], [144, 3]]


BYTES = [torch.tensor([200, 1], dtype=torch.uint8), torch.tensor([200, 2], dtype=torch.uint8)]


def kept(link: Link, *, wide: int) -> Tensor:
    """One more than the memory of that name held."""
    own = link.export("kept", (1, wide))[link.rank]
    own += 1
    return own.clone()


def test_memory_lasts_as_long_as_the_ranks() -> None:
    """The same name and shape is the same memory, another shape replaces it with zeros."""
    pool = Threads(2)
    told = [pool.run(kept, wide=wide)[1].outputs["result"].tolist() for wide in (2, 2, 3, 2)]
    assert told == [[[1, 1]], [[2, 2]], [[1, 1, 1]], [[1, 1]]]
    assert run(2, kept, wide=2)[1].outputs["result"].tolist() == [[1, 1]]


def ends(link: Link, *, how: str) -> None:
    """Rank 1 does not come to the second barrier."""
    link.barrier()
    if link.rank == 1:
        if how == "raises":
            raise KeyError("mine")
        if how == "exits":
            raise SystemExit
        if how == "returns":
            return
        time.sleep(2)
    link.barrier()


@pytest.mark.parametrize(
    ("how", "rule", "says"),
    [
        ("raises", "crash", "rank 1 raised KeyError: 'mine'"),
        ("exits", "crash", "rank 1 raised SystemExit: no message"),
        (
            "returns",
            "timeout",
            "rank 1 ended without barrier 2, where rank [02] waits: it has done 1",
        ),
        ("sleeps", "timeout", "rank 1 did not reach barrier 2 within 1 s: it has done 1"),
    ],
)
def test_a_rank_that_does_not_come_is_named_by_all(how: str, rule: str, says: str) -> None:
    """As soon as it is gone, or when time is over."""
    began = time.monotonic()
    outcomes = run(3, ends, timeout=1 if how == "sleeps" else None, how=how)
    assert time.monotonic() - began < TIMEOUT / 3
    for rank in (0, 2):
        assert outcomes[rank].rule == rule
        assert re.match(says, outcomes[rank].message)
        if rule == "crash":
            assert outcomes[rank].message.endswith("; this rank waited in barrier 2")
            assert outcomes[1].message == says
    assert [outcome.rank for outcome in outcomes] == [1] * 3


def test_a_call_after_a_failed_one_begins_anew() -> None:
    """No round of the old one is left, and no memory."""
    pool = Threads(3, timeout=5)
    assert pool.run(kept, wide=2)[0].outputs["result"].tolist() == [[1, 1]]
    assert pool.run(ends, how="raises")[0].rule == "crash"
    assert [outcome.rule for outcome in pool.run(ends, how="stays")] == [""] * 3
    assert pool.run(kept, wide=2)[0].outputs["result"].tolist() == [[1, 1]]


def strange(link: Link, *, what: str) -> object:
    """Something that is refused as ranks that are processes refuse it."""
    if what == "names":
        link.export(f"name {link.rank}", (1,))
    if what == "shapes":
        link.export("name", (1 + link.rank,))
    return [1]


@pytest.mark.parametrize(
    ("what", "rule", "says"),
    [
        (
            "names",
            "crash",
            "rank 0 raised UsageError: ranks exchange different things: rank 0 'export name 0'",
        ),
        (
            "shapes",
            "crash",
            "rank 0 raised UsageError: rank 0 exports 'name' as [1], rank 1 as [2]: every rank",
        ),
        (
            "result",
            "not-compared",
            "rank 0 failed: the function returned list: it returns tensors by name",
        ),
    ],
)
def test_what_processes_refuse_threads_refuse(what: str, rule: str, says: str) -> None:
    """By the same rules and sentences."""
    outcome = run(2, strange, what=what)[0]  # type: ignore[arg-type]  # it returns no tensor
    assert outcome.rule == rule
    assert outcome.message.startswith(says)


def unequal(link: Link, **_: Any) -> None:  # noqa: ANN401 - it takes none
    """Tensors of two sizes."""
    link.all_reduce(torch.zeros(2 + (link.rank == 1)))


def test_a_sum_of_two_sizes_is_refused_on_every_rank() -> None:
    """By both sizes."""
    outcomes = run(2, unequal)
    says = "ValueError: tensors of [2] and [3] are added up"
    assert [o.message for o in outcomes] == [f"rank {rank} raised {says}" for rank in (0, 1)]


def apart(link: Link, *, how: str) -> None:
    """Rank 1 does something else where the others add up."""
    if link.rank == 1:
        (link.barrier if how == "barrier" else partial(link.agree, 1))()
    else:
        link.all_reduce(torch.zeros(2))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "agree",
            "rank 0 raised ValueError: rank 1 adds nothing up in this round: it does another thing",
        ),
        (
            "barrier",
            "rank 1 did not reach collective 1 within 0.2 s: it has done 0 and is in barrier 1",
        ),
    ],
)
def test_what_is_no_sum_is_not_added(how: str, says: str) -> None:
    """The rank that does something else is named."""
    assert run(3, apart, timeout=0.2, how=how)[0].message.startswith(says)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_there_are_1_to_64_threads(count: int) -> None:
    """Whatever a case says."""
    with pytest.raises(UsageError, match=f"{count} ranks as threads: there are 1 to 64"):
        Threads(count)


def busy(link: Link, *, turns: int) -> Tensor:
    """Each round reads what all have written in it, with another rank late each time."""
    parts = link.export("round", (2, 1))
    wrong = 0
    for turn in range(turns):
        if turn % link.ranks == link.rank:
            time.sleep(0.001)
        parts[link.rank][turn % 2] = turn % 256
        link.barrier()
        wrong += sum(int(part[turn % 2]) != turn % 256 for part in parts)
    return torch.tensor(wrong)


def test_two_hundred_rounds_with_a_late_writer_each() -> None:
    """No reader sees a byte of another round."""
    outcomes = run(4, busy, turns=200)
    assert [int(outcome.outputs["result"]) for outcome in outcomes] == [0] * 4
