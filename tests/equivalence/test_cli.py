"""The command line: what it says, where it says it, and how it exits."""

import errno
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from equivalence import cli, generate, run
from equivalence.case import Case
from equivalence.commands import common
from equivalence.planted import compose as planted

Tell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one case."""
    tiny.put(tmp_path / "cases", tiny.topk())
    return tmp_path / "cases"


USAGE = {
    "replay": "replay what? name case files or folders, or give --shipped",
    "replay nowhere": "nowhere does not exist",
    "replay .": "no case in .",
    "replay CASES --candidate bad_candidates": "candidate 'bad_candidates': it is MODULE:FUNCTION,"
    " as in my_kernels:fast_topk",
    "replay CASES --candidate no_such:f": "candidate 'no_such:f': No module named 'no_such'",
    "replay CASES --candidate bad_candidates:f": "candidate 'bad_candidates:f': module"
    " 'bad_candidates' has no attribute 'f'",
    "replay CASES --candidate bad_candidates:_BUFFER": "candidate 'bad_candidates:_BUFFER': it is"
    " Tensor, not callable",
    "replay CASES --candidate exits_at_import:f": "candidate 'exits_at_import:f': importing it"
    " raised SystemExit: 0",
    "replay CASES --candidate raises_at_import:f": "candidate 'raises_at_import:f': importing it"
    " raised ValueError: odd\\n\\x1b[2J",
    "replay CASES --candidate bad_candidates:right --contract ties=some": "ties cannot be 'some';"
    " it is lowest, highest, any or all",
    "replay CASES --contract fast": "no documented contract is named 'fast'",
    "replay CASES --repeats 0": "Invalid value for '--repeats': 0 is not in the range x>=1.",
    "replay CASES --repeats 2": "--repeats calls a candidate again: name one with --candidate",
    "replay CASES --rows 4": "row 4 of tiny: it has 4 rows, from 0 on",
    "replay CASES --rows 1,x": "--rows 1,x: it is whole numbers with commas, as in --rows 3,17",
    "replay CASES --rows -1": "--rows -1: it is whole numbers with commas, as in --rows 3,17",
    "replay CASES --rows ²": "--rows ²: it is whole numbers with commas, as in --rows 3,17",
    "replay CASES --device gpu\x1b": "device 'gpu\\x1b': ",
    "replay CASES --device meta": "device 'meta': ",
    "replay CASES --json no/such/out.json": "--json no/such/out.json: there is no folder no/such",
    "replay CASES --json .": "--json .: is a folder",
    "replay CASES --json a.safetensors": "--json a.safetensors: that name is a case's",
    "replay CASES --what": "No such option",
    "replai CASES": "No such command 'replai'",
    "lint .": "no case in .",
    "lint nowhere": "nowhere does not exist",
    "show .": "no case in .",
    "show": "Missing argument 'PATH...'.",
    "import . --to out": "no *.safetensors in .",
    "import CASES --to out": "cases/tiny.safetensors: format 'none'; this importer reads"
    " 'recorded-layer/0'",
    "import CASES --to cases/tiny.safetensors": "Invalid value for '--to': Directory",
    "import CASES --to out --set k": "--set k: it is KEY=VALUE",
    "import CASES CASES/../cases --to out": "2 recordings are named tiny.safetensors: import them"
    " one by one",
}


@pytest.mark.parametrize("line", USAGE)
def test_wrong_use_is_one_sentence_before_anything_is_judged(
    line: str, folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2, nothing on stdout, one line on stderr that says what would be right."""
    work = folder.parent / "work"
    work.mkdir()
    (work / "cases").symlink_to(folder)
    (work / "exits_at_import.py").write_text("raise SystemExit(0)", encoding="utf-8")
    (work / "raises_at_import.py").write_text(r"raise ValueError('odd\n\x1b[2J')", encoding="utf-8")
    monkeypatch.chdir(work)
    code, out, err = tell(*line.replace("CASES", "cases").split(" "))
    assert (code, out) == (common.USAGE, "")
    assert err.startswith(f"equivalence: {USAGE[line]}")
    assert err.removesuffix("\n").isprintable()


def test_a_name_too_long_is_wrong_use(folder: Path, tell: Tell) -> None:
    """The system's own words, exit 2."""
    long = "x" * 5000
    assert tell("replay", long)[::2] == (
        common.USAGE,
        f"equivalence: {'x' * 400}... (5,000 characters) cannot be searched: File name too long\n",
    )
    assert tell("replay", folder, "--json", f"{long}/y")[0] == common.USAGE


def test_a_good_case_is_a_counted_sentence(folder: Path, tell: Tell) -> None:
    """Exit 0, nothing on stderr."""
    code, out, err = tell("replay", folder)
    assert (code, err) == (common.EQUAL, "")
    assert "all equal" in out


def test_json_on_stdout_is_nothing_but_json(folder: Path, tell: Tell) -> None:
    """What a candidate prints goes to stderr."""
    candidate = "bad_candidates:prints"
    code, out, err = tell("replay", folder, "--candidate", candidate, "--json", "-")
    told = json.loads(out)
    assert (code, told["status"], told["cases"][0]["candidate"]) == (0, "EQUAL", candidate)
    assert err == "{ no JSON }\n"


def test_json_may_go_to_a_file(folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds what stdout would; a full disk is one sentence."""
    target = folder.parent / "out.json"
    assert tell("replay", folder, "--json", target)[0] == common.EQUAL
    assert json.loads(target.read_text(encoding="utf-8"))["status"] == "EQUAL"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = tell("replay", folder, "--json", target)
    assert (code, err) == (
        common.USAGE,
        f"equivalence: --json {target}: No space left on device\n",
    )


def test_a_candidate_is_run_again_with_every_row(tmp_path: Path, tell: Tell) -> None:
    """The fault may come from how many rows there are: a command for some would show nothing."""
    path = tiny.put(tmp_path, tiny.topk(recorded=()))
    name = "equivalence.planted.counted:right"
    (tmp_path / "counted_rows.py").write_text(
        "from equivalence.planted.counted import right\n\n\n"
        "def short(**call):\n    picks = right(**call)\n    picks[1:2] = -1\n    return picks\n",
        encoding="utf-8",
    )
    sys.path.insert(0, str(tmp_path))
    try:
        code, out, _ = tell("replay", path, "--candidate", "counted_rows:short")
    finally:
        sys.path.remove(str(tmp_path))
    assert code == common.DIFFERENT
    (again,) = [line for line in out.splitlines() if line.startswith("  again")]
    assert again.endswith("--candidate counted_rows:short")
    assert tell("replay", path, "--candidate", name)[0] == common.EQUAL


def test_a_difference_exits_1_with_a_command_to_run_again(tmp_path: Path, tell: Tell) -> None:
    """Paths are quoted for a shell, and only the failing rows are asked for."""
    picks = tiny.topk().recorded[0]["raw_indices"].clone()
    picks[1] = picks[1].flip(0)
    path = tiny.put(tmp_path, tiny.topk("a b", recorded=({"raw_indices": picks},)))
    code, out, _ = tell("replay", path, "--contract", "strict")
    again = f"equivalence replay '{path}' --contract strict --rows 1"
    assert code == common.DIFFERENT
    assert again in out
    assert tell("replay", path, "--rows", "0,2", "--contract", "strict")[0] == common.EQUAL


def test_what_is_judged_whole_is_run_again_whole(tmp_path: Path, tell: Tell) -> None:
    """The command that is printed takes no rows, and shows the difference again."""
    case = generate.compose_pages(1, shape="mixed")
    held = planted.spoilt(case, planted.FAULTS["two-layers-before"])
    path = tiny.put(tmp_path, replace(case, recorded=(held,)))
    code, out, _ = tell("replay", path)
    (again,) = [line.split(maxsplit=1)[1] for line in out.splitlines() if "  again " in line]
    assert (code, again) == (common.DIFFERENT, shlex.join(["equivalence", "replay", str(path)]))
    assert tell(*shlex.split(again)[1:])[0] == common.DIFFERENT


def test_a_run_without_a_row_that_selects_is_undecided(tmp_path: Path, tell: Tell) -> None:
    """Pages alone prove no pick, unless that was all that was asked."""
    case = Case(
        op="translate_pages",
        inputs={"raw_indices": tiny.ints([0, 5]), "page_table": tiny.ints([3, 4])},
        params={"page_size": 4},
        recorded=({"page_indices": tiny.ints([12, 17])},),
        name="pages",
    )
    tiny.put(tmp_path, case)
    assert tell("replay", tmp_path)[0] == common.EQUAL
    short = tiny.topk(params={"k": 40}, recorded=())
    picks = torch.full((4, 40), -1, dtype=torch.int32)
    for row, visible in enumerate((32, 28, 4, 0)):
        picks[row, :visible] = torch.arange(visible)
    tiny.put(tmp_path / "short", tiny.topk(params={"k": 40}, recorded=({"raw_indices": picks},)))
    assert short.params == {"k": 40}
    assert tell("replay", tmp_path / "short")[0] == common.UNDECIDED


def test_names_that_would_steer_a_terminal_are_escaped(tmp_path: Path, tell: Tell) -> None:
    """A file's name, its provenance and its verdict reach no terminal raw."""
    name = "\x1b[31mred\n\u202e漢"
    case = tiny.topk(provenance={"origin\x07": "\x1b]0;title\x07\nmore"}, recorded=())
    path = tmp_path / f"{name}.safetensors"
    tiny.put(tmp_path, case).rename(path)
    shown = "\\x1b[31mred\\n\\u202e漢"
    for command, code in (("replay", 3), ("show", 0), ("lint", 0)):
        got, out, err = tell(command, tmp_path)
        assert (got, err) == (code, "")
        assert all(line.isprintable() for line in out.splitlines())
        assert command == "lint" or shown in out
    assert json.loads(tell("replay", tmp_path, "--json", "-")[1])["cases"][0]["path"] == str(path)


def test_a_name_that_is_no_text_is_one_line(folder: Path, tell: Tell) -> None:
    """A file name that is no UTF-8 is escaped, and its neighbour is judged."""
    tiny.put(folder, tiny.topk("b")).rename(folder / "b\udcff.safetensors")
    code, out, err = tell("replay", folder)
    assert (code, err) == (common.UNDECIDED, "")
    assert "b\\udcff" in out
    assert "1 equal" in out


def test_a_narrow_encoding_gets_escapes(folder: Path) -> None:
    """What the terminal's encoding cannot hold is no internal error."""
    (folder / "tiny.safetensors").rename(folder / "漢.safetensors")
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "equivalence", "replay", folder],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u6f22" in done.stdout


def test_a_fault_of_our_own_is_exit_4(
    folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called one, and `--debug` shows where."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("x\x1b")

    monkeypatch.setattr(run, "over", fail)
    code, out, err = tell("replay", folder)
    assert (code, out) == (common.FAILED, "")
    assert err == (
        "equivalence: internal error: KeyError: 'x\\x1b'; this is a bug here,"
        " `--debug` prints where\n"
    )
    with pytest.raises(KeyError):
        cli.main(["--debug", "replay", str(folder)])


def test_a_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    """`equivalence replay | head -0` prints nothing on stderr."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "equivalence", "replay", folder],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (common.UNREAD, b"")


def test_a_stderr_that_takes_nothing_changes_no_result(folder: Path) -> None:
    """Closed or full: the exit code and what is printed stay."""
    program = shlex.join([sys.executable, "-m", "equivalence"])
    for line, code in (
        (f"{program} replay {folder} 2>&-", common.EQUAL),
        (f"{program} lint nowhere 2>&-", common.USAGE),
        (f"{program} lint nowhere 2>/dev/full", common.USAGE),
    ):
        done = subprocess.run(  # noqa: S602 - our own program, its output closed by a shell
            line, shell=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (code, b"")
        assert (b"all equal" in done.stdout) == (code == common.EQUAL)


@pytest.mark.parametrize("arguments", [("--help",), ("lint", "CASES")])
def test_output_that_cannot_be_written_is_one_sentence(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    """A full disk is no bug here, and the result is nobody's."""
    words = [str(folder) if word == "CASES" else word for word in arguments]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "equivalence", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    sentence = "equivalence: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (common.FAILED, sentence)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"),
    ],
)
def test_no_room_is_one_sentence(
    folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """However torch says so, it is no bug here."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run, "over", fail)
    sentence = "equivalence: not enough memory for this: ask for less of it at once\n"
    assert tell("replay", folder) == (common.FAILED, "", sentence)


def test_being_stopped_is_said(folder: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a candidate stops the run; it is no outcome of the candidate."""

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bad_candidates.right", interrupt)
    code, _, err = tell("replay", folder, "--candidate", "bad_candidates:right")
    assert (code, err.strip()) == (common.STOPPED, "equivalence: stopped")


def test_a_terminal_gets_a_bar_and_names_are_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case named like rich markup is shown as it is named."""
    tiny.put(tmp_path, tiny.topk("[red]"))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with common.progress(quiet=False) as progress:
        verdicts = list(run.over([tmp_path], run.Options(), progress=progress))
    assert [verdict.case for verdict in verdicts] == ["[red]"]


def test_shipped_cases_are_known_by_name(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--shipped` needs no path."""
    asked: list[Path] = []

    def over(paths: list[Path], *_: object, **__: object) -> list[object]:
        asked.extend(paths)
        return []

    monkeypatch.setattr(run, "over", over)
    assert tell("replay", "--shipped")[0] == common.UNDECIDED
    assert [path.parts[-2:] for path in asked] == [("fixtures", "cases")]


def test_recordings_are_imported_one_file_each(
    tmp_path: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line a file; a folder that cannot be written is one sentence."""
    case = tiny.topk()
    tensors = {
        "logits": case.inputs["scores"],
        "row_start": case.inputs["row_start"],
        "row_end": case.inputs["row_end"],
        "raw_indices.run0": case.recorded[0]["raw_indices"],
    }
    path = tmp_path / "plain.safetensors"
    save_file(tensors, path, metadata={"format": "recorded-layer/0"})
    target = tmp_path / "out" / "plain.safetensors"
    command = ("import", path, "--to", tmp_path / "out", "--set", "k=8")
    assert tell(*command) == (0, f"{target}   ragged_topk   1 launch chain\n", "")
    assert tell("replay", tmp_path / "out")[0] == common.EQUAL

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    sentence = f"equivalence: --to {tmp_path / 'out'}: cannot be written: No space left on device\n"
    assert tell(*command) == (common.USAGE, "", sentence)


def test_the_readme_of_a_folder_is_printed(folder: Path, tell: Tell) -> None:
    """`show --readme` writes what stands beside shipped cases."""
    code, out, _ = tell("show", "--readme", folder)
    assert (code, out.splitlines()[0]) == (0, "# Fixtures")
    assert out.endswith(" |\n")


def test_lint_counts(folder: Path, tell: Tell) -> None:
    """No problem is exit 0; one is exit 1."""
    assert tell("lint", folder) == (0, "1 file: no problems\n", "")
    (folder / "bad.safetensors").touch()
    code, out, _ = tell("lint", folder)
    assert (code, out.splitlines()[-1]) == (common.DIFFERENT, "2 files: 1 problem")
