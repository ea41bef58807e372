"""A second composition, byte by byte, written from the contract and not from the reference.

A page id of 0 or -1 gives zeros. A prefix page is its owner's page. A current page begins as zeros,
or as its owner's page where the prefix ends inside it, and its new tokens are put in one at a time.
Index pages have all keys, then all four-byte scales; token pages one token behind another.
"""

from typing import Any

from equivalence.case import Case


def composed(case: Case) -> dict[str, Any]:
    """What every rank must hold: lists of bytes [layers][S], and the locations of new tokens."""
    held = case.inputs
    size = int(case.params["page_size"])  # type: ignore[arg-type]  # JSON
    tables = {
        name: held[name].tolist()
        for name in ("slot_pages", "owner", "local_page", "prefix_lens", "extend_lens")
    }
    plan, places = _plan(tables, size)
    made: dict[str, Any] = {"row_locations": places}
    for kind in ("token", "index"):
        if f"{kind}_pools" not in held:
            continue
        pools, rows = (_bytes(held[f"{kind}_{part}"]) for part in ("pools", "rows"))
        made[f"{kind}_pages"] = [
            _layer(pools[at], rows[at], plan, tables=tables, kind=kind, size=size)
            for at in range(len(pools))
        ]
    return made


def _plan(tables: dict[str, list[int]], size: int) -> tuple[list[str], list[int]]:
    """What each slot begins as, and where new tokens stand."""
    plan: list[str] = []
    places: list[int] = []
    for prefix, extend in zip(tables["prefix_lens"], tables["extend_lens"], strict=True):
        first = len(plan)
        for page in range((prefix + extend + size - 1) // size):
            end = (page + 1) * size
            written = extend > 0 and end > prefix
            plan.append("fresh" if written and page * size >= prefix else "owner")
        places += [first * size + token for token in range(prefix, prefix + extend)]
    plan += ["zero"] * (len(tables["slot_pages"]) - len(plan))
    return plan, places


def _layer(
    pools: list[Any],
    rows: list[Any],
    plan: list[str],
    *,
    tables: dict[str, list[int]],
    kind: str,
    size: int,
) -> list[bytes]:
    width = len(pools[0][0])
    dense = []
    for slot, begins in enumerate(plan):
        logical = tables["slot_pages"][slot]
        if begins == "owner" and logical > 0:
            dense.append(bytearray(pools[tables["owner"][logical]][tables["local_page"][logical]]))
        else:
            dense.append(bytearray(width))
    _, places = _plan(tables, size)
    for place, row in zip(places, rows, strict=True):
        page, token = dense[place // size], place % size
        if kind == "token":
            page[token * len(row) : (token + 1) * len(row)] = bytes(row)
            continue
        key = len(row) - 4
        page[token * key : (token + 1) * key] = bytes(row[:key])
        scales = size * key + token * 4
        page[scales : scales + 4] = bytes(row[key:])
    return [bytes(page) for page in dense]


def _bytes(tensor: Any) -> Any:  # noqa: ANN401 - a tensor, then nested lists
    import torch  # noqa: PLC0415 - only to look at the bytes

    return tensor.view(torch.uint8).tolist()
