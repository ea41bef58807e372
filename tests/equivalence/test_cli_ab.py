"""`equivalence ab`: what it says, where it says it, and how it exits."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tied
import tiny

Tell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of four layer-forwards and one of two ops."""
    monkeypatch.chdir(tmp_path)
    for case in tied.forwards(4):
        tiny.put(tmp_path / "cases", case)
    tiny.put(tmp_path / "both", tiny.topk("one"))
    tiny.put(tmp_path / "both", tiny.prefill())
    return tmp_path


ARMS = ("--original", "tied:fixed", "--candidate")
SCENARIO = (
    *("--scenario", "cold-8k", "--scale", 512, "--ratios", "4,2"),
    *("--candidate", "equivalence.paths.chunked:chunked,budget_bytes=64"),
)


@pytest.mark.parametrize(
    ("candidate", "code", "status"),
    [
        ("tied:fixed", 0, "EQUAL"),
        ("tied:toy", 1, "DIFFERENT: the candidate breaks the contract in 4 layer-forwards"),
        ("bad_candidates:raises", 3, "UNDECIDED: no layer-forward was compared"),
    ],
)
def test_the_exit_code_is_that_of_the_status(
    tell: Tell, folder: Path, candidate: str, code: int, status: str
) -> None:
    """0 equal, 1 different, 3 undecided; the text says why."""
    assert folder.is_dir()
    got, out, err = tell("ab", "cases", *ARMS, candidate)
    assert (got, err) == (code, "")
    assert f"\n  status    {status}\n" in out


def test_layers_that_share_a_mask_are_two_of_each_ratio(tell: Tell) -> None:
    """A consumer that forgets its mask is found without asking for more layers."""
    scenario = ("--scenario", "two-level", "--scale", 512, "--ratios", 1)
    code, out, err = tell("ab", *scenario, "--candidate", "bad_candidates:without_mask")
    assert (code, err) == (1, "")
    assert "mask-extra" in out


def test_a_scenario_is_compared_with_the_original_path(tell: Tell) -> None:
    """Without --original it is the one scoring call; the command to run it again is told."""
    code, out, err = tell("ab", *SCENARIO)
    assert (code, err) == (0, "")
    assert out.startswith("ab prefill_indexer: 2 layer-forwards, EQUAL\n")
    assert "  original  equivalence.paths.chunked:original\n" in out
    again = out.splitlines()[-1].split(maxsplit=1)[1]
    assert shlex.split(again) == ["equivalence", "ab", *map(str, SCENARIO)]


def test_the_command_that_is_told_says_the_same(tell: Tell, folder: Path) -> None:
    """Every option is in it."""
    assert folder.is_dir()
    _, out, _ = tell(
        *("ab", "cases", *ARMS, "tied:last", "--contract", tied.FREE, "--sample", 9, "--seed", 3),
        *("--device", "cpu", "--require-path", "my.kernel", "--no-control"),
    )
    again = out.splitlines()[-1].split(maxsplit=1)[1]
    words = shlex.split(again.partition("equivalence ab ")[2])
    code, second, _ = tell("ab", *words)
    assert (code, second) == (3, out)


def test_no_control_is_undecided(tell: Tell, folder: Path) -> None:
    """It says so, in the table too."""
    assert folder.is_dir()
    code, out, _ = tell("ab", "cases", *ARMS, "tied:fixed", "--no-control")
    assert code == 3
    assert "UNDECIDED: the control arm was not run" in out
    assert " not run " in out


def test_a_required_path_that_did_not_run_is_undecided(tell: Tell, folder: Path) -> None:
    """A receipt of the candidate itself satisfies it."""
    assert folder.is_dir()
    options = ("--contract", tied.FREE, "--require-path", "toy.topk")
    assert tell("ab", "cases", *ARMS, "tied:fixed", *options)[0] == 3
    code, out, _ = tell("ab", "cases", *ARMS, "tied:toy", *options)
    assert code == 1
    assert "ran       candidate: toy.topk 1.0 cpu   4 calls of 50 rows   k=16" in out


def test_reports_are_written(tell: Tell, folder: Path) -> None:
    """JSON and Markdown go to files; the text is printed all the same."""
    code, out, _ = tell(
        *("ab", "cases", *ARMS, "tied:toy", "--json", "out.json", "--markdown", "out.md")
    )
    data = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert (code, data["status"], data["total"]["forwards"]) == (1, "DIFFERENT", 4)
    assert (folder / "out.md").read_text(encoding="utf-8").startswith("**ab ragged_topk: 4 ")
    assert out.startswith("ab ragged_topk: 4 ")


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_report_on_stdout_stands_alone(tell: Tell, folder: Path, option: str) -> None:
    """What a candidate prints goes to stderr, and no text is added."""
    assert folder.is_dir()
    tiny.put(folder / "one", tiny.topk())
    code, out, err = tell(
        *("ab", "one", "--original", "bad_candidates:right"),
        *("--candidate", "bad_candidates:prints", option, "-"),
    )
    assert (code, err) == (0, "{ no JSON }\n")
    if option == "--json":
        assert json.loads(out)["status"] == "EQUAL"
    else:
        assert out.startswith("**ab ragged_topk: 1 layer-forward, EQUAL**\n")


USAGE = {
    "ab": "Missing option '--candidate'.",
    "ab --candidate tied:fixed": "ab over what? name case files or folders, or give --scenario",
    "ab cases --scenario cold-8k --candidate tied:fixed": "ab over what? name case files or"
    " folders, or give --scenario, not both",
    "ab cases --candidate tied:fixed": "--original is missing: there is none for ragged_topk",
    "ab both --candidate tied:fixed": "the cases are prefill_indexer and ragged_topk: compare"
    " those of one op at a time",
    "ab nowhere --candidate tied:fixed": "nowhere does not exist",
    "ab cases --scale 2 --candidate tied:fixed": "--scale, --layers and --ratios make a scenario:"
    " name one with --scenario",
    "ab --scenario warm --candidate tied:fixed": "no scenario is named 'warm': one of cold-8k",
    "ab --scenario cold-8k --ratios 3 --candidate tied:fixed": "ratio 3: it is 1, 2 or 4",
    "ab --scenario cold-8k --ratios x --candidate tied:fixed": "--ratios x: it is whole numbers",
    "ab --scenario cold-8k --scale 0 --candidate tied:fixed": "Invalid value for '--scale'",
    "ab cases --original tied:nothing --candidate tied:fixed": "original 'tied:nothing': module",
    "ab cases --original tied:fixed --candidate tied:fixed --contract fast": "no documented"
    " contract is named 'fast'",
    "ab cases --original tied:fixed --candidate tied:fixed --device gpu": "device 'gpu': ",
    "ab cases --original tied:fixed --candidate tied:fixed --json .": "--json .: is a folder",
    "ab cases --original tied:fixed --candidate tied:fixed --markdown no/such.md": "--markdown"
    " no/such.md: there is no folder no",
    "ab cases --original tied:fixed --candidate tied:fixed --json - --markdown -": "--json and"
    " --markdown both write to -",
    "ab cases --original tied:fixed --candidate tied:fixed --json a --markdown ./a": "--json and"
    " --markdown both write to a",
    f"ab cases --original tied:fixed --candidate tied:fixed --seed {1 << 63}": "seed is"
    f" {1 << 63}; it is a whole number from 0 to 2**63 - 1",
}


@pytest.mark.parametrize("line", USAGE)
def test_a_mistake_is_one_sentence(tell: Tell, folder: Path, line: str) -> None:
    """The exit code is 2, nothing is printed on stdout."""
    assert folder.is_dir()
    code, out, err = tell(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"equivalence: {USAGE[line]}")
    assert err.count("\n") == 1


def test_without_a_case_nothing_is_compared(tell: Tell, folder: Path) -> None:
    """An empty folder is a mistake of the user."""
    (folder / "empty").mkdir()
    code, _, err = tell("ab", "empty", *ARMS, "tied:fixed")
    assert code == 2
    assert err.startswith("equivalence: no case in")
