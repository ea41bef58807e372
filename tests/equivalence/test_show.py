"""Show: a case in words, in lines that are safe to print."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from tiny import ints

from equivalence import generate, show
from equivalence.case import Space
from equivalence.report import tables

MESSAGES = Path(__file__).parents[1] / "messages"


def test_a_case_is_shown_whole() -> None:
    """Tensors, spaces, windows, what it hunts and where it comes from, line by line."""
    case = tiny.pages(
        spaces={"page_indices": Space(kind="slot", pad=-1)},
        contract="order=any",
        flags=frozenset({"short-rows"}),
        provenance={"device": "NVIDIA H200", "poison.raw_indices": "-7"},
        reference={"logits": "00ff"},
    )
    case = tiny.swap(
        case,
        row_end=ints(32, 31, 14, 3),
        scores=tiny.scores().t().contiguous().t(),
    )
    text = "\n".join(show.lines(case)) + "\n"
    assert text == (MESSAGES / "show.txt").read_text(encoding="utf-8")


def test_a_case_without_rows_or_picks_is_shown() -> None:
    """Nothing is said of windows that are not there."""
    case = tiny.swap(
        tiny.qsa(),
        q=tiny.qsa().inputs["q"][:0],
        visible_blocks=ints(0)[:0],
        query_start_loc=ints(0, 0, 0),
    )
    lines = list(show.lines(case))
    assert lines[0] == "qsa   qsa_logits   0 rows"
    assert not any("windows" in line for line in lines)


def test_pages_of_ranks_are_shown_as_that() -> None:
    """Ranks and a step, no windows; bytes are the reference's to judge."""
    case = generate.compose_pages(0, kinds=["index"])
    lines = list(show.lines(case))
    assert lines[0] == "compose_pages cold seed 0   compose_pages   4 ranks"
    assert lines[2] == "  arithmetic  none: the reference's bytes judge"
    assert lines[-2:] == [
        "  kinds       index, 3 layers each",
        "  step        3 requests, 9 slots, 14 pages",
    ]


def test_what_a_file_says_cannot_steer_the_terminal() -> None:
    """Names, provenance and flags are escaped and cut."""
    case = tiny.topk(
        name="a\x1bb",
        flags=frozenset({"odd\x07"}),
        provenance={"origin\n": "\x1b[2J" + "x" * 1000},
    )
    lines = list(show.lines(case))
    assert lines[0].startswith("a\\x1bb   ragged_topk")
    assert "  hunts       odd\\x07: nothing that is known" in lines
    assert all(line.isprintable() and len(line) < 500 for line in lines)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3), "float32        [2, 3]               24 bytes"),
        (torch.zeros(3, 2).t(), "float32        [2, 3]               24 bytes  strides [1, 2]"),
        (torch.zeros(0, dtype=torch.int8), "int8           [0]                  0 bytes"),
    ],
)
def test_a_tensor_in_words(tensor: torch.Tensor, text: str) -> None:
    """Dtype, shape, size, and strides where it is not packed."""
    assert show.describe(tensor) == text


def test_the_readme_is_a_table_of_cases(tmp_path: Path) -> None:
    """One row a case; what a file says stays in its cell."""
    named = replace(
        tiny.topk("a|b"),
        flags=frozenset({"short-rows"}),
        provenance={"kernel_topk": "x | y\n"},
    )
    empty = tiny.swap(
        tiny.topk("none", recorded=()),
        scores=tiny.scores()[:0],
        row_start=ints(0)[:0],
        row_end=ints(0)[:0],
    )
    text = tables.fixtures_readme(tmp_path / "cases", [named, tiny.qsa(), empty])
    assert "| a\\|b | `ragged_topk` | 4 | 32 | 8 | x \\| y\\n | short-rows |\n" in text
    assert "| qsa | `qsa_logits` | 4 | 8 |  |  |  |\n" in text
    assert "| none | `ragged_topk` | 0 | 0 | 8 |  |  |\n" in text
    assert "one file a case under `cases/`" in text
