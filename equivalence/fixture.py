"""The fixture: the functions of `equivalence`, bound to what a test session asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from equivalence import session
from equivalence.errors import UsageError
from equivalence.verdict import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from equivalence.candidate import Candidate
    from equivalence.case import Case
    from equivalence.contract import Contract


@dataclass(frozen=True, kw_only=True, eq=False)
class Equivalence:
    """The functions of `equivalence` in a test, bound to the session's options and its summary.

    A candidate, contract or device that a call leaves out is the one of the command line.
    """

    session: session.Session = field(repr=False)

    def check(
        self,
        case: Case,
        candidate: Candidate | None = None,
        *,
        baseline: Candidate | None = None,
        contract: Contract | str | None = None,
        device: torch.device | str | None = None,
        repeats: int = 1,
        max_transient: int | None = None,
    ) -> Verdict:
        """Judge one case, as `equivalence.check` does, and count the verdict."""
        __tracebackhide__ = True
        verdict = self._judged(
            case,
            candidate=self.session.candidate if candidate is None else candidate,
            baseline=baseline,
            contract=contract,
            device=device,
            repeats=repeats,
            max_transient=max_transient,
        )
        session.tell(verdict, self.session.properties)
        return verdict

    def _judged(
        self,
        case: Case,
        *,
        candidate: Candidate | None,
        contract: Contract | str | None,
        device: torch.device | str | None,
        **rest: Any,  # noqa: ANN401 - passed on by name
    ) -> Verdict:
        """Judge a case with what the session asks for, where the call left it out."""
        from equivalence.judge import check  # noqa: PLC0415 - torch is imported on use

        return check(
            case,
            candidate,
            contract=self.session.contract if contract is None else contract,
            device=self.session.device if device is None else device,
            require_path=self.session.require_path if candidate is not None else (),
            **rest,
        )

    def assert_equivalent(
        self,
        case: Case,
        candidate: Candidate | None = None,
        *,
        baseline: Candidate | None = None,
        contract: Contract | str | None = None,
        device: torch.device | str | None = None,
        repeats: int = 1,
        max_transient: int | None = None,
    ) -> Verdict:
        """Judge one case, as `equivalence.assert_equivalent` does, and save the rows that fail."""
        __tracebackhide__ = True
        from equivalence.judge import raise_unless_equal  # noqa: PLC0415 - torch is imported on use

        judged = self.session.candidate if candidate is None else candidate
        judge = partial(
            self._judged,
            candidate=judged,
            baseline=baseline,
            contract=contract,
            device=device,
            repeats=repeats,
            max_transient=max_transient,
        )
        verdict = judge(case)
        session.tell(verdict, self.session.properties)
        if verdict.status is not Status.EQUAL:
            given = self.session.contract if contract is None else str(contract)
            bound = self.session.name if candidate is None else verdict.candidate or None
            message = session.why(
                self.session,
                verdict,
                case,
                name=None if baseline is not None else bound,
                contract=given,
                repeats=repeats,
                max_transient=max_transient,
                still=None if judged is None else lambda part: judge(part).status is verdict.status,
            )
            raise_unless_equal(verdict, message=message)
        return verdict

    def assert_row_count_invariant(
        self,
        case: Case,
        candidate: Candidate | None = None,
        *,
        rows: Sequence[int] | None = None,
        contract: Contract | str | None = None,
        baseline: Candidate | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        repeats: int = 2,
    ) -> Verdict:
        """Judge one case as `equivalence.assert_row_count_invariant` does, and count it.

        Raises:
            UsageError: neither this call nor the session names a candidate.
        """
        __tracebackhide__ = True
        from equivalence import invariance, judge  # noqa: PLC0415 - torch is imported on use
        from equivalence.report import as_text  # noqa: PLC0415 - likewise

        called = self.session.candidate if candidate is None else candidate
        if called is None:
            raise UsageError("row-count invariance of what? give a candidate")
        verdict = invariance.check_row_count(
            case,
            called,
            rows=rows,
            contract=self.session.contract if contract is None else contract,
            baseline=baseline,
            device=self.session.device if device is None else device,
            seed=seed,
            repeats=repeats,
        )
        short = invariance.in_short(verdict)
        session.tell(short, self.session.properties)
        judge.raise_unless_equal(verdict, message=as_text.failure(short))
        return verdict

    def load_cases(self, *paths: Path | str, op: str | None = None) -> list[Case]:
        """Cases of files and folders, as `equivalence.load_cases` finds them."""
        __tracebackhide__ = True
        from equivalence.store import load_cases  # noqa: PLC0415 - torch is imported on use

        return load_cases(*paths, op=op)
