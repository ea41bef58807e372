"""The README says what happens: its code runs, its outputs and tables are the real ones."""

import re
from pathlib import Path

import pytest

from equivalence import cli, tables
from equivalence.contract import FREEDOMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def freedoms() -> str:
    """The table of contract keys."""
    rows = [("key", "values"), ("---", "---")]
    rows += [(f"`{key}`", " ".join(f"`{v}`" for v in values)) for key, values in FREEDOMS.items()]
    rows += [("`reserved_pages`", "`1` or any number of pages that hold no key")]
    return "".join(f"| {key} | {values} |\n" for key, values in rows)


def test_the_readmes_test_passes(pytester: pytest.Pytester) -> None:
    """The example is copied from the page, and run beside the shipped cases."""
    (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
    pytester.makepyfile(test_my_topk=blocks("python")[0])
    result = pytester.runpytest_inprocess("test_my_topk.py")
    result.assert_outcomes(passed=1)


def test_the_readmes_failure_is_what_a_bfloat16_kernel_gets(pytester: pytest.Pytester) -> None:
    """The message on the page is the one the same test prints for a kernel that rounds."""
    (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
    source = blocks("python")[0].replace("scores.topk(k)", "scores.bfloat16().topk(k)")
    pytester.makepyfile(test_my_topk=source)
    result = pytester.runpytest_inprocess("test_my_topk.py")
    result.assert_outcomes(failed=1)
    printed = [line.removeprefix("E").strip() for line in result.outlines]
    want = next(block for block in blocks("text") if block.startswith("NotEquivalent"))
    wanted = [line.strip() for line in want.splitlines() if line and not line.startswith("  [")]
    assert [line for line in wanted if not any(line in each for each in printed)] == []


def test_the_readmes_replay_is_the_real_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make replay` prints what the page shows."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["replay", "fixtures/cases"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert f"$ make replay\n{printed}" in README
    assert blocks("text")[0].splitlines()[-1] == printed.splitlines()[-1]


def test_the_readmes_tables_are_generated() -> None:
    """Ops, freedoms and documented contracts come from the code."""
    for table in (tables.of_ops(), freedoms(), tables.of_contracts()):
        assert table in README
