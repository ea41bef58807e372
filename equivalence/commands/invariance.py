"""`equivalence invariance`: does what a candidate gives for a row depend on the call's rows?"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivalence.candidate import load as load_candidate
from equivalence.commands.common import (
    CODES,
    PATHS,
    Tell,
    check_target,
    numbers,
    progress,
    show,
    write,
)
from equivalence.errors import InvalidCase, UsageError

if TYPE_CHECKING:
    from equivalence.candidate import Candidate
    from equivalence.verdict import Verdict

_WIDTH = 16


@click.command("invariance")
@PATHS
@click.option("--candidate", required=True, metavar="MODULE:FUNCTION", help="What is called.")
@click.option("--contract", help="What may differ: a documented name, or key=value,...")
@click.option("--device", help="Where the inputs go and the reference runs.")
@click.option("--rows", metavar="N,N,...", help="Only chunks of so many rows.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of random schedules."
)
@click.option(
    "--repeats",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="How often the whole call is made.",
)
@click.option("--op", help="Only cases of this op.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the verdicts as JSON.")
def invariance_(  # noqa: PLR0917 - click hands options over by name
    paths: tuple[Path, ...],
    candidate: str,
    contract: str | None,
    device: str | None,
    rows: str | None,
    seed: int,
    repeats: int,
    op: str | None,
    json_to: str | None,
) -> int:
    """Call a candidate with all rows, in chunks, in another order: is each row the same?"""
    from equivalence.invariance import in_short  # noqa: PLC0415 - torch is imported when needed
    from equivalence.report import as_json, as_text  # noqa: PLC0415 - likewise
    from equivalence.verdict import Status, run_status  # noqa: PLC0415 - likewise

    check_target("--json", json_to)
    sizes = numbers("--rows", rows)
    if sizes and not sizes[0]:
        raise UsageError(f"--rows {rows}: a chunk has 1 row or more")
    called, files = load_candidate(candidate), _files(paths, op)
    _check(contract, device)
    options: dict[str, Any] = {
        "rows": sizes,
        "contract": contract,
        "device": device,
        "seed": seed,
        "repeats": repeats,
    }
    quiet = json_to == "-"
    verdicts: list[Verdict] = []
    # What a candidate prints is no JSON.
    redirect = redirect_stdout(sys.stderr if quiet else sys.stdout)
    with redirect, progress(quiet=quiet) as tell:
        for path in files:
            verdicts.append(_judged(path, called, options, tell))
            if not quiet:
                show(_lines(in_short(verdicts[-1])))
    if not quiet:
        for verdict in verdicts:
            if verdict.status is not Status.EQUAL:
                again = _again(verdict.path, candidate, options)
                show("\n" + as_text.failure(in_short(verdict), again=again))
        show("\n" + as_text.summary(verdicts))
    status = run_status(verdicts, allow_structural=True)
    if json_to:
        write("--json", as_json.render(verdicts, allow_structural=True), json_to)
    return CODES[status]


def _check(contract: str | None, device: str | None) -> None:
    """Refuse what cannot be, before anything is called."""
    from equivalence import judge  # noqa: PLC0415 - torch is imported when needed
    from equivalence.contract import Contract  # noqa: PLC0415 - likewise

    if contract is not None:
        Contract.parse(contract)
    if device is not None:
        judge.check_device(device)


def _judged(path: Path, called: "Candidate", options: Mapping[str, Any], tell: Tell) -> "Verdict":
    """One case file; a bad one is UNDECIDED."""
    from equivalence import run, store  # noqa: PLC0415 - torch is imported when needed
    from equivalence.invariance import check_row_count  # noqa: PLC0415 - likewise

    try:
        case = store.load(path)
    except InvalidCase as error:
        return run.unreadable(path, error)
    return check_row_count(case, called, progress=partial(tell, case.name), **options)


def _again(path: str, candidate: str, options: Mapping[str, Any]) -> str:
    """The command that judges a file again."""
    from equivalence import saved  # noqa: PLC0415 - torch is imported when needed

    return saved.again(
        path,
        command="invariance",
        candidate=candidate,
        contract=options["contract"] or "",
        device=options["device"] or "",
        repeats=options["repeats"],
        rows=options["rows"] or (),
        seed=options["seed"],
    )


def _files(paths: Sequence[Path], op: str | None) -> list[Path]:
    """The case files named and those under the folders named.

    Raises:
        UsageError: there are none.
    """
    from equivalence import header, plain, store  # noqa: PLC0415 - torch is imported when needed

    def wanted(path: Path) -> bool:
        try:
            return op is None or header.op_of(path) in (op, None)
        except InvalidCase:  # its verdict says so
            return True

    files = [path for path in store.find_cases(paths) if wanted(path)]
    if not files:
        of = f" of op {op}" if op else ""
        raise UsageError(plain.line(f"no case{of} in {', '.join(map(str, paths))}"))
    return files


def _lines(verdict: "Verdict") -> str:
    """A case, then its whole call and its schedules, a line for each output."""
    from dataclasses import replace  # noqa: PLC0415 - beside what it serves

    from equivalence.report.as_text import case_lines  # noqa: PLC0415 - torch, likewise
    from equivalence.verdict import Verdict, worst  # noqa: PLC0415 - likewise

    if len(verdict.runs) < 2:  # noqa: PLR2004 - the whole call and the schedules
        return case_lines(verdict, width=_WIDTH)
    told = [case_lines(replace(verdict, runs=(), control={}), width=_WIDTH)]
    for run in verdict.runs:
        statuses = [stage.status for stage in run.stages.values()]
        statuses += [found.status for found in run.findings]
        status = worst(statuses)
        one = Verdict(case=f"  {run.name}", op=verdict.op, status=status, runs=(run,))
        told.append(case_lines(one, width=_WIDTH))
    return "\n".join(told)
