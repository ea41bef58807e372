"""Text from outside is escaped and cut before it is printed."""

import pytest

from equivalence import plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zürich 漢字 row 3", "Zürich 漢字 row 3"),
        ("a\x1b[2Jb\n\tc\x9b", "a\\x1b[2Jb\\n\\tc\\x9b"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\udcff", "\\udcff"),
        ("x" * 12, "xxxxxxxxxx... (12 characters)"),
    ],
)
def test_a_line_is_printable_and_short(text: str, shown: str) -> None:
    """Control, direction and surrogate characters become escapes; the rest is cut."""
    assert plain.line(text, most=10 if text.startswith("x") else 40) == shown


def test_a_block_keeps_its_lines() -> None:
    """Line ends stay; nothing is cut."""
    assert plain.block("a\n\x07b\n" + "x" * 999) == "a\n\\x07b\n" + "x" * 999
