"""Verdicts as text for people: the failure message, a few lines a case, the counted sentence."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from equivalence.receipt import Receipt
from equivalence.units import many, size
from equivalence.verdict import Evidence, Finding, Memory, Run, Stage, Status, Verdict

_ROWS = 3
_CLASSES = ("identical", "reordered", "tied", "open", "undecided", "different")


def failure(verdict: Verdict, *, saved: str = "", again: str = "") -> str:
    """Why one case is not equal: what differs, where, by how much, what was allowed.

    Args:
        verdict: DIFFERENT or UNDECIDED.
        saved: the file that holds the failing rows, and what it holds.
        again: the command that runs them again.
    """
    lines = [_headline(verdict)]
    for run in verdict.runs:
        lines += ["", *_run(run, named=len(verdict.runs) > 1)]
    lines += [f"  contract  {verdict.contract}      scores: {verdict.scores}"]
    notes = {"note": verdict.note, "saved": saved, "again": again}
    return "\n".join([*lines, *(f"  {key:<9} {text}" for key, text in notes.items() if text)])


def _headline(verdict: Verdict) -> str:
    """The case, how much of it, and the rules."""
    different = verdict.status is Status.DIFFERENT
    named = [] if verdict.case == "case" else [verdict.case]
    name = " ".join(filter(None, [*named, verdict.op]))
    failing = verdict.failing
    pages = [stage for stage in verdict.stages.values() if stage.unit == "page"]
    apart = sum(stage.counts["different"] for stage in pages)
    if different and apart:
        what = f"{apart:,} of {many(sum(s.counts['rows'] for s in pages), 'page')} differ"
    elif different and failing and not pages:
        what = f"{len(failing):,} of {many(verdict.coverage.rows, 'row')} differ"
    else:
        what = "it differs" if different else "nothing may be concluded"
    rules = dict.fromkeys(finding.rule for finding in verdict.findings)
    return f"{name}: {what}" + (f" ({', '.join(rules)})" if rules else "")


def _run(run: Run, *, named: bool) -> list[str]:
    """The findings of one launch chain, then what agrees."""
    lines = [f"  {run.name}"] if named else []
    told = _told(run)
    for finding in told:
        lines += [*_finding(finding, run.stages.get(finding.stage)), ""]
    paged = any(stage.unit == "page" for stage in run.stages.values())
    wrong = len({row for stage in run.stages.values() for row in stage.failing})
    shown = len({finding.row for finding in told} - {None})
    if paged and (more := sum(sum(s.rules.values()) for s in run.stages.values()) - len(told)) > 0:
        lines.append(f"  ... {many(more, 'more finding')}")
    elif wrong > shown and not paged:
        lines.append(f"  ... {many(wrong - shown, 'more row')}")
    lines += [f"  {name}: {_agreement(stage)}" for name, stage in run.stages.items()]
    blamed = [f"the {where} in {many(n, 'row')}" for where, n in run.blame.items() if n]
    if blamed:
        lines.append(f"  the fault began in {', in '.join(blamed)}")
    return lines + [f"  ran       {path(receipt)}" for receipt in run.paths]


def path(receipt: Receipt) -> str:
    """A kernel that ran: its name, version and arch, how often, with how many rows."""
    name = " ".join(filter(None, [receipt.kernel, receipt.version, receipt.arch]))
    settings = ", ".join(f"{key}={value}" for key, value in sorted(receipt.arguments.items()))
    rows = " ".join(f"{count:,}" for count in receipt.rows)
    told = f"{many(receipt.calls, 'call')} of {rows} rows"
    return "   ".join(filter(None, [name, told, settings]))


def memory(held: Memory) -> str:
    """What a call held."""
    reserved = "" if held.reserved is None else f", {size(held.reserved)} reserved"
    return f"{size(held.transient)} transient, {size(held.retained)} retained{reserved}"


def _told(run: Run) -> list[Finding]:
    """A few findings: one of each output and rule before a second of any, in order."""
    firsts = {(f.stage, f.rule): f for f in reversed(run.findings)}
    chosen = sorted(firsts.values(), key=run.findings.index)[:_ROWS]
    rest = [finding for finding in run.findings if finding not in chosen]
    chosen += rest[: _ROWS - len(chosen)]
    return sorted(chosen, key=run.findings.index)


def _finding(finding: Finding, stage: Stage | None) -> list[str]:
    """One finding: where, the values, the reading."""
    row = "slot" if stage is not None and stage.unit == "page" else "row"
    where = f"{finding.stage}" if finding.row is None else f"{row} {finding.row}   {finding.stage}"
    head = "   ".join(filter(None, [where, finding.place, finding.rule]))
    place, value = (
        max((len(getattr(line, part)) for line in finding.evidence), default=0)
        for part in ("place", "value")
    )
    lines = [f"    {_line(line, place, value)}".rstrip() for line in finding.evidence]
    reading = [f"    reading   {finding.reading}"] if finding.reading else []
    return [f"  {head}", *lines, *reading]


def _line(line: Evidence, place: int, value: int) -> str:
    aligned = f"{line.label:<9} {line.place:<{place}}  {line.value:>{value}}  {line.bits}"
    return f"{aligned}  {line.note}" if line.bits else f"{aligned.rstrip()}  {line.note}"


def _agreement(stage: Stage) -> str:
    """What of one output is right."""
    counts = stage.counts
    if "within" in counts:
        return f"{counts['within']:,} of {many(counts['compared'], 'cell')} lie within their bound"
    if "compared" in counts:
        return f"{counts['identical']:,} of {many(counts['compared'], 'cell')} hold the same bits"
    good = {kind: counts[kind] for kind in _CLASSES[:4] if counts.get(kind)}
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in good.items())
    head = f"{sum(good.values()):,} of {many(counts['rows'], stage.unit)} agree"
    return f"{head}: {kinds}" if kinds else head


def case_lines(verdict: Verdict, *, width: int = 0) -> str:
    """A case in a few lines: its status, then each output over all its runs.

    Args:
        verdict: of the case.
        width: of the column that holds the case's name.
    """
    status = verdict.status.value + (", expected" if verdict.expected else "")
    names = dict.fromkeys(name for run in verdict.runs for name in run.stages)
    looks = {name: [r.stages[name] for r in verdict.runs if name in r.stages] for name in names}
    parts = [f"{name:<15} {_counts(each)}" for name, each in looks.items()]
    parts += [f"{'control':<15} {_control(n, c)}" for n, c in verdict.control.items()]
    for run in verdict.runs[:1]:
        parts += [f"{'ran':<15} {path(receipt)}" for receipt in run.paths]
        if run.memory is not None and run.paths:
            parts.append(f"{'memory':<15} {memory(run.memory)}")
    if verdict.note:
        parts.append(verdict.note)
    elif not names and verdict.findings:
        first = verdict.findings[0]
        parts.append(f"{first.rule}: {first.reading}" if first.reading else first.rule)
    top, *rest = parts or [""]
    head = f"{verdict.case:<{width}}  {status:<20}  {top}".rstrip()
    return "\n".join([head, *(f"{'':<{width}}  {'':<20}  {part}" for part in rest)])


def _control(name: str, counts: Mapping[str, int]) -> str:
    """What runs of the same output did against each other."""
    classes = {"identical": "identical", "reordered": "reordered", "other_set": "another set"}
    kinds = [f"{counts[key]:,} {words}" for key, words in classes.items() if counts[key]]
    return f"{name} run against run: {', '.join(kinds)}"


def _counts(stages: Sequence[Stage]) -> str:
    """One output: cells, or rows by class with a number for each run."""
    if "compared" in stages[0].counts:
        compared = sum(stage.counts["compared"] for stage in stages)
        different = sum(stage.counts["different"] for stage in stages)
        how = " than a bound allows" if "within" in stages[0].counts else ""
        return f"{many(compared, 'cell')}, {different:,} different{how}"
    runs = f" in each of {len(stages)} runs" if len(stages) > 1 else ""
    parts = []
    for kind in _CLASSES:
        each = [stage.counts.get(kind, 0) for stage in stages]
        if any(each):
            parts.append(f"{' and '.join(f'{n:,}' for n in each)} {kind}")
    rules = dict.fromkeys(rule for stage in stages for rule in stage.rules)
    why = f" ({', '.join(rules)})" if rules else ""
    return f"{many(stages[0].counts['rows'], stages[0].unit)}{runs}: {', '.join(parts)}{why}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """The counted sentence over a whole run."""
    cases = list(verdicts)
    rows: Counter[str] = Counter()
    cells: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for verdict in cases:
        for stage in verdict.stages.values():
            kind = pages if stage.unit == "page" else cells if "compared" in stage.counts else rows
            kind.update(stage.counts)
    head = [many(len(cases), "case")]
    head += [many(cells["compared"], "logit")] if cells["compared"] else []
    head += [many(rows["rows"], "row")] if rows["rows"] else []
    head += [many(pages["rows"], "page")] if pages["rows"] else []
    return f"{', '.join(head)}: {_outcome(cases)}{_allowed(cases, rows)}; {_undecided(cases)}"


def _outcome(cases: Sequence[Verdict]) -> str:
    by_status = Counter(verdict.status for verdict in cases)
    if not cases:
        return "nothing was judged"
    if by_status[Status.EQUAL] == len(cases):
        return "all equal"
    expected = sum(verdict.expected for verdict in cases)
    different = f"{by_status[Status.DIFFERENT]} different"
    return f"{by_status[Status.EQUAL]} equal, {different}" + (
        f" ({expected} expected)" if expected else ""
    )


def _undecided(cases: Sequence[Verdict]) -> str:
    return f"{sum(verdict.status is Status.UNDECIDED for verdict in cases)} undecided"


def _allowed(cases: Sequence[Verdict], rows: Mapping[str, int]) -> str:
    """Which rows used a freedom, and who gave it."""
    used = [f"{rows[kind]:,} {kind}" for kind in ("reordered", "tied", "open") if rows[kind]]
    if not used:
        return ""
    names = sorted({verdict.allowed_by for verdict in cases if verdict.allowed_by})
    by = f", allowed by {' and '.join(names)}" if names else ""
    return f" ({', '.join(used)}{by})"
