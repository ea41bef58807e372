"""`equivalence ab`: an original, the same again and a candidate, over cases or a scenario."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivalence.candidate import load as load_candidate
from equivalence.commands.common import CODES, check_target, numbers, progress, show, write
from equivalence.errors import UsageError

if TYPE_CHECKING:
    from equivalence.case import Case
    from equivalence.scenarios import Forward

_DEFAULT = "equivalence.paths.chunked:original"
_SCALE, _LAYERS, _RATIOS, _SEED = 1, 1, "1,2,4", 0
_SHARING = ("two-level",)
_SAMPLE = 256


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--scenario", metavar="NAME", help="Make this scenario instead of reading cases.")
@click.option("--scale", type=click.IntRange(1), help="Divide its lengths by this.")
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="How many of each ratio: 1, and 2 where they share a mask.",
)
@click.option("--ratios", metavar="N,N,...", help="Of its layers: 1, 2 or 4 each.")
@click.option("--seed", default=_SEED, show_default=True, type=click.IntRange(0))
@click.option("--original", metavar="MODULE:FUNCTION", help=f"For prefill_indexer {_DEFAULT}.")
@click.option("--candidate", metavar="MODULE:FUNCTION", required=True, help="What is new.")
@click.option("--op", help="Only cases of this op.")
@click.option("--contract", help="What may differ, in every arm: a name, or key=value,...")
@click.option("--device", help="Where the inputs go and the reference runs.")
@click.option(
    "--sample",
    default=_SAMPLE,
    show_default=True,
    type=click.IntRange(1),
    help="Rows of a layer-forward that are judged at least.",
)
@click.option("--no-control", is_flag=True, help="Do not run the original again.")
@click.option(
    "--require-path", multiple=True, metavar="NAME", help="A kernel the candidate must have run."
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write the comparison as JSON.")
@click.option("--markdown", "markdown_to", metavar="FILE|-", help="Write it as Markdown.")
def ab(  # noqa: PLR0917 - click hands options over by name
    paths: tuple[Path, ...],
    scenario: str | None,
    scale: int | None,
    layers: int | None,
    ratios: str | None,
    seed: int,
    original: str | None,
    candidate: str,
    op: str | None,
    contract: str | None,
    device: str | None,
    sample: int,
    require_path: tuple[str, ...],
    json_to: str | None,
    markdown_to: str | None,
    *,
    no_control: bool,
) -> int:
    """Compare a candidate with an original, and the original with itself."""
    from equivalence.ab import compare  # noqa: PLC0415 - torch is imported when a command needs it
    from equivalence.report import ab_json, as_table  # noqa: PLC0415 - likewise

    _check(paths, scenario, made=[scale, layers, ratios], targets=[json_to, markdown_to])
    whole = numbers("--ratios", ratios) or numbers("--ratios", _RATIOS) or ()
    if op is not None and scenario is not None:
        raise UsageError("--op chooses among cases, and a scenario is prefill_indexer")
    # Where layers share a mask, one alone would only publish it.
    many = layers or (2 if scenario in _SHARING else _LAYERS)
    forwards, total, found = _forwards(
        paths, op, scenario, scale or _SCALE, many, whole, seed, device
    )
    if original is None and found != "prefill_indexer":
        raise UsageError(f"--original is missing: there is none for {found}")
    named = original or _DEFAULT
    again = _again(
        paths,
        candidate,
        {
            "--scenario": scenario,
            "--scale": scale,
            "--layers": layers,
            "--ratios": ratios,
            "--seed": seed or None,
            "--original": original,
            "--candidate": candidate,
            "--op": op,
            "--contract": contract,
            "--device": device,
            "--sample": sample if sample != _SAMPLE else None,
        },
        no_control=no_control,
        require_path=require_path,
    )
    quiet = "-" in {json_to, markdown_to}
    # What a candidate prints is no report.
    redirect = redirect_stdout(sys.stderr if quiet else sys.stdout)
    with redirect, progress(quiet=quiet) as tell:
        comparison = compare(
            load_candidate(named, role="original"),
            load_candidate(candidate),
            forwards,
            contract=contract,
            control=not no_control,
            device=device,
            sample=sample,
            seed=seed,
            require_path=require_path,
            progress=lambda name, done: tell(name, done, total),
        )
    if not quiet:
        show(as_table.text(comparison, again=again))
    if json_to:
        write("--json", ab_json.render(comparison), json_to)
    if markdown_to:
        write("--markdown", as_table.markdown(comparison, again=again), markdown_to)
    return CODES[comparison.status]


def _check(
    paths: Sequence[Path],
    scenario: str | None,
    *,
    made: Sequence[object],
    targets: Sequence[str | None],
) -> None:
    """Refuse what cannot be, before anything is called."""
    if bool(paths) == bool(scenario):
        what = "case files or folders, or give --scenario"
        raise UsageError(f"ab over what? name {what}" + (", not both" if paths else ""))
    if paths and any(option is not None for option in made):
        raise UsageError("--scale, --layers and --ratios make a scenario: name one with --scenario")
    for option, target in zip(("--json", "--markdown"), targets, strict=True):
        check_target(option, target)
    one, two = (
        target and (target if target == "-" else Path(target).resolve()) for target in targets
    )
    if one is not None and one == two:
        raise UsageError(f"--json and --markdown both write to {targets[0]}")


def _forwards(  # noqa: PLR0917 - options, by order
    paths: Sequence[Path],
    op: str | None,
    scenario: str | None,
    scale: int,
    layers: int,
    ratios: tuple[int, ...],
    seed: int,
    device: str | None,
) -> tuple["Iterable[Case | Forward]", int, str]:
    """What is compared, how many, and of which op."""
    from equivalence import judge, scenarios, store  # noqa: PLC0415 - torch is imported when needed

    if device is not None:
        judge.check_device(device)
    if scenario is not None:
        made = scenarios.forwards(
            scenario, seed=seed, scale=scale, layers=layers, ratios=ratios, device=device
        )
        total = scenarios.count(scenario, scale=scale, layers=layers, ratios=ratios)
        return made, total, "prefill_indexer"
    cases = store.load_cases(*paths, op=op)
    found = sorted({case.op for case in cases})
    if len(found) > 1:
        raise UsageError(f"the cases are {' and '.join(found)}: compare those of one op at a time")
    return cases, len(cases), found[0]


def _again(
    paths: Sequence[Path],
    candidate: str,
    options: dict[str, object],
    *,
    no_control: bool,
    require_path: Sequence[str],
) -> str:
    """The command that does the same, to paste into a shell."""
    from equivalence import saved  # noqa: PLC0415 - torch is imported when a command needs it

    words = ["equivalence", "ab", *(saved.here(path) for path in paths)]
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    words += [word for name in require_path for word in ("--require-path", name)]
    words += ["--no-control"] if no_control else []
    return saved.python_path(candidate) + shlex.join(words)
