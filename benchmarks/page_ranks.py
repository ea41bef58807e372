"""The sections of docs/results.md on pages that ranks compose."""

from typing import Any

from benchmarks.markdown import table

_MIB = 1 << 20


def compose(part: dict[str, Any]) -> str:
    """Every way over every scenario, judged."""
    setup = part["setup"]
    rows = []
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in part["rows"]:
        groups.setdefault((row["transport"], row["gpus"], row["scenario"]), []).append(row)
    for (transport, gpus, scenario), ways in groups.items():
        equal = sum(row["status"] == "EQUAL" for row in ways)
        rows.append(
            (
                f"`{scenario}`",
                f"{gpus}",
                transport,
                f"{equal} of {len(ways)}",
                f"{max(row['planned'] for row in ways)}",
                f"{sum(row['pages'] for row in ways):,}",
                f"{sum(row['different'] for row in ways):,}",
                f"{sum(row['seconds'] for row in ways):.1f}",
            )
        )
    told = [
        f"- `{row['scenario']}` {row['way']}, {row['gpus']} GPUs, {row['status']}: {line}\n"
        for row in part["rows"]
        for line in row["findings"]
    ]
    head = ("scenario", "GPUs", "transport", "ways equal", "steps", "pages", "different", "s")
    return (
        f"## Pages across ranks\n\n{setup['ranks']} processes compose every step of a scenario "
        f"over {setup['layers']} layers of both kinds, {len(setup['ways'])} ways one after "
        "another:\n"
        f"{', '.join(setup['ways'])}.\n"
        "Every page of every rank is compared with the one-process reference, byte for byte.\n"
        "Seconds are those of all ways until every rank had answered; with several processes a GPU "
        "they say\nnothing of an engine.\n\n"
        + table(head, rows)
        + ("\n" + "".join(told) if told else "")
    )


def exchange(part: dict[str, Any]) -> str:
    """Times and bytes of every way."""
    setup, rows = part["setup"], [row for row in part["rows"] if row["way"] is not None]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    text = (
        f"## Exchange of pages, one rank a GPU\n\n{setup['layers']} layers of both kinds, best of "
        f"{setup['rounds']} rounds of the slowest rank, by device events.\n"
        "legacy in milliseconds, every other way as a ratio to it in the same run; sums go through "
        "NCCL.\n"
        "Under `host` a rank's host waits in each barrier, under `stream` only its stream does.\n"
    )
    for about in dict.fromkeys((row["ranks"], row["transport"], row["waits"]) for row in rows):
        here = [row for row in rows if (row["ranks"], row["transport"], row["waits"]) == about]
        lines = []
        for batch in dict.fromkeys(row["batch"] for row in here):
            found = {row["way"]: row for row in here if row["batch"] == batch}
            first = found[ways[0]]
            ratios = (_ratio(found.get(way)) for way in ways[1:])
            ms = f"{first['seconds'] * 1e3:.2f}"
            lines.append((f"`{batch}`", f"{first['requests']}", f"{first['slots']}", ms, *ratios))
        head = ("batch", "requests", "slots", f"{ways[0]} ms", *ways[1:])
        text += "\n{} ranks, transport `{}`, waiting `{}`:\n\n".format(*about) + table(head, lines)
    whole = {(row["batch"], row["way"]): row for row in rows}
    moved = [
        (f"`{batch}`", *(_moved(whole.get((batch, way))) for way in ways))
        for batch in dict.fromkeys(row["batch"] for row in rows)
    ]
    text += (
        "\nMiB of a batch on the rank that moves most: what is added up over ranks + what is read "
        "of peers:\n\n" + table(("batch", *ways), moved)
    )
    told = [
        f"- {row['transport']}, {row['waits']}, `{row['batch']}`: {row['why']}\n"
        for row in part["rows"]
        if row["way"] is None
    ]
    told += [
        f"- {row['transport']}, {row['waits']}, `{row['batch']}`: {row['way']} is not {ways[0]}\n"
        for row in rows
        if not row["same"]
    ]
    return text + ("\n" + "".join(told) if told else "")


def _ratio(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['seconds_to_legacy']:.2f}"


def _moved(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['summed_bytes'] / _MIB:.1f} + {row['read_bytes'] / _MIB:.1f}"
