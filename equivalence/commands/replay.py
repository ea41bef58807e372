"""`equivalence replay`: recorded runs or a candidate, judged case by case."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivalence.candidate import load as load_candidate
from equivalence.commands.common import (
    CODES,
    check_target,
    numbers,
    progress,
    say,
    show,
    write,
)
from equivalence.errors import UsageError

if TYPE_CHECKING:
    from equivalence.verdict import Verdict

_AGAIN = 8


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--shipped", is_flag=True, help="Replay the cases that ship with this package.")
@click.option("--candidate", metavar="MODULE:FUNCTION", help="Judge this instead of the record.")
@click.option("--contract", help="What may differ: a documented name, or key=value,...")
@click.option("--device", help="Where the inputs go and the reference runs.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--op", help="Only cases of this op.")
@click.option("--rows", metavar="N,N,...", help="Only these rows.")
@click.option(
    "--max-transient", type=click.IntRange(0), metavar="BYTES", help="Memory a call may hold."
)
@click.option(
    "--require-path", multiple=True, metavar="NAME", help="A kernel that each call must have run."
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write the verdicts as JSON.")
@click.option("--allow-structural", is_flag=True, help="A run may hold no row that selects.")
def replay(  # noqa: PLR0917 - click hands options over by name
    paths: tuple[Path, ...],
    candidate: str | None,
    contract: str | None,
    device: str | None,
    repeats: int,
    op: str | None,
    rows: str | None,
    max_transient: int | None,
    require_path: tuple[str, ...],
    json_to: str | None,
    *,
    shipped: bool,
    allow_structural: bool,
) -> int:
    """Judge the recorded runs of cases, or a candidate on their inputs."""
    from equivalence import flags, run, saved  # noqa: PLC0415 - torch is imported when a command needs it
    from equivalence.report import as_json, as_text  # noqa: PLC0415 - likewise
    from equivalence.verdict import Status, run_status  # noqa: PLC0415 - likewise

    if shipped:
        paths = (*paths, flags.fixtures_dir() / "cases")
    if not paths:
        raise UsageError("replay what? name case files or folders, or give --shipped")
    _check_options(candidate, contract, repeats)
    check_target("--json", json_to)
    chosen = numbers("--rows", rows)
    quiet = json_to == "-"
    verdicts = []
    # What a candidate prints is no JSON.
    redirect = redirect_stdout(sys.stderr if quiet else sys.stdout)
    with redirect, progress(quiet=quiet) as tell:
        options = run.Options(
            candidate=None if candidate is None else load_candidate(candidate),
            contract=contract,
            device=device,
            repeats=repeats,
            rows=chosen,
            op=op,
            max_transient=max_transient,
            require_path=require_path,
        )
        for verdict in run.over(paths, options, progress=tell):
            verdicts.append(verdict)
            if not quiet:
                show(as_text.case_lines(verdict, width=16))
    if not quiet:
        for verdict in verdicts:
            if verdict.status is not Status.EQUAL and not verdict.expected:
                again = saved.again(
                    verdict.path,
                    candidate=candidate or "",
                    contract=contract or "",
                    device=device or "",
                    repeats=repeats,
                    rows=chosen or (verdict.failing[:_AGAIN] if _cut(verdict, candidate) else ()),
                    max_transient=max_transient,
                    require_path=require_path,
                )
                show("\n" + as_text.failure(verdict, again=again))
        show("\n" + as_text.summary(verdicts))
    status = run_status(verdicts, allow_structural=allow_structural)
    if json_to:
        text = as_json.render(verdicts, allow_structural=allow_structural)
        write("--json", text, json_to)
    if status is Status.UNDECIDED and all(v.status is not Status.UNDECIDED for v in verdicts):
        say("no row of any case selects: every window fits into k (--allow-structural accepts it)")
    return CODES[status]


def _cut(verdict: "Verdict", candidate: str | None) -> bool:
    """Whether failing rows show alone what is wrong: a candidate may fail by how many there are."""
    from equivalence import specs  # noqa: PLC0415 - torch is imported when a command needs it

    whole = verdict.op in specs.OPS and specs.OPS[verdict.op].whole  # a bad file has no op
    return candidate is None and not whole


def _check_options(candidate: str | None, contract: str | None, repeats: int) -> None:
    """Refuse what cannot be, before anything is judged."""
    from equivalence.contract import Contract  # noqa: PLC0415 - imported when a command needs it

    if contract is not None:
        Contract.parse(contract)
    if repeats > 1 and candidate is None:
        raise UsageError("--repeats calls a candidate again: name one with --candidate")
