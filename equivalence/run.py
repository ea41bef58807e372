"""A run over files: each is judged, a bad one becomes a verdict, expectations are applied."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equivalence import expected, header, judge, ops, plain, store
from equivalence.candidate import Candidate
from equivalence.errors import InvalidCase, UsageError
from equivalence.verdict import Status, Verdict

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How every case of a run is judged, see `judge.check`; `op` leaves out cases of others."""

    candidate: Candidate | None = None
    contract: str | None = None
    device: str | None = None
    repeats: int = 1
    rows: tuple[int, ...] | None = None
    op: str | None = None
    max_transient: int | None = None
    require_path: tuple[str, ...] = ()


def over(
    paths: Sequence[Path], options: Options, *, progress: Progress | None = None
) -> Iterator[Verdict]:
    """Judge the case files named and those under the folders named.

    Args:
        paths: files and folders; in folders, files without the key `equivalence` are left alone.
        options: how to judge.
        progress: told (case, rows done, rows in all).

    Yields:
        A verdict a file; UNDECIDED `invalid-record` for a file that cannot be read.

    Raises:
        UsageError: before anything is judged: a path does not exist, no case is found,
            no case has these rows, or the device is not there.
    """
    files = [path for path in store.find_cases(paths) if _is_of(path, options.op)]
    if not files:
        of = f" of op {options.op}" if options.op else ""
        raise UsageError(plain.line(f"no case{of} in {', '.join(map(str, paths))}"))
    if options.device is not None:
        judge.check_device(options.device)
    for path in files if options.rows else ():
        _check_rows(path, options.rows or ())
    foreseen = expected.beside(files)
    for path in files:
        verdict = one(path, options, progress=progress)
        table = foreseen.get(expected.folder_of(path), {})
        recorded = options.rows is None and options.candidate is None
        yield expected.mark(verdict, table.get(path.stem) if recorded else None)
    asked = [path.resolve() for path in paths if path.is_dir()]
    whole = [f for f in foreseen if any(f.is_relative_to(folder) for folder in asked)]
    for folder in sorted(whole) if options.op is None else ():
        for name in expected.unnamed(foreseen[folder], expected.names_near(folder)):
            note = f"{expected.FILE} expects something of this case, and {folder} has no such case"
            yield Verdict(case=plain.line(name), op="", status=Status.UNDECIDED, note=note)


def one(path: Path, options: Options, *, progress: Progress | None = None) -> Verdict:
    """Judge one case file."""
    try:
        case = store.load(path)
    except InvalidCase as error:
        return unreadable(path, error)
    return judge.check(
        case,
        options.candidate,
        contract=options.contract,
        device=options.device,
        repeats=options.repeats,
        rows=options.rows,
        max_transient=options.max_transient,
        require_path=options.require_path,
        progress=None if progress is None else partial(progress, case.name),
    )


def unreadable(path: Path, error: InvalidCase) -> Verdict:
    """The verdict of a file that holds no case: nothing may be concluded."""
    name = plain.line(path.stem)
    blank = Verdict(case=name, op="", path=str(path), status=Status.UNDECIDED)
    return judge.invalid(blank, str(error))


def _is_of(path: Path, op: str | None) -> bool:
    """Whether a file is of this op, or cannot be read so that it must be told."""
    try:
        return op is None or header.op_of(path) in (op, None)
    except InvalidCase:
        return True


def _check_rows(path: Path, rows: Sequence[int]) -> None:
    try:
        case = store.load(path)
    except InvalidCase:  # its verdict says so
        return
    judge.chosen(case, rows, ops.validate(case))
