"""Are the picks of an indexer still the same, only tied, or wrong?"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivalence.ab import shadow as shadow
    from equivalence.capture import record as record
    from equivalence.case import Case as Case
    from equivalence.case import Space as Space
    from equivalence.contract import Contract as Contract
    from equivalence.errors import InvalidCase as InvalidCase
    from equivalence.errors import NotEquivalent as NotEquivalent
    from equivalence.errors import Undecided as Undecided
    from equivalence.errors import UsageError as UsageError
    from equivalence.identical import assert_ranks_identical as assert_ranks_identical
    from equivalence.invariance import assert_row_count_invariant as assert_row_count_invariant
    from equivalence.judge import assert_equivalent as assert_equivalent
    from equivalence.judge import check as check
    from equivalence.store import load_cases as load_cases
    from equivalence.verdict import Finding as Finding
    from equivalence.verdict import Status as Status
    from equivalence.verdict import Verdict as Verdict

_HOME = {
    "Case": "case",
    "Contract": "contract",
    "Finding": "verdict",
    "InvalidCase": "errors",
    "NotEquivalent": "errors",
    "Space": "case",
    "Status": "verdict",
    "Undecided": "errors",
    "UsageError": "errors",
    "Verdict": "verdict",
    "assert_equivalent": "judge",
    "assert_ranks_identical": "identical",
    "assert_row_count_invariant": "invariance",
    "check": "judge",
    "load_cases": "store",
    "record": "capture",
    "shadow": "ab",
}
__all__ = tuple(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name in _HOME:
        return getattr(import_module(f"equivalence.{_HOME[name]}"), name)
    raise AttributeError(f"module 'equivalence' has no attribute {name!r}")
