"""What a user meets: wrong use, a bad file, picks that differ, nothing that could be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivalence.verdict import Verdict


class UsageError(ValueError):
    """The call or command line is wrong; the sentence says what would be right."""


class InvalidCase(ValueError):  # noqa: N818 - the name users catch says what the file is
    """A case file or recording cannot be read, or contradicts itself."""


class NotEquivalent(AssertionError):  # noqa: N818 - reads as the finding in a test report
    """A judged candidate or record differs; `verdict` holds the evidence."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        """Keep the rendered message and the verdict it was rendered from."""
        super().__init__(message)
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[NotEquivalent], tuple[str, Verdict]]:
        """Pickle with the verdict, so that a worker process can hand it on."""
        return type(self), (str(self), self.verdict)


class Undecided(NotEquivalent):
    """Nothing was shown either way; that fails a test as a difference does."""
