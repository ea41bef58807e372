"""expected.toml: which recorded runs are known to be wrong; an entry that no longer holds fails."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivalence import plain
from equivalence.errors import UsageError
from equivalence.verdict import RULES, Status, Verdict

FILE = "expected.toml"
_FIELDS = {
    "status": str,
    "stages": list,
    "rule": str,
    "rows": int,
    "runs": int,
    "kernel": str,
    "reason": str,
    "link": str,
}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What is known of the recorded runs of one case.

    Attributes:
        case: its name.
        status: DIFFERENT; what is undecided has to be mended, not expected.
        stages: outputs that fail, all of them.
        rule: the one rule they fail by.
        rows: failing rows of each run and stage.
        runs: how many runs fail so.
        kernel: the version that was recorded.
        reason: why, in one sentence.
        link: a public report.
    """

    case: str
    status: str
    stages: tuple[str, ...]
    rule: str
    rows: int
    runs: int
    kernel: str
    reason: str
    link: str


def read(path: Path) -> Mapping[str, Expectation]:
    """The expectations of a file, by case.

    Raises:
        UsageError: the file is not one of expectations.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(plain.line(f"{path}: {error}")) from error
    return {name: _entry(path, name, fields) for name, fields in table.items()}


def _entry(path: Path, name: str, fields: Any) -> Expectation:  # noqa: ANN401 - untrusted TOML
    if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
        have = f"has the fields {', '.join(_FIELDS)}, no more, no fewer"
        raise UsageError(plain.line(f"{path}: [{name}] {have}"))
    wrong = [
        f"{key} is not {kind.__name__}"
        for key, kind in _FIELDS.items()
        if type(fields[key]) is not kind
    ]
    if not wrong:
        stages = fields["stages"]
        wrong += (
            [] if all(isinstance(s, str) for s in stages) else ["stages is not a list of texts"]
        )
        wrong += [] if fields["status"] == "DIFFERENT" else ["status is not DIFFERENT"]
        wrong += [] if fields["rule"] in RULES else [f"rule {fields['rule']!r} is none"]
    for sentence in wrong:
        raise UsageError(plain.line(f"{path}: [{name}] {sentence}"))
    return Expectation(case=name, **{**fields, "stages": tuple(fields["stages"])})


def beside(paths: Iterable[Path]) -> Mapping[Path, Mapping[str, Expectation]]:
    """The expectations that stand in or above the folders of these case files, by that folder."""
    found: dict[Path, Mapping[str, Expectation]] = {}
    for folder in {folder_of(path) for path in paths}:
        for place in (folder, folder.parent):
            if (place / FILE).is_file():
                found[folder] = read(place / FILE)
                break
    return found


def folder_of(path: Path) -> Path:
    """The folder a case file is named in; a link counts where it stands."""
    return path.parent.resolve()


def holds(expectation: Expectation, verdict: Verdict) -> bool:
    """Whether a verdict is exactly what was expected, run by run."""
    wrong = [
        {name: stage for name, stage in run.stages.items() if stage.status is not Status.EQUAL}
        for run in verdict.runs
    ]
    wrong = [stages for stages in wrong if stages]
    found = {name for stages in wrong for name in stages}
    rules = [dict(stage.rules) for stages in wrong for stage in stages.values()]
    return (
        verdict.status.value == expectation.status
        and len(wrong) == expectation.runs
        and found == set(expectation.stages)
        and all(each == {expectation.rule: expectation.rows} for each in rules)
        and all(finding.rule == expectation.rule for finding in verdict.findings)
    )


def mark(verdict: Verdict, expectation: Expectation | None) -> Verdict:
    """The verdict, marked as foreseen, or DIFFERENT because what was foreseen no longer holds."""
    if expectation is None or verdict.candidate:
        return verdict
    if holds(expectation, verdict):
        return replace(verdict, expected=True, note=f"{expectation.reason} {expectation.link}")
    note = (
        f"expected {expectation.status} {expectation.rule} in {expectation.rows} rows of"
        f" {expectation.runs} runs, and that no longer holds"
    )
    return replace(verdict, status=Status.DIFFERENT, note=note)


def names_near(folder: Path) -> list[str]:
    """The case files that the expectations of a folder may speak of: all below where they stand."""
    home = folder if (folder / FILE).is_file() else folder.parent
    return [path.stem for path in home.rglob("*.safetensors")]


def unnamed(expectations: Mapping[str, Expectation], cases: Sequence[str]) -> list[str]:
    """Expectations that name no case."""
    return [name for name in expectations if name not in cases]
