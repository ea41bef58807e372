"""Lint: one line for each thing wrong with the files of a folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import ints

from equivalence import lint
from equivalence.errors import UsageError

EXPECTED = """
[{name}]
status = "DIFFERENT"
stages = ["raw_indices"]
rule = "lost-winner"
rows = 1
runs = 1
kernel = "x"
reason = "y"
link = "z"
"""


def test_good_cases_have_no_problem(tmp_path: Path) -> None:
    """Cases of every kind, a foreign file and an expectation of a case: nothing to say."""
    for case in (tiny.topk(), tiny.pages(name="p"), tiny.decode(), tiny.prefill(), tiny.qsa()):
        tiny.put(tmp_path / "cases", case)
    tiny.write(tmp_path / "cases" / "foreign.safetensors", {}, b"")
    (tmp_path / "expected.toml").write_text(EXPECTED.format(name="tiny"), encoding="utf-8")
    assert list(lint.problems([tmp_path])) == []


def test_a_foreign_file_is_a_problem_where_it_was_named(tmp_path: Path) -> None:
    """Who names a file says that it is a case."""
    path = tmp_path / "foreign.safetensors"
    tiny.write(path, {}, b"")
    sentence = f"{path}: no case: its metadata has no key `equivalence`"
    assert list(lint.problems([path])) == [sentence]


def test_broken_rows_are_counted_after_eight(tmp_path: Path) -> None:
    """A file of a thousand broken rows does not print a thousand lines."""
    rows = 20
    case = tiny.topk(
        inputs={
            "scores": tiny.scores(rows=rows),
            "row_start": ints(*[9] * rows),
            "row_end": ints(*[3] * rows),
        },
        recorded=(),
    )
    path = tiny.put(tmp_path, case)
    lines = list(lint.problems([path]))
    assert lines[:1] == [f"{path}: row 0: row_end 3 is before row_start 9"]
    assert lines[8:] == [f"{path}: 12 more rows are broken"]


def test_a_case_without_rows_is_a_problem(tmp_path: Path) -> None:
    """Nothing could ever be judged of it."""
    none = ints(0)[:0]
    case = tiny.topk(
        inputs={"scores": tiny.scores()[:0], "row_start": none, "row_end": none}, recorded=()
    )
    path = tiny.put(tmp_path, case)
    assert list(lint.problems([tmp_path])) == [f"{path}: holds no row"]


def test_what_the_reference_cannot_compute_is_a_problem(tmp_path: Path) -> None:
    """An arithmetic of another kernel is found without computing a score."""
    case = replace(tiny.prefill(), arithmetic="vllm_qsa_prefill.sm90")
    path = tiny.put(tmp_path, case)
    sentence = "arithmetic is 'vllm_qsa_prefill.sm90', which computes no mqa logits"
    assert list(lint.problems([tmp_path])) == [f"{path}: {sentence}"]


def test_every_byte_is_read(tmp_path: Path) -> None:
    """A flipped bit of a tensor is found although nothing is judged."""
    path = tiny.put(tmp_path, tiny.topk())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    sentence = "recorded.0.raw_indices is not what was stored: its digest differs"
    assert list(lint.problems([tmp_path])) == [f"{path}: {sentence}"]


def test_expectations_are_read_too(tmp_path: Path) -> None:
    """An expectation of no case, and a file that holds none, are problems."""
    tiny.put(tmp_path, tiny.topk())
    expected = tmp_path / "expected.toml"
    expected.write_text(EXPECTED.format(name="gone"), encoding="utf-8")
    assert list(lint.problems([tmp_path])) == [
        f"{tmp_path}: expected.toml expects something of 'gone', which is no case here"
    ]
    expected.write_text("[a", encoding="utf-8")
    (line,) = lint.problems([tmp_path])
    assert line.startswith(f"{expected}: ")


def test_a_path_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    """Lint of nothing is no success."""
    with pytest.raises(UsageError, match="does not exist"):
        list(lint.problems([tmp_path / "x"]))
