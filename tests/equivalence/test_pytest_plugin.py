"""Case files as tests, the fixture `equivalence`, and what a session says at its end."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equivalence import candidate, judge, run, saved, session, store
from equivalence.case import Case
from equivalence.report import as_json, as_text

Run = Callable[..., pytest.RunResult]

_KERNELS = """
import torch

def right(*, scores, row_start, row_end, k):
    return scores.topk(k).indices.int()

def backwards(*, scores, row_start, row_end, k):
    return right(scores=scores, row_start=row_start, row_end=row_end, k=k).flip(1)

def losing(*, scores, row_start, row_end, k):
    return scores.topk(k, largest=False).indices.int()

def crashing(**_):
    raise RuntimeError("no kernel image")

number = 7
"""


def _case(name: str = "case", *, rows: int = 3, columns: int = 6, k: int = 2) -> Case:
    """Rows of falling scores, whose first k columns were recorded."""
    scores = torch.arange(columns, 0, -1).float().repeat(rows, 1)
    picks = torch.arange(k, dtype=torch.int32).repeat(rows, 1)
    picks[:, columns:] = -1
    return Case(
        op="ragged_topk",
        inputs={
            "scores": scores,
            "row_start": torch.zeros(rows, dtype=torch.int32),
            "row_end": torch.full((rows,), columns, dtype=torch.int32),
        },
        params={"k": k},
        recorded=({"raw_indices": picks},),
        name=name,
    )


def _wrong(name: str = "wrong") -> Case:
    """Row 1 lost its second winner to column 4."""
    case = _case(name)
    case.recorded[0]["raw_indices"][1, 1] = 4
    return case


def _nan() -> Case:
    """Row 1 scores a NaN, which nothing in the strict contract ranks."""
    case = _case("nan")
    case.inputs["scores"][1, 1] = float("nan")
    return case


def _short() -> Case:
    """Scores could be wrong; picks could not, since every window fits into k."""
    fp8, zeros = torch.float8_e4m3fn, torch.zeros(2, dtype=torch.int32)
    return Case(
        op="prefill_indexer",
        inputs={
            "q": torch.zeros(2, 64, 128).to(fp8),
            "k": torch.zeros(4, 128).to(fp8),
            "k_scale": torch.ones(4),
            "weights": torch.ones(2, 64),
            "row_start": zeros,
            "row_end": zeros + 4,
        },
        params={"topk": 4},
        arithmetic="deep_gemm.sm90",
        recorded=(
            {"logits": torch.zeros(2, 4), "raw_indices": torch.arange(4).int().repeat(2, 1)},
        ),
        name="short",
    )


def _store(folder: Path, *cases: Case) -> None:
    for case in cases:
        store.save(case, folder / f"{case.name}.safetensors")


def _foreign(path: Path) -> None:
    """The weights of a model, say."""
    path.parent.mkdir(exist_ok=True)
    save_file({"weight": torch.zeros(2)}, path)


def _section(result: pytest.RunResult) -> list[str]:
    """What the session says of its cases."""
    lines = result.outlines
    heads = [i for i, line in enumerate(lines) if line.strip("= ") == "equivalence"]
    if not heads:
        return []
    rest = lines[heads[0] + 1 :]
    ends = [i for i, line in enumerate(rest) if line.startswith("=") or " in 0." in line]
    return rest[: ends[0]] if ends else rest


def _message(result: pytest.RunResult) -> str:
    """What stands between the headline of the one failure and what follows it."""
    text = result.stdout.str()
    after = text.partition("= FAILURES =")[2].partition("\n")[2].partition("\n")[2]
    return after.partition("\n====")[0]


@pytest.fixture
def tests(pytester: pytest.Pytester) -> Run:
    """Run pytest in an empty project that has the module `kernels`."""
    pytester.makepyfile(kernels=_KERNELS)

    def call(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:benchmark", *arguments)

    return call


def test_recorded_equal(pytester: pytest.Pytester, tests: Run) -> None:
    """A case whose recorded runs are equal is a test that passes, named after file and side."""
    _store(pytester.path / "cases", _case("one"))
    result = tests("cases", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["cases/one.safetensors::recorded PASSED*"])
    assert _section(result) == ["1 case, 3 rows: all equal; 0 undecided"]


def test_recorded_different(pytester: pytest.Pytester, tests: Run) -> None:
    """A failing case prints its failure message and nothing of where it was raised."""
    case = _wrong()
    _store(pytester.path / "cases", case)
    result = tests("cases")
    assert result.ret == 1
    (kept,) = (pytester.path / ".equivalence").glob("wrong-*.safetensors")
    again = f"equivalence replay .equivalence/{kept.name}"
    verdict = judge.check(case)
    want = as_text.failure(verdict, saved=f".equivalence/{kept.name} (row 1, 1 KiB)", again=again)
    assert _message(result) == want
    assert _section(result) == [
        *as_text.case_lines(verdict).splitlines(),
        "1 case, 3 rows: 0 equal, 1 different; 0 undecided",
    ]


def test_the_summary(pytester: pytest.Pytester, tests: Run) -> None:
    """The summary tells each case that is not equal, counts all, and counts what was left alone."""
    _store(pytester.path / "cases", _case("fine"), _wrong("bad"), _nan())
    _foreign(pytester.path / "weights" / "a.safetensors")
    _foreign(pytester.path / "weights" / "b.safetensors")
    assert _section(tests()) == [
        "bad  DIFFERENT             raw_indices     3 rows: 2 identical, 1 different (lost-winner)",
        "nan  UNDECIDED             raw_indices     3 rows: 2 identical, 1 undecided",
        "3 cases, 9 rows: 1 equal, 1 different; 1 undecided",
        "2 files without a case left alone",
    ]


_EXPECTED = """
[wrong]
status = "DIFFERENT"
stages = ["raw_indices"]
rule = "lost-winner"
rows = {rows}
runs = 1
kernel = "a kernel"
reason = "It loses one."
link = "https://example.org/1"
"""


@pytest.mark.parametrize("place", ["expected.toml", "cases/expected.toml"])
def test_expected(pytester: pytest.Pytester, tests: Run, place: str) -> None:
    """A difference that expected.toml foresees, beside or above the file, passes and is counted."""
    _store(pytester.path / "cases", _wrong(), _case("fine"))
    (pytester.path / place).write_text(_EXPECTED.format(rows=1), encoding="utf-8")
    result = tests("cases")
    assert result.ret == 0
    assert "1 different (1 expected)" in _section(result)[-1]
    assert not (pytester.path / ".equivalence").exists()


def test_expected_no_longer(pytester: pytest.Pytester, tests: Run) -> None:
    """A difference that is not the one foreseen fails."""
    _store(pytester.path, _wrong())
    (pytester.path / "expected.toml").write_text(_EXPECTED.format(rows=2), encoding="utf-8")
    result = tests()
    assert result.ret == 1
    assert "expected DIFFERENT lost-winner in 2 rows of 1 runs" in _message(result)


def test_expected_unreadable(pytester: pytest.Pytester, tests: Run) -> None:
    """An expected.toml that cannot be read fails the case in one line."""
    _store(pytester.path, _wrong())
    (pytester.path / "expected.toml").write_text("[wrong]\n", encoding="utf-8")
    message = _message(tests())
    assert message.count("\n") == 0
    assert "expected.toml: [wrong] has the fields status," in message


def test_undecided(pytester: pytest.Pytester, tests: Run) -> None:
    """What cannot be decided fails as a difference does, and its rows are saved."""
    _store(pytester.path, _nan())
    result = tests()
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    assert _message(result).startswith("nan ragged_topk: nothing may be concluded (nan)")
    assert len(list((pytester.path / ".equivalence").glob("nan-*"))) == 1


def test_broken_file(pytester: pytest.Pytester, tests: Run) -> None:
    """A file in a folder that cannot be read fails with its reason in one line."""
    _store(pytester.path / "cases", _case("cut"))
    path = pytester.path / "cases" / "cut.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    result = tests("cases")
    result.assert_outcomes(failed=1)
    assert _message(result).startswith("cases/cut.safetensors: truncated: ")
    assert _message(result).count("\n") == 0
    assert _section(result)[-1] == "1 case: 0 equal, 0 different; 1 undecided"


def test_named_foreign_file(pytester: pytest.Pytester, tests: Run) -> None:
    """A file that is named must be a case."""
    _foreign(pytester.path / "weights.safetensors")
    result = tests("weights.safetensors")
    result.assert_outcomes(failed=1)
    assert _message(result) == (
        "weights.safetensors: no case: its metadata has no key `equivalence`"
    )


def test_foreign_files_alone(pytester: pytest.Pytester, tests: Run) -> None:
    """Where nothing was found but files without a case, the session says so and exits 4."""
    _foreign(pytester.path / "weights.safetensors")
    result = tests()
    assert result.ret == 4
    assert _section(result) == [
        "no case ran, and cases were asked for; 1 file without a case left alone"
    ]


def test_named_file(pytester: pytest.Pytester, tests: Run) -> None:
    """A file or its test can be named."""
    _store(pytester.path / "cases", _case("one"), _case("two"))
    tests("cases/one.safetensors").assert_outcomes(passed=1)
    tests("cases/two.safetensors::recorded").assert_outcomes(passed=1)


def test_silent_without_cases(pytester: pytest.Pytester, tests: Run) -> None:
    """A session without cases says nothing, whatever lies around."""
    pytester.makepyfile("def test_it(): pass")
    _foreign(pytester.path / "weights.safetensors")
    result = tests()
    assert result.ret == 0
    assert "equivalence" not in result.stdout.str().partition("collected ")[2]


def test_internal_error(
    pytester: pytest.Pytester, tests: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug here is shown with the place where it happened."""
    _store(pytester.path, _case("one"))
    monkeypatch.setattr(run, "over", lambda *_: 1 // 0)
    message = _message(tests())
    assert "ZeroDivisionError" in message
    assert "def judge_file" in message


def test_candidate(pytester: pytest.Pytester, tests: Run) -> None:
    """A candidate is judged instead of what was recorded."""
    _store(pytester.path, _wrong())
    result = tests("--equivalence-candidate=kernels:right", "-v")
    result.stdout.fnmatch_lines(["wrong.safetensors::candidate PASSED*"])


def test_candidate_is_never_expected(pytester: pytest.Pytester, tests: Run) -> None:
    """What is expected of recorded runs says nothing of a candidate."""
    _store(pytester.path, _wrong())
    (pytester.path / "expected.toml").write_text(_EXPECTED.format(rows=3), encoding="utf-8")
    tests("--equivalence-candidate=kernels:losing").assert_outcomes(failed=1)


def test_wrong_candidate(pytester: pytest.Pytester, tests: Run) -> None:
    """The failure of a candidate can be run again by the command it prints."""
    _store(pytester.path, _case("one"))
    options = ("--equivalence-candidate=kernels:losing", "--equivalence-contract=order=any")
    message = _message(tests(*options))
    (kept,) = (pytester.path / ".equivalence").glob("one-*.safetensors")
    assert message.splitlines()[-1] == (
        f"  again     equivalence replay .equivalence/{kept.name}"
        " --candidate kernels:losing --contract order=any"
    )


def test_crashing_candidate(pytester: pytest.Pytester, tests: Run) -> None:
    """A crash fails, saves nothing, and is run again on the whole case."""
    _store(pytester.path, _case("one"))
    message = _message(tests("--equivalence-candidate=kernels:crashing"))
    assert "RuntimeError: no kernel image" in message
    assert "  again     equivalence replay one.safetensors --candidate" in message
    assert not (pytester.path / ".equivalence").exists()


def test_contract(pytester: pytest.Pytester, tests: Run) -> None:
    """A contract says what may differ."""
    _store(pytester.path, _case("one"))
    candidate = "--equivalence-candidate=kernels:backwards"
    tests(candidate).assert_outcomes(failed=1)
    result = tests(candidate, "--equivalence-contract=order=any")
    assert _section(result) == ["1 case, 3 rows: all equal (3 reordered); 0 undecided"]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--equivalence-candidate=kernels", "candidate 'kernels': it is MODULE:FUNCTION"),
        ("--equivalence-candidate=kernels:none", "has no attribute 'none'"),
        ("--equivalence-candidate=kernels:number", "it is int, not callable"),
        ("--equivalence-contract=order=some", "order cannot be 'some'"),
        ("--equivalence-save=kernels.py", "it is a folder, or off"),
        ("--equivalence-save=", "it is a folder, or off"),
    ],
)
def test_bad_option(tests: Run, option: str, sentence: str) -> None:
    """An option that cannot be used ends pytest with one sentence and exit 4."""
    result = tests(option)
    assert result.ret == 4
    (line,) = filter(None, result.errlines)
    assert line.startswith("ERROR: ")
    assert sentence in line


@pytest.mark.parametrize(
    "option", ["--equivalence-require-cases", "--equivalence-candidate=kernels:right"]
)
def test_required_cases(pytester: pytest.Pytester, tests: Run, option: str) -> None:
    """Where cases are asked for and none ran, the session exits 4 with one sentence."""
    pytester.makepyfile("def test_it(): pass")
    result = tests(option)
    assert result.ret == 4
    assert _section(result) == ["no case ran, and cases were asked for"]
    assert tests(option, "--collect-only").ret == 0
    _store(pytester.path, _case())
    assert tests(option).ret == 0


def test_saved_rows(pytester: pytest.Pytester, tests: Run) -> None:
    """The failing rows are saved as a case that fails the same way, in a folder git ignores."""
    _store(pytester.path / "cases", _wrong())
    tests("cases")
    folder = pytester.path / ".equivalence"
    assert (folder / ".gitignore").read_text(encoding="utf-8") == "*\n"
    (kept,) = folder.glob("*.safetensors")
    case = store.load(kept)
    assert case.provenance["rows"] == "1 of wrong"
    (first,), (second,) = judge.check(_wrong()).findings, judge.check(case).findings
    assert (second.rule, second.evidence) == (first.rule, first.evidence)
    tests("cases")
    assert list(folder.glob("*.safetensors")) == [kept]


def test_nothing_saved(pytester: pytest.Pytester, tests: Run) -> None:
    """`off` saves nothing, and the case itself is what runs again."""
    _store(pytester.path, _wrong())
    message = _message(tests("--equivalence-save=off"))
    assert message.endswith("  again     equivalence replay wrong.safetensors")
    assert not (pytester.path / ".equivalence").exists()


def test_chosen_folder(pytester: pytest.Pytester, tests: Run) -> None:
    """A folder that is already there gets the case and no .gitignore."""
    _store(pytester.path / "cases", _wrong())
    (pytester.path / "kept").mkdir()
    tests("cases", "--equivalence-save=kept")
    (kept,) = (pytester.path / "kept").iterdir()
    assert kept.match("wrong-????????????.safetensors")


def test_folder_that_cannot_be_written(pytester: pytest.Pytester, tests: Run) -> None:
    """A folder that cannot be made is told in the failure, which stays the failure."""
    _store(pytester.path / "cases", _wrong())
    message = _message(tests("cases", "--equivalence-save=kernels.py/kept"))
    assert message.startswith("wrong ragged_topk: 1 of 3 rows differ")
    assert "  saved     nothing: " in message


_FIXTURE = """
import kernels
from equivalence import Status

def test_counted(equivalence):
    (case,) = equivalence.load_cases("cases", op="ragged_topk")
    assert equivalence.check(case).status is Status.EQUAL
    assert equivalence.check(case, kernels.losing).status is Status.DIFFERENT
    assert equivalence.assert_equivalent(case, kernels.right).status is Status.EQUAL
"""


def test_fixture_counts(pytester: pytest.Pytester, tests: Run) -> None:
    """Every verdict made through the fixture is counted, whatever the test makes of it."""
    _store(pytester.path / "cases", _case("one"))
    result = tests(pytester.makepyfile(_FIXTURE).name)
    assert result.ret == 0
    assert _section(result) == [
        "one  DIFFERENT             raw_indices     3 rows: 3 different (lost-winner)",
        "3 cases, 9 rows: 2 equal, 1 different; 0 undecided",
    ]


def test_fixture_fails(pytester: pytest.Pytester, tests: Run) -> None:
    """A failed assertion shows the test's own line, the saved file and the command, no more."""
    _store(pytester.path / "cases", _case("one"))
    path = pytester.makepyfile(
        """
        import kernels

        def test_it(equivalence):
            (case,) = equivalence.load_cases("cases")
            equivalence.assert_equivalent(case, kernels.losing, contract="order=any", repeats=2)
        """
    )
    message = _message(tests(path.name))
    (kept,) = (pytester.path / ".equivalence").glob("one-*.safetensors")
    assert f"{path.name}:5: NotEquivalent" in message
    assert f"  saved     .equivalence/{kept.name} (rows 0 1 2, 1 KiB)" in message
    assert (
        f"  again     equivalence replay .equivalence/{kept.name}"
        " --candidate kernels:losing --contract order=any --repeats 2"
    ) in message
    assert "equivalence = Equivalence()" in message
    assert "fixture.py" not in message
    assert "judge.py" not in message


def test_plain_assertion(pytester: pytest.Pytester, tests: Run) -> None:
    """The public function fails a test as plainly as the fixture's."""
    _store(pytester.path / "cases", _wrong())
    path = pytester.makepyfile(
        """
        from equivalence import assert_equivalent, load_cases

        def test_it():
            assert_equivalent(*load_cases("cases"))
        """
    )
    message = _message(tests(path.name))
    assert f"{path.name}:4: NotEquivalent" in message
    assert "judge.py" not in message


def test_fixture_options(pytester: pytest.Pytester, tests: Run) -> None:
    """The candidate and contract of the command line stand where a call names none."""
    _store(pytester.path / "cases", _wrong())
    path = pytester.makepyfile(
        """
        def test_it(equivalence):
            equivalence.assert_equivalent(*equivalence.load_cases("cases"))
        """
    )
    candidate = "--equivalence-candidate=kernels:backwards"
    tests(path.name, candidate).assert_outcomes(failed=1)
    tests(path.name, candidate, "--equivalence-contract=order=any").assert_outcomes(passed=1)


def test_fixture_without_command(pytester: pytest.Pytester, tests: Run) -> None:
    """No command is printed for what no command line can name."""
    _store(pytester.path / "cases", _case("one"))
    path = pytester.makepyfile(
        """
        import kernels

        def test_it(equivalence):
            (case,) = equivalence.load_cases("cases")
            equivalence.assert_equivalent(case, lambda **given: kernels.losing(**given))
        """
    )
    message = _message(tests(path.name))
    assert "  saved  " in message
    assert "  again  " not in message


def test_fixture_with_hypothesis(pytester: pytest.Pytester, tests: Run) -> None:
    """The fixture serves generated tests and fixtures of any scope."""
    _store(pytester.path / "cases", _case("one"))
    path = pytester.makepyfile(
        """
        import pytest
        from hypothesis import given, strategies

        @pytest.fixture(scope="module")
        def case(equivalence):
            (case,) = equivalence.load_cases("cases")
            return case

        @given(repeats=strategies.integers(1, 2))
        def test_it(equivalence, case, repeats):
            equivalence.assert_equivalent(case, repeats=repeats)
        """
    )
    tests(path.name).assert_outcomes(passed=1)


def test_structural_session(pytester: pytest.Pytester, tests: Run) -> None:
    """A session in which no row of any case selects exits 1, though every test passed."""
    _store(pytester.path, _short())
    result = tests()
    result.assert_outcomes(passed=1)
    assert result.ret == 1
    assert _section(result)[-1] == session.STRUCTURAL
    _store(pytester.path, _case("one"))
    assert tests().ret == 0


def test_workers(pytester: pytest.Pytester, tests: Run) -> None:
    """Two workers give the summary and the exit status of one process."""
    pytest.importorskip("xdist")
    _store(pytester.path / "cases", _case("fine"), _wrong(), _nan())
    _foreign(pytester.path / "weights.safetensors")
    pytester.makepyfile(_FIXTURE.replace('"cases"', '"cases/fine.safetensors"'))
    alone, spread = tests(), tests("-n", "2")
    assert len(_section(alone)) == 5
    assert _section(spread) == _section(alone)
    assert spread.ret == alone.ret == 1


def test_workers_without_cases(pytester: pytest.Pytester, tests: Run) -> None:
    """The controller knows what its workers did not run and left alone."""
    pytest.importorskip("xdist")
    pytester.makepyfile("def test_it(): pass")
    _foreign(pytester.path / "weights.safetensors")
    result = tests("-n", "1", "--equivalence-require-cases")
    assert result.ret == 4
    assert _section(result) == [
        "no case ran, and cases were asked for; 1 file without a case left alone"
    ]


def _python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - this interpreter, on files of the test
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session without cases loads the plugin, and with it no torch and no safetensors."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('equivalence')\n"
        "    assert not {'torch', 'numpy', 'safetensors', 'click', 'rich'} & set(sys.modules)\n",
        encoding="utf-8",
    )
    _foreign(tmp_path / "weights.safetensors")
    done = _python("-m", "pytest", "-q", "-p", "equivalence", cwd=tmp_path)
    assert (done.returncode, done.stdout[:1], done.stderr) == (0, ".", "")


def test_switched_off(tmp_path: Path) -> None:
    """With `-p no:equivalence` case files are no tests."""
    _store(tmp_path, _wrong())
    done = _python("-m", "pytest", "-q", "-p", "no:equivalence", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.parametrize("case", [_case(), _wrong(), _nan()], ids=["equal", "different", "nan"])
def test_verdicts_travel_whole(case: Case) -> None:
    """A verdict comes back from its JSON as it was."""
    verdict = judge.check(case)
    assert as_json.verdict_of(json.loads(json.dumps(as_json.case_data(verdict)))) == verdict


def test_a_test_that_runs_again() -> None:
    """A test that runs again replaces the verdicts it gave before."""
    state = session.Session()
    session.tell(judge.check(_wrong()), state.properties)
    session.hear(state, "test_it", state.properties)
    session.tell(judge.check(_case()), state.properties)
    session.hear(state, "test_it", state.properties[1:])
    assert session.lines(state) == ["1 case, 3 rows: all equal; 0 undecided"]


@pytest.mark.parametrize("status", [2, 3])
def test_interrupted_session(status: int) -> None:
    """A session that was interrupted or broke keeps its exit status."""
    assert session.ending(session.Session(required=True), status) == (status, "")


def test_many_failing_rows(tmp_path: Path) -> None:
    """At most 64 rows are saved, and the sentence says of how many."""
    case = _case("many", rows=100)
    case.recorded[0]["raw_indices"][10:, 1] = 5
    verdict = judge.check(case)
    kept = saved.save_failing(verdict, case, tmp_path)
    assert kept is not None
    assert kept[1] == "rows 10 11 12 13 and 60 more, of 90 that fail, 4 KiB"
    assert len(store.load(kept[0]).inputs["scores"]) == 64


def test_odd_name(tmp_path: Path) -> None:
    """A name that no file can have is written without its odd characters."""
    kept = saved.save_failing(judge.check(_wrong()), _wrong("layer 3/decode"), tmp_path)
    assert kept is not None
    assert kept[0].match("layer-3-decode-*.safetensors")


def test_again_quotes() -> None:
    """The command can be pasted into a shell."""
    assert saved.again("/cases/a b.safetensors", contract="order=any ties=any") == (
        "equivalence replay '/cases/a b.safetensors' --contract 'order=any ties=any'"
    )


def test_again_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate in a folder below the working directory is named with the path it needs."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "my_kernels.py").write_text("def fast(): ...\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "tests")
    candidate.load("my_kernels:fast")
    again = saved.again(tmp_path / "a.safetensors", candidate="my_kernels:fast")
    monkeypatch.delitem(sys.modules, "my_kernels")
    assert again == "PYTHONPATH=tests equivalence replay a.safetensors --candidate my_kernels:fast"


def test_op(pytester: pytest.Pytester, tests: Run) -> None:
    """Only case files of the op that was asked for are tests."""
    _store(pytester.path / "cases", _case("one"))
    tests("--equivalence-op=ragged_topk", "cases").assert_outcomes(passed=1)
    assert tests("--equivalence-op=qsa_logits", "cases").ret == pytest.ExitCode.NO_TESTS_COLLECTED


_TELLING = """
    from equivalence import receipt
    from refimpl.topk import ragged_topk

    def told(**call):
        receipt.leave("kernels.told", rows=len(call["scores"]))
        return ragged_topk(**call)

    def drops(**call):
        picks = ragged_topk(**call)
        if len(picks) > 2:
            picks[2:] = picks[2:].roll(1, 1)
        return picks
"""


def test_a_required_path(pytester: pytest.Pytester, tests: Run) -> None:
    """A candidate that ran another kernel than the one required is undecided."""
    _store(pytester.path / "cases", _case("one"))
    pytester.makepyfile(telling=_TELLING)
    options = ("cases", "--equivalence-candidate=telling:told")
    tests(*options, "--equivalence-require-path=kernels").assert_outcomes(passed=1)
    result = tests(*options, "--equivalence-require-path=deep_gemm")
    result.assert_outcomes(failed=1)
    reading = "no call of deep_gemm was told of, and it is required; it was kernels.told"
    result.stdout.fnmatch_lines([f"*{reading}*", "*--require-path deep_gemm*"])


def test_recorded_runs_need_no_required_path(pytester: pytest.Pytester, tests: Run) -> None:
    """The option asks something of candidates alone."""
    _store(pytester.path / "cases", _case("one"))
    tests("cases", "--equivalence-require-path=deep_gemm").assert_outcomes(passed=1)


def test_row_count_invariance_by_the_fixture(pytester: pytest.Pytester, tests: Run) -> None:
    """The session's candidate is called in many ways, and what changes with the rows fails."""
    pytester.makepyfile(telling=_TELLING)
    pytester.makepyfile(
        test_rows="""
        from equivalence import generate

        def test_rows(equivalence):
            equivalence.assert_row_count_invariant(generate.ragged_topk(0))
        """
    )
    result = tests("test_rows.py", "--equivalence-candidate=telling:told")
    result.assert_outcomes(passed=1)
    assert "all equal" in _section(result)[-1]
    result = tests("test_rows.py", "--equivalence-candidate=telling:drops")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*row-variance*"])


def test_row_count_invariance_of_nothing(pytester: pytest.Pytester, tests: Run) -> None:
    """Without a candidate there is nothing to call, and one sentence says so."""
    pytester.makepyfile(
        test_rows="""
        from equivalence import generate

        def test_rows(equivalence):
            equivalence.assert_row_count_invariant(generate.ragged_topk(0))
        """
    )
    result = tests("test_rows.py")
    result.stdout.fnmatch_lines(["*UsageError: row-count invariance of what? give a candidate"])


_COUNTED = """
    from refimpl.topk import ragged_topk

    def short(**call):
        picks = ragged_topk(**call)
        if len(picks) > 2:
            picks[2] = -1
        return picks
"""


def test_rows_that_pass_alone_keep_their_case(pytester: pytest.Pytester, tests: Run) -> None:
    """A fault of the row count is saved with all rows, so that the command shows it again."""
    pytester.makepyfile(counted=_COUNTED)
    pytester.makepyfile(
        test_rows="""
        import counted
        from equivalence import generate

        def test_rows(equivalence):
            equivalence.assert_equivalent(generate.ragged_topk(0), counted.short)
        """
    )
    result = tests("test_rows.py")
    (kept,) = (pytester.path / ".equivalence").glob("*.safetensors")
    result.stdout.fnmatch_lines(["*saved *(all rows: those that fail pass alone, *"])
    case = store.load(kept)
    assert len(case.inputs["row_start"]) == 9
    _store(pytester.path / "cases", case)
    result = tests("cases", "--equivalence-candidate=counted:short")
    # Under CI pytest prints the message a second time, in its summary.
    (again,) = {
        line.strip("E ") for line in result.outlines if line.strip("E ").startswith("again")
    }
    assert again.split("replay ")[1].startswith("cases/")
    assert "--rows" not in again
