"""Flags of cases: a closed set, each with the fault it hunts, in fixtures/flags.toml."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from equivalence.errors import UsageError


@cache
def fixtures_dir() -> Path:
    """The folder of the shipped fixtures: inside the installed package, else beside it.

    Raises:
        UsageError: this installation has none.
    """
    here = Path(__file__).parent
    for place in (here / "fixtures", here.parent / "fixtures"):
        if (place / "flags.toml").is_file():
            return place
    raise UsageError("this installation has no fixtures: install the wheel, or work in a clone")


@cache
def known() -> Mapping[str, str]:
    """Every flag and what it hunts."""
    text = (fixtures_dir() / "flags.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text))
