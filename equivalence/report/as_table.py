"""An A/B comparison for people: its two tables and what goes with them, as text or Markdown."""

from collections.abc import Iterator, Mapping, Sequence

from equivalence.report import as_text
from equivalence.units import many, size
from equivalence.verdict import Memory, Status
from equivalence.versus.evidence import McNemar
from equivalence.versus.forwards import (
    ALL,
    VIEWS,
    Agreement,
    Census,
    Comparison,
    Forward,
    Group,
)

_HEAD = ("layer-forwards", "new == original", "original == original", "masks equal")
_WORDS = {"slots": "raw slot order", "sets": "sets"}
_NO_MASK = "n/a"
"""Where no layer-forward publishes a mask."""
_MOST_GROUPS = 16
_MOST_ROWS = 16

_Row = tuple[str, ...]


def text(comparison: Comparison, *, again: str = "") -> str:
    """The two tables, the status, what is wrong, the evidence, ties, memory and paths.

    Args:
        comparison: any.
        again: the command that runs it again.
    """
    parts = ["\n".join(_names(comparison))]
    parts += ["\n".join(_aligned(_WORDS[view], _rows(comparison, view))) for view in VIEWS]
    parts.append("\n".join(_facts(comparison)))
    for one in comparison.failing:
        parts += _failing(one)
    parts.append("\n".join(_rest(comparison, again)))
    return "\n\n".join(filter(None, parts))


def markdown(comparison: Comparison, *, again: str = "") -> str:
    """The same for a page: GitHub's tables, then the facts as a list.

    Args:
        comparison: any.
        again: the command that runs it again.
    """
    lines = [f"**{_headline(comparison)}**", ""]
    for view in VIEWS:
        lines += [f"| {_WORDS[view]} | {' | '.join(_HEAD)} |", "|---|---:|---:|---:|---:|"]
        for row in _rows(comparison, view, most=None):
            cells = [cell.strip().replace("|", "\\|") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    for line in [*_names(comparison)[1:], *_facts(comparison), *_rest(comparison, again)]:
        label, _, words = line.strip().partition(" ")
        lines.append(f"- {label}: {words.strip()}" if words else f"- {label}")
    return "\n".join(lines)


def _headline(comparison: Comparison) -> str:
    forwards = many(comparison.total.forwards, "layer-forward")
    return f"ab {comparison.op or 'of nothing'}: {forwards}, {comparison.status.value}"


def _names(comparison: Comparison) -> list[str]:
    original = comparison.original or "(a callable without a name)"
    candidate = comparison.candidate or "(a callable without a name)"
    return [
        _headline(comparison),
        f"  original  {original}",
        f"  candidate {candidate}",
        f"  contract  {comparison.contract}",
    ]


def _rows(comparison: Comparison, view: str, *, most: int | None = _MOST_GROUPS) -> list[_Row]:
    """A line a group, all of them together, and each output alone."""
    shown = comparison.groups[:most]
    rows = [
        _cells(f"  {_title(group)}", _whole(group, view), group.masks.get(ALL)) for group in shown
    ]
    rest = len(comparison.groups) - len(shown)
    rows += [(f"  ... {many(rest, 'more group')}", "", "", "", "")] if rest else []
    stages, masks = comparison.total.agreement.get(view, {}), comparison.total.masks
    rows.append(_cells("all", stages.get(ALL, Agreement()), masks.get(ALL)))
    outputs = {stage: each for stage, each in stages.items() if stage != ALL}
    if len(outputs) > 1:
        rows += [_cells(f"  {name}", each, masks.get(name)) for name, each in outputs.items()]
    return rows


def _whole(group: Group, view: str) -> Agreement:
    return group.agreement.get(view, {}).get(ALL, Agreement())


def _cells(title: str, each: Agreement, masks: Agreement | None) -> _Row:
    control = f"{each.control_equal:,}" if each.controls else "not run"
    if each.controls not in {0, each.forwards}:
        control += f" of {each.controls:,}"
    published = f"{masks.new_equal:,} of {masks.forwards:,}" if masks else _NO_MASK
    return title, f"{each.forwards:,}", f"{each.new_equal:,}", control, published


def _title(group: Group) -> str:
    place = [f"{name} {value}" for name, value in group.place.items()]
    if group.rows:
        place.append(f"to {group.rows:,} rows, {group.columns:,} columns")
    return "  ".join(place)


def _aligned(title: str, rows: Sequence[_Row]) -> Iterator[str]:
    """A table whose numbers stand below each other."""
    table = [(title, *_HEAD), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for name, *cells in table:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *numbers]).rstrip()


def _facts(comparison: Comparison) -> list[str]:
    """The status, and what it rests on."""
    total = comparison.total
    why = f": {'; '.join(comparison.why)}" if comparison.why else ""
    lines = [_fact("status", f"{comparison.status.value}{why}")]
    if comparison.arms:
        arms = ", ".join(f"{name} {status.value}" for name, status in comparison.arms.items())
        lines.append(_fact("arms", arms))
    lines.append(_fact("control", comparison.control))
    for stage, each in total.agreement.get(VIEWS[1], {}).items():
        if stage != ALL:
            noun = "mask" if stage in total.masks else stage
            lines.append(_fact("rows", f"{stage}: {_apart(noun, each)}"))
    judged = f"{many(total.sampled, 'row')}, up to {comparison.sample:,} of each layer-forward"
    further = f"{many(total.further, 'more row')} where arms differ"
    seed = f"seed {comparison.seed}"
    lines.append(
        _fact("judged", f"{judged}, {further}; {total.unclassified:,} unclassified; {seed}")
    )
    return lines


def _apart(noun: str, each: Agreement) -> str:
    """How many rows hold another set or mask, or other bits."""
    other = {"logits": "other bits", "mask": "another mask"}.get(noun, "another set")
    new = f"{each.new_rows:,} of {many(each.rows, 'row')} hold {other}"
    return f"{new}, {each.control_rows:,} when the original runs again" if each.controls else new


def _failing(one: Forward) -> list[str]:
    """Why one layer-forward is not equal."""
    wrong = [each for each in one.verdicts if each.status is not Status.EQUAL]
    told = [as_text.failure(verdict) for verdict in wrong]
    if one.note:
        told.append(f"{one.name}: {one.note}")
    if one.unclassified:
        count = many(len(one.unclassified), "row")
        shown = " ".join(map(str, one.unclassified[:_MOST_ROWS]))
        more = " ..." if len(one.unclassified) > _MOST_ROWS else ""
        told.append(f"{one.name}: {count} unclassified: {shown}{more}")
    return told


def _rest(comparison: Comparison, again: str) -> list[str]:
    """Evidence, ties, memory, paths, and what was left out."""
    lines = [_fact("evidence", _evidence(test)) for test in comparison.evidence if _tells(test)]
    lines += [_fact("ties", sentence) for sentence in _ties(comparison.total.census)]
    for name, held in comparison.total.memory.items():
        lines.append(_fact("memory", f"{name}: {_memory(held)}"))
    for name, paths in comparison.paths.items():
        lines += [_fact("ran", f"{name}: {as_text.path(receipt)}") for receipt in paths]
    if comparison.calls:
        lines.append(_fact("calls", _counted(comparison.calls, comparison.left_out)))
    lines += [_fact("failed", f"{n:,} x {words}") for words, n in comparison.failed.items()]
    return [*lines, *([_fact("again", again)] if again else [])]


def _fact(label: str, words: str) -> str:
    return f"  {label:<9} {words}"


def _tells(test: McNemar) -> bool:
    return test.stage != ALL


def _evidence(test: McNemar) -> str:
    head = f"{test.stage}, {_WORDS[test.view]}: "
    if not test.pairs:
        return head + test.note
    counts = (
        f"the candidate alone differs in {test.only_new:,} of {many(test.pairs, 'pair')},"
        f" the control alone in {test.only_control:,}: "
    )
    return head + counts + (test.note if test.p is None else f"p = {test.p:.2g}")


def _ties(census: Census) -> Iterator[str]:
    """The tie census in sentences."""
    if not census.rows:
        return
    yield f"{census.selecting:,} of {many(census.rows, 'row')} really select"
    shared, margin = census.multiplicity, census.margin
    if census.looked_at:
        share = f"{census.cut_at_zero / census.looked_at:.1%}"
        cut = f"{census.cut:,} of them are cut inside a plateau"
        yield (
            f"{many(census.looked_at, 'row')} looked at by scores of the {census.scores}; columns"
            f" at the cutoff: median {shared.median:,}, at most {shared.most:,}"
        )
        yield f"{cut}, {census.cut_at_zero:,} ({share} of all) in one of exactly 0.0"
    if margin.least is not None:
        yield (
            f"from the cutoff to the best score below it: at least {margin.least:,} ulp,"
            f" median {margin.median:,}"
        )


def _memory(held: Memory) -> str:
    return f"{as_text.memory(held)}, {size(held.outputs)} of outputs ({held.how})"


def _counted(calls: int, left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
    return f"{many(calls, 'call')} seen" + (f"; left out: {reasons}" if reasons else "")
