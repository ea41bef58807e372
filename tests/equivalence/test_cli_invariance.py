"""`equivalence invariance`: what it says, and how it exits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from equivalence import generate, store

Tell = Callable[..., tuple[int, str, str]]
COUNTED = "equivalence.planted.counted"
LOOSE = "order=any,ties=any"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one case of nine rows, below the working directory."""
    monkeypatch.chdir(tmp_path)
    store.save(
        replace(generate.ragged_topk(0), name="ragged"), tmp_path / "cases" / "ragged.safetensors"
    )
    return Path("cases")


def test_equal_is_three_lines_and_a_counted_sentence(folder: Path, tell: Tell) -> None:
    """The case with what ran and what did not, the whole call, the schedules; exit 0."""
    candidate = f"{COUNTED}:random_ties"
    code, out, err = tell(
        "invariance",
        folder,
        "--candidate",
        candidate,
        "--contract",
        LOOSE,
        "--rows",
        "2,5,99",
        "--seed",
        "4",
    )
    assert (code, err) == (cli_code("EQUAL"), "")
    lines = out.splitlines()
    assert lines[0] == (
        "ragged            EQUAL                 2 schedules in 7 calls; not run: chunks of 99 rows"
        " (the call has 9 rows)"
    )
    assert lines[1].startswith("  whole call      EQUAL                 raw_indices     9 rows: ")
    assert lines[2].startswith("  2 schedules     EQUAL                 raw_indices     18 rows: ")
    assert lines[4].startswith("1 case, 27 rows: all equal (")


def test_a_difference_exits_1_with_a_command_to_run_again(folder: Path, tell: Tell) -> None:
    """The smallest call is told, and the options given stand in the command."""
    options = ("--contract", LOOSE, "--rows", "1,4", "--seed", "2", "--repeats", "3")
    code, out, _ = tell("invariance", folder, "--candidate", f"{COUNTED}:_by_longest", *options)
    assert code == cli_code("DIFFERENT")
    assert "    reading   row 0 alone is right; before row 1 it is wrong\n" in out
    again = next(line for line in out.splitlines() if line.startswith("  again "))
    assert again.endswith(
        "equivalence invariance cases/ragged.safetensors"
        f" --candidate {COUNTED}:_by_longest --contract {LOOSE} --repeats 3 --rows 1,4 --seed 2"
    )


def test_json_holds_every_schedule(folder: Path, tell: Tell) -> None:
    """On stdout there is nothing else; in a file the same."""
    options = ("--candidate", f"{COUNTED}:right", "--contract", LOOSE, "--rows", "3")
    code, out, _ = tell("invariance", folder, *options, "--json", "-")
    told = json.loads(out)
    assert (code, told["status"]) == (0, "EQUAL")
    runs = [run["run"] for run in told["cases"][0]["runs"]]
    assert runs == ["whole call", "chunks of 3 rows"]
    target = folder / "out.json"
    assert tell("invariance", folder, *options, "--json", target)[0] == 0
    assert json.loads(target.read_text(encoding="utf-8"))["cases"] == told["cases"]


def test_no_schedule_is_undecided(folder: Path, tell: Tell) -> None:
    """Exit 3, and the note says why."""
    code, out, _ = tell(
        "invariance", folder, "--candidate", f"{COUNTED}:right", "--contract", LOOSE, "--rows", "9"
    )
    assert code == cli_code("UNDECIDED")
    assert "no schedule ran; not run: chunks of 9 rows (the call has 9 rows)" in out


def test_a_bad_file_is_undecided_and_its_neighbour_called(folder: Path, tell: Tell) -> None:
    """What cannot be read is told as a case of its own."""
    (folder / "bad.safetensors").write_bytes((folder / "ragged.safetensors").read_bytes()[:-9])
    code, out, _ = tell(
        "invariance", folder, "--candidate", f"{COUNTED}:right", "--contract", LOOSE, "--rows", "3"
    )
    assert code == cli_code("UNDECIDED")
    assert out.startswith("bad               UNDECIDED             invalid-record: ")
    assert "1 equal, 0 different" in out


def test_only_cases_of_an_op(folder: Path, tell: Tell) -> None:
    """`--op` leaves the others out."""
    tiny.put(folder, tiny.prefill())
    options = ("--candidate", f"{COUNTED}:right", "--contract", LOOSE, "--rows", "3")
    assert tell("invariance", folder, *options, "--op", "ragged_topk")[0] == 0
    code, _, err = tell("invariance", folder, *options, "--op", "decode_indexer")
    assert (code, err) == (2, "equivalence: no case of op decode_indexer in cases\n")


def test_a_run_without_a_choice_proves_nothing(tmp_path: Path, tell: Tell) -> None:
    """Where every window fits into k, no schedule could have lost a winner."""
    tiny.put(tmp_path, tiny.topk(params={"k": 40}, recorded=()))
    code, out, err = tell(
        "invariance", tmp_path, "--candidate", "bad_candidates:right", "--rows", "2"
    )
    assert (code, err) == (cli_code("UNDECIDED"), "")
    assert "no power: no row of raw_indices had a choice to get wrong; 1 schedule in 2 calls" in out


USAGE = {
    "--candidate bad_candidates:right nowhere": "nowhere does not exist",
    "--candidate bad_candidates:right .gone": ".gone does not exist",
    "--candidate bad_candidates:f cases": "candidate 'bad_candidates:f': module",
    "cases": "Missing option '--candidate'.",
    "--candidate bad_candidates:right": "Missing argument 'PATH...'.",
    "--candidate bad_candidates:right cases --contract ties=some": "ties cannot be 'some'; it is",
    "--candidate bad_candidates:right cases --rows 1,x": "--rows 1,x: it is ",
    "--candidate bad_candidates:right cases --rows 0,4": "--rows 0,4: a chunk has 1 row or more",
    "--candidate bad_candidates:right cases --repeats 0": "Invalid value for '--repeats': 0",
    "--candidate bad_candidates:right cases --device meta": "device 'meta': ",
    "--candidate bad_candidates:right cases --json no/out": "--json no/out: there is no folder no",
}


@pytest.mark.parametrize("line", USAGE)
def test_wrong_use_is_one_sentence(line: str, folder: Path, tell: Tell) -> None:
    """Exit 2 before anything is called."""
    assert folder.is_dir()
    code, out, err = tell("invariance", *line.split())
    assert (code, out) == (cli_code("USAGE"), "")
    assert err.startswith(f"equivalence: {USAGE[line]}")
    assert err.count("\n") == 1


def cli_code(name: str) -> int:
    """The exit code of this name."""
    return {"EQUAL": 0, "DIFFERENT": 1, "USAGE": 2, "UNDECIDED": 3}[name]
