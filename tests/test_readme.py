"""The README says what happens: its code runs, its outputs are the real ones, its links lead on."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch._inductor.test_operators  # noqa: F401 - it can be imported once a process

import equivalence.paths.chunked  # noqa: F401 - likewise, with what it is made of
from equivalence import cli, ops
from equivalence.paths.ipc.faulty import FAULTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block(text: str) -> str:
    """The python block of the page that holds this text."""
    (found,) = (code for code in blocks("python") if text in code)
    return found


@pytest.fixture
def example(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], pytest.RunResult]:
    """Run the page's test beside the shipped cases, with a piece of the kernel replaced."""

    def run(old: str = "", new: str = "") -> pytest.RunResult:
        kernel, test, *_ = blocks("python")
        (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
        assert old in kernel
        pytester.makepyfile(my_kernels=kernel.replace(old, new) if old else kernel)
        pytester.makepyfile(test_my_kernels=test)
        pytester.syspathinsert()
        monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
        return pytester.runpytest_inprocess("test_my_kernels.py")

    return run


def test_the_readmes_test_passes(example: Callable[..., pytest.RunResult]) -> None:
    """The example is copied from the page and judges the shipped case and four generated ones."""
    example().assert_outcomes(passed=5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- row_start[:, None]", ""),
        ("(column < row_start[:, None]) |", ""),
        ("| (column >= row_end[:, None])", ""),
        ("torch.where(visible <= k, slot, best)", "best"),
        (".masked_fill(slot >= visible, -1)", ""),
    ],
)
def test_the_readmes_test_catches_each_thing_left_out(
    example: Callable[..., pytest.RunResult], old: str, new: str
) -> None:
    """Every part of the kernel on the page is needed."""
    assert example(old, new).parseoutcomes()["failed"] >= 1


def test_the_readmes_failure_is_what_a_bfloat16_kernel_gets(
    example: Callable[..., pytest.RunResult],
) -> None:
    """The message on the page is the one the same test prints for a kernel that rounds."""
    result = example("scores.masked_fill", "scores.bfloat16().masked_fill")
    printed = [line.removeprefix("E").strip() for line in result.outlines]
    want = next(block for block in blocks("text") if block.startswith("NotEquivalent"))
    wanted = [line.strip() for line in want.splitlines() if line and not line.startswith("  [")]
    assert [line for line in wanted if not any(line in each for each in printed)] == []


def test_the_readmes_replay_is_the_real_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make replay` prints what the page shows, which leaves cases out where it has three dots."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["replay", "fixtures/cases"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    (console,) = (block for block in blocks("console") if "$ make replay" in block)
    shown = console.partition("$ make replay\n")[2].split("...\n")
    at = [printed.find(part) for part in shown]
    assert at == sorted(at)
    assert (at[0], printed.endswith(shown[-1])) == (0, True)


def test_the_readmes_bounded_path_is_right_and_keeps_its_memory(pytester: pytest.Pytester) -> None:
    """The second test on the page judges five recorded layers and two generated ones."""
    (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
    pytester.makepyfile(test_bounded=block("chunked"))
    pytester.runpytest_inprocess("test_bounded.py").assert_outcomes(passed=9)


def test_the_readmes_bounded_path_fails_where_it_rounds(pytester: pytest.Pytester) -> None:
    """A selection by bfloat16 logits is caught on a recorded layer."""
    (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
    pytester.makepyfile(
        rounding="""
        from equivalence.paths import parts

        def select(*, scores, column, visible, out):
            rounded = scores.bfloat16().float()
            parts.reference_topk(scores=rounded, column=column, visible=visible, out=out)
        """
    )
    page = block("chunked").replace("budget_bytes=4_096", "selector=select")
    pytester.makepyfile(test_bounded="from rounding import select\n" + page)
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("test_bounded.py", "-k", "prefill-causal")
    result.assert_outcomes(failed=1, deselected=8)


def test_the_readmes_bounded_path_fails_where_it_takes_more(pytester: pytest.Pytester) -> None:
    """A thousandth of the memory is not enough, and that is said."""
    (pytester.path / "fixtures").symlink_to(ROOT / "fixtures")
    pytester.makepyfile(test_bounded=block("chunked").replace("64 << 20", "64 << 10"))
    result = pytester.runpytest_inprocess("test_bounded.py", "-k", "prefill_indexer and bounded_p")
    result.assert_outcomes(failed=2, deselected=7)
    result.stdout.fnmatch_lines(["*want*transient*at most 64 KiB*"])


def test_the_readmes_comparison_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The first command of its console ends well."""
    console = next(block for block in blocks("console") if "equivalence ab" in block)
    command = console.split("\n$ ")[0].removeprefix("$ equivalence ").replace("\\\n", " ")
    with pytest.raises(SystemExit) as exit_:
        cli.main(command.split())
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("ab prefill_indexer: 2 layer-forwards, EQUAL\n")


def test_the_readmes_figures_are_those_of_the_results() -> None:
    """What the page says of the H200 is in docs/results.md."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for figure in ("29.80", "207,729", "2,940,928", "207,974", "| 200 | 200 | 200 |"):
        assert figure in results
        assert figure in README or figure.startswith("|")


def test_the_readmes_families_name_ops() -> None:
    """What stands in the table's column of ops is an op, and every kind of result has one."""
    table = README[README.index("| family |") : README.index("Each page has the formula")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named <= set(ops.OPS)
    assert {"prefill_indexer", "publish_mask", "qsa_indexer", "quantize_k", "merge_topk"} <= named


@pytest.mark.xdist_group("ranks")
def test_the_readmes_composition_is_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight processes print what the page shows."""
    (console,) = (block for block in blocks("console") if "equivalence compose" in block)
    command, _, shown = console.partition("\n")
    with pytest.raises(SystemExit) as exit_:
        cli.main(command.removeprefix("$ equivalence ").split())
    assert exit_.value.code == 0
    assert capsys.readouterr().out == shown


@pytest.mark.xdist_group("ranks")
def test_the_readmes_exchange_runs_on_ranks(pytester: pytest.Pytester) -> None:
    """Four processes; with other bytes it fails."""
    pytester.makepyfile(test_my_exchange=block("mark.ranks"))
    pytester.runpytest_subprocess("test_my_exchange.py").assert_outcomes(passed=1)
    wrong = block("mark.ranks").replace("copy_(tokens[link.rank])", "fill_(link.rank)")
    pytester.makepyfile(test_my_exchange=wrong)
    pytester.runpytest_subprocess("test_my_exchange.py").assert_outcomes(failed=1)


def test_the_readmes_late_ranks_are_those_that_change_nothing() -> None:
    """Of all faults on demand, and one of the others is named."""
    section = README[README.index("## Ranks that share pages") : README.index("## Families")]
    late = [name for name, fault in FAULTS.items() if not fault.rules]
    assert f"`{late[0]}`, `{late[1]}` and `{late[2]}` only make a rank late" in section
    assert len(late) == 3
    assert set(re.findall(r"`--fault ([\w-]+)", section)) == {"row-zero"}
