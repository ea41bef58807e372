"""Ranks that torchrun started find each other and run as those of a pool do."""

import ast
import json
import os
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import rank_calls
from torch._C._distributed_c10d import HashStore

from equivalence import ranks
from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import joined, meeting, processes
from equivalence.world.transport import Released

pytestmark = pytest.mark.xdist_group("ranks")
ROOT = Path(__file__).parents[3]
_NOBODY = 1 << 22
"""No process has this number: Linux counts up to it."""

_SCRIPT = """
import json, sys, time
import rank_calls
import torch
from equivalence import ranks
from equivalence.errors import UsageError

def told(outcomes):
    return [[o.rule, o.message, {n: t.tolist() for n, t in o.outputs.items()}] for o in outcomes]

if __name__ == "__main__":
    found = {}
    with ranks.joined(timeout=1.5) as pool:
        given = torch.tensor([5])
        found["numbers"] = told(pool.run(rank_calls.numbers, inputs={"x": given}, timeout=30))
        odd = torch.tensor([2], dtype=torch.uint8).view(torch.bool)
        made = pool.run(rank_calls.odd_bools, inputs={"x": odd})
        found["odd"] = [[int(t.view(torch.uint8)) for t in o.outputs.values()] for o in made]
        found["given"] = given.tolist()
        time.sleep(0 if pool.rank else 3)  # as one that judges what it was given
        found["rounds"] = told(pool.run(rank_calls.rounds, count=20, delay=0.01))
        found["sums"] = told(pool.run(rank_calls.collectives))
        found["raises"] = told(pool.run(rank_calls.stumbles, rank=1, how="raises"))
        found["again"] = told(pool.run(rank_calls.collectives))
        found["otherwise"] = ""
        try:
            pool.run(rank_calls.nothing if pool.rank else rank_calls.mode)
        except UsageError as error:
            found["otherwise"] = str(error)
        found["apart"] = told(pool.run(rank_calls.exports_apart))
        code = pool.tell(5 if pool.rank == 0 else 99)
        found["skips"] = told(pool.run(rank_calls.stumbles, rank=1, how="skips"))
        found["after"] = told(pool.run(rank_calls.collectives))
        found["naps"] = told(pool.run(rank_calls.stumbles, rank=1, how="naps"))
        found["lost"] = told(pool.run(rank_calls.nothing))
    with open(f"{sys.argv[1]}/{pool.rank}.json", "w") as file:
        json.dump(found | {"code": code, "ranks": pool.ranks}, file)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks of torchrun saw."""
    folder = tmp_path_factory.mktemp("joined")
    path = folder / "joined_script.py"
    path.write_text(_SCRIPT)
    where = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-m", *command, str(path), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_has_all_outcomes(found: list[dict[str, Any]]) -> None:
    """Both ranks see both, and keep their inputs."""
    for each in found:
        assert each["ranks"] == 2
        assert [outcome[:2] for outcome in each["numbers"]] == [["", ""]] * 2
        assert [outcome[2]["x"] for outcome in each["numbers"]] == [[5], [6]]
        assert each["given"] == [5]
        assert each["odd"] == [[2, 1], [2, 2]]
        assert [outcome[2]["wrong"] for outcome in each["rounds"]] == [[0, 0]] * 2
        for outcome in each["sums"] + each["again"]:
            assert outcome[2]["u8"] == [200] * 5
            assert outcome[2]["least"] == 9


def test_ranks_end_with_the_code_of_rank_0(found: list[dict[str, Any]]) -> None:
    """`tell` gives its value to all."""
    assert [each["code"] for each in found] == [5, 5]


def test_a_rank_that_raises_is_named_to_all(found: list[dict[str, Any]]) -> None:
    """The other one is released, and both run on."""
    for each in found:
        first, second = each["raises"]
        assert first[0] == second[0] == "crash"
        assert second[1].startswith("rank 1 raised ValueError: no such page (rank_calls.py:")
        assert first[1] == f"{second[1]}; this rank waited in barrier 2"


def test_ranks_that_run_different_things_are_told(found: list[dict[str, Any]]) -> None:
    """Another function and another name exchanged are refused on both."""
    for each in found:
        assert "rank_calls.mode" in each["otherwise"]
        assert each["otherwise"].endswith("every rank runs the same")
        for rank, outcome in enumerate(each["apart"]):
            says = f"rank {rank} raised UsageError: ranks exchange different things"
            assert outcome[1].startswith(says)


def test_a_rank_that_stays_away_is_named(found: list[dict[str, Any]]) -> None:
    """Within the time limit; who is there goes on, and nothing runs once a rank is lost."""
    sentence = "rank 1 did not reach barrier 2 within 1.5 s: it has done 1"
    for each in found:
        assert [outcome[:2] for outcome in each["skips"]] == [["timeout", sentence]] * 2
        assert [outcome[2]["u8"] for outcome in each["after"]] == [[200] * 5] * 2
        assert [outcome[0] for outcome in each["naps"] + each["lost"]] == ["timeout"] * 4
    assert [outcome[1] for outcome in found[0]["naps"]] == [sentence] * 2


_ALONE = """
import os, signal, sys, time
import torch
from equivalence import ranks

def meets(link, *, dies):
    link.barrier()
    if link.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    link.barrier()

if __name__ == "__main__":
    with ranks.joined(timeout=120) as pool:
        print([o.rule for o in pool.run(meets, dies=-1)], flush=True)
        if sys.argv[1] == "in a run":
            print([(o.rule, o.message, o.rank) for o in pool.run(meets, dies=1)])
        elif time.sleep(0.5) or pool.rank == (sys.argv[1] == "between"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif pool.rank:
            try:
                pool.tell(0)
            except RuntimeError as error:
                print(type(error).__name__, error)
        print([(o.rule, o.message, o.rank) for o in pool.run(meets, dies=-1)])
        print([(o.rule, o.message, o.rank) for o in pool.run(meets, dies=-1)])
"""
_ENDED = [("crash", "rank 1 has ended while others waited", 1)] * 2


@pytest.mark.parametrize("when", ["in a run", "between", "with the store"])
def test_a_rank_that_dies_is_named_at_once(when: str, tmp_path: Path) -> None:
    """By no launcher: ranks see it themselves, and where the store went with it they say that."""
    path = tmp_path / "alone.py"
    path.write_text(_ALONE)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    given = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(  # noqa: S603 - our own interpreter and script
            [sys.executable, str(path), when],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | given | {"WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=100) for process in processes]
    lives = 1 if when == "with the store" else 0
    assert [process.returncode for process in processes] == [-9 * lives, -9 * (1 - lives)]
    assert time.monotonic() - began < 100
    lines = printed[lives][0].splitlines()
    assert lines[0] == str(["", ""])
    assert "Traceback" not in printed[lives][1]
    if lives:
        assert lines[1].startswith("Gone ")
        (rule, message, _), other = ast.literal_eval(lines[2])
        assert (rule, message) == other[:2]
        assert rule == "crash"
        assert message.startswith("the store through which ranks meet does not answer any more: ")
    else:
        assert [ast.literal_eval(line) for line in lines[1:]] == [_ENDED] * len(lines[1:])
    assert len(lines) == (3 if when == "between" else 4)
    assert lines[-2] == lines[-1]


@pytest.mark.parametrize(
    ("alive", "lost"),
    [
        ([2], Outcome(rule="crash", message="rank 1 has ended while others waited", rank=1)),
        ([1, 2], Outcome(rule="timeout", message="another rank has left")),
    ],
)
def test_a_rank_that_ended_the_world_is_named_where_it_is_gone(
    alive: list[int], lost: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever noticed it first has released the others."""

    def released(_: object) -> None:
        raise Released

    store = HashStore()
    for rank in range(3):
        processes.tell(store, rank)
    store.set("equivalence/pid/1", str(os.getpid() if 1 in alive else _NOBODY))
    member = meeting.Member(
        rank=0,
        ranks=3,
        transport="shm",
        device=None,
        timeout=1,
        store=store,
        serial=count(),
        watched=processes.watch(store, [1, 2]),
    )
    monkeypatch.setattr(meeting, "world", released)
    made = joined.run(member, rank_calls.nothing, inputs={}, timeout=1, settings={})
    processes.leave(member.watched)
    assert made == [lost] * 3


_GIVEN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": None}, "RANK is not set: ranks that join are started by torchrun"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "2 of 4 ranks are on this machine"),
        ({"RANK": "x"}, "RANK is 'x': it is a number from 0 to 0"),
        ({"RANK": "-1"}, "RANK is '-1': it is a number from 0 to 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2': it is a number from 0 to 1"),
        ({"WORLD_SIZE": "99"}, "WORLD_SIZE is '99': it is a number from 1 to 64"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': it is a number from 1 to 64"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000': it is a number from 1 to 65535"),
    ],
)
def test_an_environment_of_no_rank_is_refused(
    given: dict[str, str | None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable, or what its value lacks."""
    for name, value in (_GIVEN | given).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught, ranks.joined():
        pass
    assert str(caught.value).startswith(told)


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the store said."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in (_GIVEN | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"no store at localhost:{port}: "), ranks.joined():
            pass
