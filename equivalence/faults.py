"""Planted faults, each with the rule that must catch it, and variants that a contract allows.

Both tables are data over pure functions of a case and its right outputs.
They show that a judge can fail, and that it does not fail too much.
"""

import math
from dataclasses import dataclass

from equivalence import poisons
from equivalence.planted import edits, plants
from equivalence.planted.plants import Plant

__all__ = ["FAULTS", "VARIANTS", "Fault", "Variant"]

_LOOSE = "order=any,ties=any"
_SELECTS = "a row that selects"
_TIES = "more columns at the cutoff than places for them"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong output.

    Attributes:
        name: what went wrong.
        stage: the output it begins in; picks that are wrong are wrong in every form of them.
        rule: what the judge must call each touched row.
        plant: (case, its right outputs, seed) -> what a faulty kernel gives and which rows it
            touched; None where the case has not what the fault needs.
        needs: what that is.
        contract: the most freedom under which it still is a fault by this rule.
    """

    name: str
    stage: str
    rule: str
    plant: Plant
    needs: str = "a row with picks"
    contract: str = _LOOSE


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Another output than the strict reference's that is right all the same.

    Attributes:
        name: what differs.
        stage: the output it differs in.
        row_class: what the judge must count the touched rows as.
        contract: what allows it.
        vary: like a fault's plant, of the right outputs under that contract.
        needs: what a case must have for it.
    """

    name: str
    stage: str
    row_class: str
    contract: str
    vary: Plant
    needs: str = _SELECTS


def _pick(name: str, rule: str, edit: edits.Edit, needs: str = _SELECTS, **rest: str) -> Fault:
    plant = plants.picks(edit)
    return Fault(name=name, stage="raw_indices", rule=rule, plant=plant, needs=needs, **rest)


def _page(name: str, plant: Plant, needs: str = "slots beside picks") -> Fault:
    return Fault(name=name, stage="page_indices", rule="page-mismatch", plant=plant, needs=needs)


def _logit(name: str, rule: str, plant: Plant, needs: str, contract: str = "strict") -> Fault:
    return Fault(name=name, stage="logits", rule=rule, plant=plant, needs=needs, contract=contract)


FAULTS: tuple[Fault, ...] = (
    _pick("next lower pick", "lost-winner", edits.next_lower, "a column below the cutoff"),
    _pick("best pick lost", "lost-winner", edits.best_lost, "a winner above the cutoff"),
    _pick("winner lost to one more tie", "lost-winner", edits.lost_to_ties, _TIES),
    _pick(
        "fifteen winners lost to ties",
        "lost-winner",
        edits.fifteen_lost_to_ties,
        "fifteen winners, and fifteen unpicked columns at the cutoff",
    ),
    _pick(
        "ranked from column 0",
        "lost-winner",
        edits.ranked_from_zero,
        "a row that selects from a window that does not begin at 0",
    ),
    Fault(
        name="two rows exchanged",
        stage="raw_indices",
        rule="lost-winner",
        plant=plants.rows_exchanged,
        needs="two rows that select from windows of like length",
    ),
    _pick("highest tie", "wrong-tie", edits.other_tie, _TIES, contract="order=any"),
    _pick("picks reversed", "order", edits.reversed_picks, contract="ties=any"),
    _pick(
        "short row reversed", "order", edits.short_reversed, "a row of at most k columns, 2 or more"
    ),
    _pick("one pick twice", "duplicate", edits.duplicate, "two picks"),
    _pick("one tie twice", "duplicate", edits.duplicate_tie, "two picks at the cutoff of a row"),
    _pick("argmax everywhere", "duplicate", edits.all_argmax, "two picks"),
    _pick("pad in a full row", "hole", edits.hole, "a row of k picks"),
    _pick("past the window", "out-of-window", edits.past_window, "a column after a row's window"),
    _pick("past the buffer", "out-of-window", edits.past_buffer, "a row with picks"),
    _pick("below the window", "out-of-window", edits.below_window, "two columns before a window"),
    _pick(
        "counted from another base",
        "out-of-window",
        edits.another_base,
        "a window that begins past its own length",
    ),
    _pick("pick for a pad", "pad", edits.pick_for_pad, "a row of fewer than k picks"),
    _pick("pads unwritten", "unwritten", edits.tail_unwritten, "a row of fewer than k picks"),
    _pick("row unwritten", "unwritten", edits.unwritten, "a row"),
    Fault(
        name="nothing written",
        stage="raw_indices",
        rule="unwritten",
        plant=plants.all_unwritten,
        needs="picks",
    ),
    _page("slot off by one", plants.pages(plants.last_off(1))),
    _page("slot off by fifty", plants.pages(plants.last_off(50))),
    _page("slots beside other picks", plants.pages(plants.turned), "two picks of a row"),
    _page("slots of other ties", plants.pages_of_other_tie, _TIES),
    _page("slot through fp32", plants.pages(plants.through_fp32), "an odd slot above 2**24"),
    _logit(
        "one bit flipped",
        "bits",
        plants.logits(plants.flipped, lambda row, inside: inside & (row != 0)),
        "a logit that is not 0",
    ),
    _logit(
        "zeros from the middle on",
        "bits",
        plants.logits(
            plants.filled(0.0),
            lambda row, inside: inside & (row != 0) & (inside.cumsum(0) * 2 > inside.sum()),
            cells=slice(None),
        ),
        "a logit that is not 0",
    ),
    _logit(
        "-0 for +0",
        "sign-of-zero",
        plants.logits(
            plants.filled(-0.0), lambda row, inside: inside & (row == 0) & ~row.signbit()
        ),
        "a logit that is +0",
    ),
    _logit(
        "NaN in the window",
        "nan",
        plants.logits(plants.filled(math.nan), lambda row, inside: inside & ~row.isnan()),
        "a logit",
    ),
    _logit(
        "NaN for -inf",
        "nan",
        plants.logits(plants.filled(math.nan), lambda _, inside: ~inside),
        "a cell outside a window",
        "dead=-inf",
    ),
    _logit(
        "logits unwritten",
        "unwritten",
        plants.logits(plants.filled(poisons.SCORE[0]), lambda _, inside: inside, cells=slice(None)),
        "a logit",
    ),
)
"""Every fault; their rules are those of `verdict.RULES`."""


def _other(
    name: str, row_class: str, contract: str, edit: edits.Edit, needs: str = _SELECTS
) -> Variant:
    return Variant(
        name=name,
        stage="raw_indices",
        row_class=row_class,
        contract=contract,
        vary=plants.picks(edit, contract),
        needs=needs,
    )


def _promised(contract: str, needs: str) -> Variant:
    return Variant(
        name=f"as {contract} says",
        stage="raw_indices",
        row_class="identical",
        contract=contract,
        vary=plants.as_promised,
        needs=needs,
    )


VARIANTS: tuple[Variant, ...] = (
    _other("another order", "reordered", "order=any", edits.reversed_picks),
    _other("other ties", "tied", "ties=any", edits.other_tie, _TIES),
    _other("equal scores exchanged", "reordered", "strict", edits.ties_exchanged, "picked ties"),
    _other(
        "short row reversed",
        "reordered",
        "order=any,short_rows=any",
        edits.short_reversed,
        "a row of at most k columns, 2 or more",
    ),
    _other(
        "other columns at -inf",
        "tied",
        "ties=any",
        edits.other_minus_inf,
        "a row that selects with fewer than k finite scores",
    ),
    _other(
        "zeros of the other sign",
        "tied",
        "ties=any,zero_sign=equal",
        edits.other_zero,
        "zeros of both signs at the cutoff",
    ),
    _other(
        "a pad first",
        "reordered",
        "holes=allow,minus_inf=pad",
        edits.pad_first,
        "a row with columns at -inf that owes fewer than k picks",
    ),
    _promised("order=ascending", _SELECTS),
    _promised("ties=highest", _TIES),
    _promised("minus_inf=pad", "a row that selects with fewer than k finite scores"),
    _promised("empty_rows=first", "a row without columns"),
    _promised("nan=first", "a NaN with its sign bit set"),
    _promised("nan=last", "a NaN without its sign bit"),
    Variant(
        name="pads wider than k",
        stage="raw_indices",
        row_class="identical",
        contract="strict",
        vary=plants.wider,
        needs="picks",
    ),
    Variant(
        name="slots of other ties alone",
        stage="page_indices",
        row_class="tied",
        contract="ties=any",
        vary=plants.alone(plants.picks(edits.other_tie)),
        needs=_TIES,
    ),
    Variant(
        name="slots in another order alone",
        stage="page_indices",
        row_class="reordered",
        contract="order=any",
        vary=plants.alone(plants.picks(edits.reversed_picks)),
    ),
    Variant(
        name="dirty cells outside the window",
        stage="logits",
        row_class="identical",
        contract="dead=ignore",
        vary=plants.logits(plants.filled(math.nan), lambda _, inside: ~inside, cells=slice(None)),
        needs="a cell outside a window",
    ),
    Variant(
        name="zeros outside the window",
        stage="logits",
        row_class="identical",
        contract="dead=zero",
        vary=plants.dead_zero,
        needs="a cell outside a window",
    ),
)
"""Every variant; the contract is all that allows it."""
