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

from equivalence import generate, store
from equivalence.compose import requests, steps
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


@pytest.mark.parametrize(
    ("way", "fault", "why"),
    [
        ("direct", "address-key", "it needs a second step whose batch has the same shapes"),
        ("direct", "killed-inside,turn=999", "it needs a step that comes to round 999"),
        ("direct", "offset-wrap,wrap_bits=40", "it needs a prefix page at byte 2**39 of its pool"),
        ("staging", "half-reused", "it needs one kind: a barrier of another one hides it"),
    ],
)
def test_a_fault_that_these_steps_hide_is_undecided(
    tell: Tell, way: str, fault: str, why: str
) -> None:
    """Nothing could have been wrong: 3, and what is missing is told, also as data."""
    asked = ("compose", "--scenarios", "chunk", "--ways", way, *TINY, "--fault", fault)
    code, out, err = tell(*asked)
    note = f"{fault.split(',', maxsplit=1)[0]} changed nothing in these steps: {why}"
    assert (code, err) == (3, "")
    last = out.splitlines()[-1]
    assert f": undecided, {note}" in last
    assert (last.endswith(f"; injected: {fault}"), "all equal" in out) == (True, False)
    code, out, err = tell(*asked, "--json", "-")
    data = json.loads(out)
    assert (code, err, data["status"]) == (3, "", "UNDECIDED")
    assert data["note"].startswith(note)


def test_a_fault_needs_what_it_misses_alone(tell: Tell) -> None:
    """A need that is met is not told; one rank has nobody else to be wrong for."""
    one = (*TINY[2:], "--ranks", 1, "--scenarios", "chunk", "--ways", "direct")
    code, out, _ = tell("compose", *one, "--fault", "wrong-owner")
    assert code == 3
    assert "undecided, wrong-owner changed nothing in these steps: it needs cp is 2 or more;" in out


def test_what_may_happen_is_equal(tell: Tell) -> None:
    """A late rank is no fault: there is nothing to find."""
    asked = ("compose", "--scenarios", "chunk", "--ways", "direct", *TINY)
    code, out, err = tell(*asked, "--fault", "producer-delay,delay=0")
    assert (code, err) == (0, "")
    assert "all equal; 0 undecided; injected: producer-delay,delay=0" in out


def test_all_may_be_said_of_kinds_and_among_names(tell: Tell) -> None:
    """As of ways and scenarios."""
    asked = ("compose", "--ways", "direct", "--layers", 1, "--scale", 64, "--transport", "threads")
    some = (*asked, "--ranks", 2, "--kinds", "all", "--scenarios", "all,cold", "--json", "-")
    code, out, err = tell(*some)
    assert (code, err) == (0, "")
    assert [cell["scenario"] for cell in json.loads(out)["cells"]] == list(requests.NAMES)


def test_a_closed_stdout_is_our_failure() -> None:
    """4, one sentence, and no rank is started for nobody."""
    program = shlex.join([sys.executable, "-m", "equivalence", "compose", *JOINED, "--ranks", "2"])
    done = subprocess.run(  # noqa: S602 - our own program, its output closed by a shell
        f"{program} >&-", shell=True, capture_output=True, text=True, check=False, timeout=120
    )
    closed = "equivalence: stdout is closed: there is nowhere to print results\n"
    assert (done.returncode, done.stderr) == (4, closed)


def test_a_closed_stderr_changes_nothing() -> None:
    """Nor do the ranks' own memory and files take its number."""
    program = shlex.join([sys.executable, "-m", "equivalence", "compose", *JOINED, "--ranks", "2"])
    done = subprocess.run(  # noqa: S602 - our own program, its output closed by a shell
        f"{program} 2>&-", shell=True, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "all equal; 0 undecided" in done.stdout


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
        (("--transport", "foo"), "transport is 'foo': it is shm, cuda, symmetric or threads\n"),
        (("--device", ""), "device is '': it is cpu, cuda, or one as in cuda:0\n"),
        (("--ways", "all,foo"), "no way is named 'foo': there are legacy, "),
        (("--scenarios", "foo,all"), "no scenario is named 'foo': there are cold, "),
        (("--fault", "row-zero,rank=2,rank=3"), "row-zero,rank=2,rank=3: rank is named twice\n"),
        (("--layers", "100000000"), "'--layers': 100000000 is not in the range 1<=x<=1024.\n"),
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
        (("--device", "cuda:0"), "transport shm is memory of the CPU; device is cuda:0"),
        (("--device", "foo"), "device is 'foo': it is cpu, cuda, or one as in cuda:0"),
        (("--transport", "threads", "--device", "cuda"), "transport threads is memory of the CPU"),
        (("--fault", "row-zero,rank=9"), "row-zero: rank is 9; rank is 0 to 7, turn 0 or more"),
        (("--fault", "row-zero,rank=-1"), "fault row-zero: rank is -1; rank is 0 to the last"),
        (("--fault", "row-zero,turn=-1"), "fault row-zero: turn is -1; "),
        (("--fault", "producer-delay,delay=-1"), "fault producer-delay: delay is -1.0; "),
        (("--fault", "producer-delay,delay=nan"), "fault producer-delay: delay is nan; "),
        (("--fault", "producer-delay,delay=31"), "delay is 31.0; rank is 0 to 7, turn 0 or more, "),
        (("--fault", "offset-wrap,wrap_bits=-3"), "wrap_bits is -3; rank is 0 to the last rank, "),
        (("--fault", "offset-wrap,wrap_bits=200"), "0 to 86400 seconds, wrap_bits 0 to 63"),
        (("--timeout", "1e30"), "Invalid value for '--timeout': 1e+30 is not in the range 0<x<="),
        (("--timeout", "nan"), "timeout is nan: it is a number of seconds above 0"),
        (("--seed", "99999999999999999999999"), "is not in the range 0<=x<=9223372036854775807."),
    ],
)
def test_what_cannot_be_is_refused(tell: Tell, asked: tuple[str, ...], sentence: str) -> None:
    """2, one line, with what exists."""
    code, out, err = tell("compose", *asked)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("transport", ["cuda", "symmetric"])
def test_a_transport_without_its_device_is_refused(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Before any rank is started."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = tell("compose", "--transport", transport)
    assert (code, out) == (2, "")
    assert err == f"equivalence: transport {transport} needs a CUDA device; torch finds none\n"


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
def test_joined_ranks_exit_alike(tell: Tell) -> None:
    """With the code of the first, which alone judges and tells what runs as many ranks again."""
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
    (again, *_) = (line for line in printed[0].splitlines() if "  again " in line)
    words = shlex.split(again.split(maxsplit=1)[1])
    assert ("--ranks", "2") in set(pairwise(words))
    code, out, _ = tell(*words[1:])
    assert (code, "2 ranks (shm), 1 way, 1 scenario: " in out) == (1, True)


def test_more_ranks_than_torchrun_has_are_refused(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number stands."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    code, _, err = tell("compose", "--ranks", 4)
    assert code == 2
    assert "torchrun has 2 ranks; --ranks is 4" in err


def test_threads_are_not_under_torchrun(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are processes."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    sentence = "equivalence: transport threads: they are of one process, not under torchrun\n"
    assert tell("compose", "--transport", "threads") == (2, "", sentence)


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
