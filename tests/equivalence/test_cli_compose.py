"""`equivalence compose`: what it says, where it says it, and how it exits."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from equivalence import cli, generate, store
from equivalence.compose import steps
from equivalence.paths.ipc.faulty import FAULTS
from equivalence.paths.ipc.ways import WAYS

Tell = Callable[..., tuple[int, str, str]]

TINY = ("--ranks", 2, "--layers", 2, "--scale", 16, "--transport", "threads")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_every_way_is_a_line_and_the_whole_a_sentence(tell: Tell) -> None:
    """Equal is 0."""
    code, out, err = tell("compose", "--scenarios", "cold,bs-1-4", *TINY)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines[:14]] == [
        [name, way, "EQUAL"] for name in ("cold", "bs-1-4") for way in WAYS
    ]
    assert lines[0] == "cold    legacy    EQUAL      3 steps, 96 pages"
    head = "2 ranks (threads), 7 ways, 2 scenarios"
    assert lines[14:] == [
        "",
        f"{head}: 49 compositions of 1,568 pages, 37.7 MiB: all equal; 0 undecided",
    ]


def test_processes_are_the_default(tell: Tell) -> None:
    """Over shared memory, one kind."""
    code, out, _ = tell(
        *("compose", "--scenarios", "chunk", "--ways", "direct", "--kinds", "index"),
        *("--ranks", 2, "--layers", 1, "--scale", 16),
    )
    assert code == 0
    assert "2 ranks (shm), 1 way, 1 scenario: 3 compositions" in out


def test_a_fault_is_told_with_the_command_that_shows_it_again(tell: Tell) -> None:
    """Different is 1, only ways that have its place run, and the report says what was injected."""
    asked = ("--scenarios", "chunk", *TINY, "--fault", "row-zero", "--seed", 5)
    code, out, err = tell("compose", *asked)
    assert (code, err) == (1, "")
    ran = [line.split()[1] for line in out.splitlines() if line.startswith("chunk  ")]
    assert tuple(ran) == FAULTS["row-zero"].ways
    assert "pages differ (" in out
    assert out.splitlines()[-1].endswith("0 undecided; injected: row-zero")
    (again, *_) = (line.split(maxsplit=1)[1] for line in out.splitlines() if "  again " in line)
    words = shlex.split(again)
    assert words[:2] == ["equivalence", "compose"]
    assert ("--ways", ran[0]) in set(pairwise(words))
    second = tell(*words[1:])
    assert second[0] == 1
    assert second[1].split("\n\n")[1:-1] == out.split("\n\n")[1 : len(second[1].split("\n\n")) - 1]


def test_a_rank_that_fails_is_undecided(tell: Tell) -> None:
    """3, with the step, the rule and the rank; a rank and numbers of the fault may be named."""
    code, out, _ = tell(
        *("compose", "--scenarios", "chunk", "--ways", "staging", "--timeout", 5, *TINY),
        *("--fault", "another-size,rank=1,delay=0.5"),
    )
    assert code == 3
    assert "chunk  staging   UNDECIDED  step 1 of 3: crash: rank " in out
    assert "injected: another-size,rank=1,delay=0.5" in out


def test_a_fault_that_these_steps_hide_is_told(tell: Tell) -> None:
    """It was injected and nothing shows: why is said, and the steps are equal."""
    asked = ("compose", "--scenarios", "chunk", "--ways", "direct", *TINY)
    code, out, err = tell(*asked, "--fault", "address-key")
    assert (code, "injected: address-key" in out) == (0, True)
    assert err == (
        "equivalence: address-key did not show in these steps: it needs a second step whose "
        "batch has the same shapes and other contents\n"
    )
    assert tell(*asked, "--fault", "producer-delay,delay=0")[2] == ""


def test_case_files_are_replayed_over_ranks(tell: Tell, tmp_path: Path) -> None:
    """As many as a case has; a folder of other ops beside it is no matter."""
    made = steps.sequence("mixed", cp=3, layers=1, scale=16)
    for case in made:
        store.save(case, tmp_path / f"{case.name}.safetensors")
    store.save(generate.ragged_topk(0), tmp_path / "other.safetensors")
    code, out, err = tell("compose", tmp_path, "--ways", "dense", "--transport", "threads")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[:3]] == [
        [case.name, "dense", "EQUAL"] for case in made
    ]
    assert "3 ranks (threads), 1 way, 3 scenarios: 3 compositions" in out


def test_a_case_that_fails_is_run_again_by_its_path(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that may not be composed is refused before any rank hears of it."""
    monkeypatch.chdir(tmp_path)
    case = steps.sequence("chunk", cp=2, layers=1, kinds=("index",), scale=16)[0]
    writer = case.inputs["writer"].clone()
    writer[0] = 1 - writer[0]
    twice = replace(case, inputs={**case.inputs, "writer": writer}, name="twice")
    store.save(twice, tmp_path / "twice.safetensors")
    code, out, _ = tell("compose", "twice.safetensors", "--ways", "fused")
    assert code == 1
    assert "two-writers" in out
    assert "equivalence compose twice.safetensors --ways fused" in out


def test_json_is_sorted_and_says_the_same_twice(tell: Tell, tmp_path: Path) -> None:
    """Whole verdicts where a step is not equal, and no times."""
    asked = ("compose", "--scenarios", "cold", "--ways", "direct", *TINY)
    first, second = (tell(*asked, "--json", "-") for _ in range(2))
    assert first == second
    data = json.loads(first[1])
    assert (data["schema"], data["kind"], data["status"]) == (1, "compose", "EQUAL")
    assert (data["ranks"], data["transport"], data["fault"]) == (2, "threads", None)
    assert data["settings"] == {
        "scenarios": "cold",
        "layers": "2",
        "kinds": "token,index",
        "seed": "0",
        "scale": "16",
    }
    (cell,) = data["cells"]
    assert (cell["way"], cell["scenario"], cell["status"]) == ("direct", "cold", "EQUAL")
    assert [step["verdict"] for step in cell["steps"]] == [None] * 3
    assert first[1] == json.dumps(data, indent=1, sort_keys=True) + "\n"

    target = tmp_path / "out.json"
    chunk = ("compose", "--scenarios", "chunk", "--ways", "direct", *TINY)
    assert tell(*chunk, "--fault", "wrong-owner", "--json", target)[0] == 1
    data = json.loads(target.read_text(encoding="utf-8"))
    assert (data["status"], data["fault"]) == ("DIFFERENT", "wrong-owner")
    step = data["cells"][0]["steps"][0]
    assert step["rules"]
    assert step["verdict"]["status"] == "DIFFERENT"
    assert step["verdict"]["findings"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--ways", "legcy"), "no way is named 'legcy': there are legacy, fused, "),
        (("--ways", ","), "no way is named at all: there are legacy, "),
        (("--scenarios", "warm"), "no scenario is named 'warm': there are cold, chunk, "),
        (("--kinds", "page"), "no kind is named 'page': there are token, index"),
        (("--transport", "carrier"), "transport is 'carrier': it is "),
        (("--fault", "gremlin"), "no fault is named 'gremlin': there are producer-delay, "),
        (("--fault", "row-zero,size=3"), "fault row-zero,size=3: 'size' is none of rank, "),
        (("--fault", "row-zero,rank=x"), "fault row-zero,rank=x: rank is 'x', no number"),
        (
            ("--fault", "row-zero", "--ways", "legacy"),
            "row-zero has no place in legacy: it is one of staging, direct, prefetch",
        ),
        (("--json", "case.safetensors"), "--json case.safetensors: that name is a case's"),
        (("--ranks", "0"), "Invalid value for '--ranks': 0 is not in the range x>=1."),
        (("nowhere",), "nowhere"),
    ],
)
def test_what_cannot_be_is_refused(tell: Tell, asked: tuple[str, ...], sentence: str) -> None:
    """2, one line, with what exists."""
    code, out, err = tell("compose", *asked)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_options_that_contradict_case_files_are_refused(tell: Tell, tmp_path: Path) -> None:
    """Cases have their own steps and ranks, and those of one number run at a time."""
    for cp in (2, 3):
        (case, *_) = steps.sequence("cold", cp=cp, layers=1, kinds=("index",), scale=64)
        store.save(case, tmp_path / f"{cp}.safetensors")
    two = tmp_path / "2.safetensors"
    for asked, sentence in (
        ((two, "--seed", 1, "--scale", 2), "--seed and --scale: these make steps, and case files"),
        ((two, "--ranks", 3), "the cases are of 2 ranks; --ranks is 3"),
        ((tmp_path,), "the cases are of 2 and 3 ranks: name those of one number at a time"),
    ):
        code, out, err = tell("compose", *asked)
        assert (code, out) == (2, "")
        assert sentence in err


def test_help_names_every_option() -> None:
    """A user finds them."""
    printed = CliRunner().invoke(cli.command, ["compose", "--help"]).output
    for option in ("ranks", "ways", "scenarios", "layers", "kinds", "transport", "fault", "json"):
        assert f"--{option}" in printed


JOINED = ("--scenarios", "chunk", "--ways", "direct", "--layers", "2", "--scale", "16")


@pytest.mark.xdist_group("ranks")
def test_ranks_of_torchrun_are_taken() -> None:
    """The first of them prints."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(  # noqa: S603 - our own interpreter and program
        [*program, "-m", "equivalence", "compose", *JOINED],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.count("2 ranks (shm), 1 way, 1 scenario: 3 compositions") == 1


@pytest.mark.xdist_group("ranks")
def test_joined_ranks_exit_alike() -> None:
    """With the code of the first, which alone judges."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-m", "equivalence", "compose", *JOINED, "--fault", "row-zero"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | place | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert ["injected: row-zero" in text for text in printed] == [True, False]
    assert printed[1] == ""


def test_more_ranks_than_torchrun_has_are_refused(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number stands."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    code, _, err = tell("compose", "--ranks", 4)
    assert code == 2
    assert "torchrun has 2 ranks; --ranks is 4" in err


@pytest.mark.parametrize("count", ["two", "-1", "0", "", "\u00b2"])
def test_an_environment_that_says_no_number_of_ranks_is_refused(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    """One sentence, and no rank is waited for."""
    for name, value in {**TORCHRUN, "WORLD_SIZE": count}.items():
        monkeypatch.setenv(name, value)
    code, out, err = tell("compose")
    assert (code, out) == (2, "")
    assert f"WORLD_SIZE is {count!r}: it is the number of ranks" in err
