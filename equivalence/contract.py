"""What a candidate may do differently: one named freedom each, strict unless asked."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from equivalence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Order = Literal["score", "ascending", "any"]
Ties = Literal["lowest", "highest", "any", "all"]
ShortRows = Literal["identity", "any"]
Holes = Literal["reject", "allow"]
EmptyRows = Literal["pad", "first"]
MinusInf = Literal["pick", "pad"]
Nan = Literal["reject", "first", "last", "drop"]
ZeroSign = Literal["distinct", "equal"]
Dead = Literal["ignore", "-inf", "zero"]
Scores = Literal["bits", "bound"]
Ranks = Literal["identical", "sets"]
Writes = Literal["none", "before-window", "out-of-window", "scores", "cache"]

FREEDOMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "order": get_args(Order),
        "ties": get_args(Ties),
        "short_rows": get_args(ShortRows),
        "holes": get_args(Holes),
        "empty_rows": get_args(EmptyRows),
        "minus_inf": get_args(MinusInf),
        "nan": get_args(Nan),
        "zero_sign": get_args(ZeroSign),
        "dead": get_args(Dead),
        "scores": get_args(Scores),
        "ranks": get_args(Ranks),
        "writes": get_args(Writes),
    }
)
"""Every key with a closed set of values, the strict one first.

`reserved_pages`, the one key that is a number, is checked in `Contract`.
"""

OF_MASKS: Final[Mapping[str, str]] = MappingProxyType({"ties": "all", "nan": "drop"})
"""Values that speak of masks alone: a row of picks has no room for a whole tie set."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The freedoms of one candidate; `Contract()` is strict.

    Two contracts are equal when they allow the same; `name` only says where they come from.

    Attributes:
        order: picks of a row by descending score, by ascending column, or in any order.
        ties: which columns win at the cutoff; a mask may admit `all` of them.
        short_rows: a row whose window holds at most k columns is 0 .. n-1, or any legal row.
        holes: whether a pad may stand before a pick.
        empty_rows: an empty window gives pads alone, or column 0 first.
        minus_inf: a column that scores -inf is a pick like others, or becomes a pad.
        nan: a row with a NaN in its window is undecided, or every NaN ranks first or last; a block
            of a mask may also take a place by it and then be dropped.
        zero_sign: -0 ranks below +0, or with it.
        dead: what logits outside the window hold; `ignore` compares nothing there.
        scores: equal bits, or within the derived bound of the arithmetic.
        ranks: ranks give identical rows, or equal sets.
        reserved_pages: pages 0 .. n-1, where no valid pick may land.
        writes: which columns of its input scores a kernel may change; `cache` are the bytes of its
            key pages that it hands back changed.
        name: the documented contract this one began as.
    """

    order: Order = "score"
    ties: Ties = "lowest"
    short_rows: ShortRows = "identity"
    holes: Holes = "reject"
    empty_rows: EmptyRows = "pad"
    minus_inf: MinusInf = "pick"
    nan: Nan = "reject"
    zero_sign: ZeroSign = "distinct"
    dead: Dead = "ignore"
    scores: Scores = "bits"
    ranks: Ranks = "identical"
    reserved_pages: int = 1
    writes: Writes = "none"
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raise UsageError for a value outside the closed set of its key."""
        for key, values in FREEDOMS.items():
            value = getattr(self, key)
            if value not in values:
                raise UsageError(
                    f"{key} cannot be {value!r}; it is {_either(values)}{_nearest(value, values)}"
                )
        pages = self.reserved_pages
        if type(pages) is not int or pages < 0:
            raise UsageError(
                f"reserved_pages cannot be {pages!r}; it is a whole number of pages, 0 or more"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `key=value` pairs, or a documented name with or without pairs that override it.

        Commas and spaces both separate, so what a report prints can be given back.
        `strict` names the contract without freedoms.

        Raises:
            UsageError: for an unknown key, value or name, in one sentence that says what is right.
        """
        tight = re.sub(r"\s*=\s*", "=", text).strip(" ,\t\n")
        first, *rest = re.split(r"[,\s]+", tight)
        if not first:
            raise UsageError(
                "the contract is empty; give key=value pairs, a documented name, or strict"
            )
        if "=" in first:
            return cls(**_pairs([first, *rest]))
        base = {} if first == "strict" else asdict(named_contract(first).freedoms)
        return cls(**base | _pairs(rest))

    def __str__(self) -> str:
        """The text that `parse` reads back as this contract."""
        chosen = [f"{key}={value}" for key, value in _changes(self, since=_origin(self)).items()]
        return ",".join([*([self.name] if self.name else []), *chosen]) or "strict"


@dataclass(frozen=True, kw_only=True)
class NamedContract:
    """What is known of one kernel: its contract, and where each claim comes from.

    Attributes:
        name: the Python name users call; a keyword that changes the contract follows a colon.
        ops: the operations it can be judged as.
        summary: one sentence.
        freedoms: the contract, with `name` set.
        claims: contract key -> source of the claim; every key that is not strict has one.
        documented: the keys of `claims` that the engine itself states; the rest was read from
            its code or measured.
        limits: conditions outside which nothing is claimed.
        faults: known departures from the contract, each with its link.
    """

    name: str
    ops: tuple[str, ...]
    summary: str
    freedoms: Contract
    claims: Mapping[str, str]
    documented: frozenset[str]
    limits: tuple[str, ...]
    faults: tuple[str, ...]


@cache
def named_contracts() -> Mapping[str, NamedContract]:
    """Every documented contract by name, in the order of contracts.toml."""
    text = files("equivalence").joinpath("contracts.toml").read_text(encoding="utf-8")
    entries = [
        _entry(name + suffix, contract=contract, **table)
        for name, table in tomllib.loads(text).items()
        for suffix, contract in _variants(table.pop("contract"), table.pop("variants", {}))
    ]
    return MappingProxyType({entry.name: entry for entry in entries})


def named_contract(name: str) -> NamedContract:
    """The documented contract of that name.

    Raises:
        UsageError: when there is none, with the nearest name.
    """
    known = named_contracts()
    if name not in known:
        near = _nearest(name, known) or (
            f"; the {len(known)} documented names are those of kernels of "
            + _listed(sorted({each.partition(".")[0] for each in known}), "and")
        )
        raise UsageError(f"no documented contract is named {name!r}{near}")
    return known[name]


def describe(contract: Contract, *, origin: str) -> str:
    """The freedoms as a report prints them, each with its origin; strict keys stay silent.

    `order=any ties=any (argument)`, `strict (default)`, or for a documented one
    `order=any ties=any (argument: sgl_kernel.fast_topk_v2) dead=-inf (argument)`.
    """
    source = _origin(contract)
    own = _changes(contract, since=source)
    named = {k: v for k, v in _changes(contract, since=Contract()).items() if k not in own}
    parts = []
    if contract.name:
        parts.append(f"{_spaced(named)} ({origin}: {contract.name})")
    if own or not contract.name:
        parts.append(f"{_spaced(own)} ({origin})")
    return " ".join(parts)


def _variants(plain: str, others: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("", plain), *((f":{keyword}", contract) for keyword, contract in others.items())]


def _entry(
    name: str,
    *,
    ops: list[str],
    summary: str,
    contract: str,
    claims: dict[str, str],
    documented: list[str],
    limits: list[str],
    faults: list[str],
) -> NamedContract:
    return NamedContract(
        name=name,
        ops=tuple(ops),
        summary=summary,
        freedoms=replace(Contract.parse(contract), name=name),
        claims=MappingProxyType(claims),
        documented=frozenset(documented),
        limits=tuple(limits),
        faults=tuple(faults),
    )


def _pairs(items: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{item!r} is not key=value; a documented name stands alone or first")
        if key not in (*FREEDOMS, "reserved_pages"):
            keys = (*FREEDOMS, "reserved_pages")
            near = _nearest(key, keys) or f"; its keys are {_listed(keys, 'and')}"
            raise UsageError(f"a contract has no key {key!r}{near}")
        if key in found:
            raise UsageError(f"{key} is given twice; give it once")
        whole = key == "reserved_pages" and value.isdecimal()
        found[key] = int(value) if whole else value
    return found


def _origin(contract: Contract) -> Contract:
    return named_contract(contract.name).freedoms if contract.name else Contract()


def _changes(contract: Contract, *, since: Contract) -> dict[str, str | int]:
    now, then = asdict(contract), asdict(since)
    return {key: now[key] for key in now if key != "name" and now[key] != then[key]}


def _spaced(chosen: Mapping[str, str | int]) -> str:
    return " ".join(f"{key}={value}" for key, value in chosen.items()) or "strict"


def _nearest(word: object, known: Iterable[str]) -> str:
    near = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _listed(words: Iterable[str], joint: str) -> str:
    *most, last = words
    return f"{', '.join(most)} {joint} {last}" if most else last


def _either(values: Iterable[str]) -> str:
    return _listed(values, "or")
