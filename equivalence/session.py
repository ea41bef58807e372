"""A test session: what was asked for, its verdicts, and how it ends; torch is imported on use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from equivalence import header, plain
from equivalence.candidate import load as load_candidate
from equivalence.errors import InvalidCase, UsageError
from equivalence.verdict import Status, Verdict, run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equivalence.candidate import Candidate
    from equivalence.case import Case

PROPERTY = "equivalence"
FOLDER = ".equivalence"
RECORDED, CANDIDATE = "recorded", "candidate"
ITEMS = (f"::{RECORDED}", f"::{CANDIDATE}")
"""How the tests of case files end."""
PASSED, FAILED, USAGE, NOTHING_COLLECTED = 0, 1, 4, 5
STRUCTURAL = "no row of any case selects: every window fits into k, so nothing was tested"


@dataclass(kw_only=True, eq=False)
class Session:
    """What was asked for, and what came of it so far.

    Attributes:
        candidate: judged instead of recorded runs.
        name: how the candidate was named, or "".
        contract: as text; None is each case's own, or strict for a candidate.
        device: where inputs go and the reference runs; None leaves them where they are.
        op: the only op whose case files are judged.
        require_path: kernels that each call of a candidate must have run.
        required: whether a session without a case fails.
        folder: where failing rows are saved; None saves nothing.
        verdicts: by test.
        alone: `.safetensors` files that are no case.
        properties: of the test that runs now; verdicts are attached there.
    """

    candidate: Candidate | None = None
    name: str = ""
    contract: str | None = None
    device: str | None = None
    op: str | None = None
    require_path: tuple[str, ...] = ()
    required: bool = False
    folder: Path | None = None
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    properties: list[tuple[str, object]] = field(default_factory=list)


def start(
    *,
    candidate: str | None,
    contract: str | None,
    device: str | None,
    op: str | None,
    require_path: Sequence[str],
    require_cases: bool,
    save: str | None,
    root: Path,
) -> Session:
    """Read the options.

    Args:
        candidate: MODULE:FUNCTION.
        contract: as `Contract.parse` reads it.
        device: a torch device by name.
        op: the only op whose case files are judged.
        require_path: kernels that each call of a candidate must have run.
        require_cases: whether a case must run.
        save: a folder, `off`, or None for FOLDER under `root`.
        root: the root of the project under test.

    Raises:
        UsageError: in one sentence.
    """
    if contract is not None:
        from equivalence.contract import Contract  # noqa: PLC0415 - most sessions name none

        Contract.parse(contract)
    found = None
    if candidate is not None:
        found = load_candidate(candidate)
    folder = None if save == "off" else root / FOLDER if save is None else Path(save).absolute()
    if save == "" or (folder is not None and folder.exists() and not folder.is_dir()):
        raise UsageError(f"--equivalence-save {save or folder}: it is a folder, or off")
    return Session(
        candidate=found,
        name=candidate or "",
        contract=contract,
        device=device,
        op=op,
        require_path=tuple(require_path),
        required=require_cases,
        folder=folder,
    )


def wants(session: Session, path: Path, *, named: bool) -> bool:
    """Whether a file is to be judged: it is named, a case, or broken so that it must be told."""
    if path.suffix != ".safetensors":
        return False
    try:
        wanted = named or header.is_case(path)
        if wanted and session.op is not None and header.op_of(path) not in (session.op, None):
            return False
    except InvalidCase:
        return True
    if not wanted:
        session.alone.add(str(path))
    return wanted


def judge_file(session: Session, path: Path) -> None:
    """Judge a case file, with what is expected of it.

    Raises:
        NotEquivalent: it is not equal, and that was not expected.
        UsageError: its expected.toml cannot be read.
    """
    from equivalence import judge, run, saved, store  # noqa: PLC0415 - torch is imported on use

    options = run.Options(
        candidate=session.candidate,
        contract=session.contract,
        device=session.device,
        require_path=session.require_path if session.candidate is not None else (),
    )
    (verdict,) = run.over([path], options)
    tell(verdict, session.properties)
    if verdict.expected or verdict.status is Status.EQUAL:
        return
    if not verdict.op:  # no case could be read from the file
        reason = verdict.findings[0].reading.removeprefix(plain.block(f"{path}: "))
        message = plain.block(f"{saved.here(path)}: {reason}")
    else:
        case = store.load(path)
        still = None
        if session.candidate is not None:

            def still(part: Case) -> bool:
                again = judge.check(
                    part,
                    session.candidate,
                    contract=session.contract,
                    device=session.device,
                    require_path=session.require_path,
                )
                return again.status is verdict.status

        message = why(
            session, verdict, case, name=session.name, contract=session.contract, still=still
        )
    judge.raise_unless_equal(verdict, message=message)


def why(
    session: Session,
    verdict: Verdict,
    case: Case,
    *,
    name: str | None,
    contract: str | None,
    repeats: int = 1,
    max_transient: int | None = None,
    still: Callable[[Case], bool] | None = None,
) -> str:
    """The failure message, with the file that holds the failing rows and how to judge it again.

    Args:
        session: says where files go.
        verdict: of `case`, not equal.
        case: what was judged.
        name: MODULE:FUNCTION, "" for recorded runs, None where no command can name what was judged.
        contract: the one given as an argument.
        repeats: calls of the candidate.
        max_transient: bytes a call may hold, where that was asked.
        still: whether some of the rows fail alone, where a candidate was judged.
    """
    from equivalence import saved  # noqa: PLC0415 - torch is imported on use
    from equivalence.report import as_text  # noqa: PLC0415 - likewise

    path, told = verdict.path, ""
    if session.folder is not None:
        try:
            kept = saved.save_failing(verdict, case, session.folder, still=still)
        except (OSError, InvalidCase) as error:
            kept, told = None, f"nothing: {error}"
        if kept is not None:
            path, told = str(kept[0]), f"{saved.here(kept[0])} ({kept[1]})"
    again = ""
    if path and name is not None:
        again = saved.again(
            path,
            candidate=name,
            contract=contract or "",
            device=session.device or "",
            repeats=repeats,
            max_transient=max_transient,
            require_path=session.require_path if name else (),
        )
    return plain.block(as_text.failure(verdict, saved=told, again=again))


def tell(verdict: Verdict, properties: list[tuple[str, object]]) -> None:
    """Attach a verdict to a test, so that it reaches the summary from any process."""
    from equivalence.report import as_json  # noqa: PLC0415 - a session without cases needs none

    properties.append((PROPERTY, json.dumps(as_json.case_data(verdict))))


def hear(session: Session, test: str, properties: Sequence[tuple[str, object]]) -> None:
    """Take the verdicts that were attached to a test; a test that runs again replaces its own."""
    texts = [str(value) for name, value in properties if name == PROPERTY]
    if texts:
        from equivalence.report import as_json  # noqa: PLC0415 - as above

        session.verdicts[test] = [as_json.verdict_of(json.loads(text)) for text in texts]


def lines(session: Session) -> list[str]:
    """The summary: what is not equal, the counted sentence, files left alone; or nothing."""
    verdicts = _all(session)
    if not verdicts:
        return []
    from equivalence.report import as_text  # noqa: PLC0415 - as above

    told = [verdict for verdict in verdicts if verdict.status is not Status.EQUAL]
    width = max((len(verdict.case) for verdict in told), default=0)
    found = [as_text.case_lines(verdict, width=width) for verdict in told]
    alone = _alone(session)
    return [*found, as_text.summary(verdicts), *([alone] if alone else [])]


def ending(session: Session, status: int) -> tuple[int, str]:
    """The exit status of a session that would end with `status`, and why it is another.

    Cases are asked for by requiring them, by naming a candidate,
    and by a session that found nothing but files without a case.
    """
    verdicts = _all(session)
    if not verdicts:
        nothing = status == NOTHING_COLLECTED and session.alone
        asked = session.required or session.candidate is not None or nothing
        if not asked or status not in (PASSED, FAILED, NOTHING_COLLECTED):
            return status, ""
        alone = _alone(session)
        return USAGE, "no case ran, and cases were asked for" + (f"; {alone}" if alone else "")
    # What a test judges by itself is its own choice; case files are there to test selection.
    files = [v for test, each in session.verdicts.items() if test.endswith(ITEMS) for v in each]
    decided = all(verdict.status is not Status.UNDECIDED for verdict in files)
    if files and decided and run_status(files) is Status.UNDECIDED:
        return status or FAILED, STRUCTURAL
    return status, ""


def _all(session: Session) -> list[Verdict]:
    return [verdict for test in sorted(session.verdicts) for verdict in session.verdicts[test]]


def _alone(session: Session) -> str:
    count = len(session.alone)
    return f"{count} file{'' if count == 1 else 's'} without a case left alone" if count else ""
