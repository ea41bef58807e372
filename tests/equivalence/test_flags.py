"""Flags: a closed set beside the shipped cases."""

from pathlib import Path

import pytest

from equivalence import flags
from equivalence.errors import UsageError


def test_every_flag_says_what_it_hunts() -> None:
    """A flag is a name with hyphens and one sentence."""
    assert {"exact-ties", "short-rows"} <= set(flags.known())
    assert all(name.replace("-", "").isalpha() and what for name, what in flags.known().items())


def test_an_installation_without_fixtures_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that says where they come from."""
    monkeypatch.setattr(flags, "__file__", str(tmp_path / "equivalence" / "flags.py"))
    with pytest.raises(UsageError, match="this installation has no fixtures"):
        flags.fixtures_dir.__wrapped__()
