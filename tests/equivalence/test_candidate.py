"""Candidates by name, with settings, and named again."""

from functools import partial

import pytest

from equivalence import candidate
from equivalence.errors import UsageError

NAME = "textwrap:indent"


def test_settings_are_bound_as_numbers_words_and_text() -> None:
    """Each value is a whole number, true, false, none or text."""
    found = candidate.load(f"{NAME},a=65536,b=-3,c=true,d=false,e=none,f=torch,g=")
    assert isinstance(found, partial)
    assert found.keywords == {
        "a": 65536,
        "b": -3,
        "c": True,
        "d": False,
        "e": None,
        "f": "torch",
        "g": "",
    }


@pytest.mark.parametrize("name", [NAME, f"{NAME},a=1,b=true,c=none,d=v4.1"])
def test_what_is_loaded_by_name_is_named_so_again(name: str) -> None:
    """The command in a report loads the same candidate."""
    assert candidate.name_of(candidate.load(name)) == name


@pytest.mark.parametrize(
    "bound",
    [
        partial(print, "positional"),
        partial(print, end=","),
        partial(print, end=b"bytes"),
        partial(print, end="1"),
        partial(print, end="none"),
        partial(lambda **_: None, end=1),
    ],
)
def test_what_no_name_can_say_has_none(bound: partial[None]) -> None:
    """A value that would be read as another one is not told as a command."""
    assert candidate.name_of(bound) == ""


@pytest.mark.parametrize("setting", ["width", "=1", "a b=1", ""])
def test_a_setting_is_key_and_value(setting: str) -> None:
    """Anything else is one sentence."""
    with pytest.raises(UsageError) as caught:
        candidate.load(f"{NAME},{setting}")
    assert str(caught.value) == f"candidate '{NAME},{setting}': {setting!r} is not key=value"
