"""Faulty and varied masks by name, each made from a right mask and the case it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import get_args

import torch

from equivalence.case import Case
from equivalence.planted import maskedits as edits
from equivalence.planted.maskedits import Edit, of_blocks
from equivalence.planted.plants import Outputs, Planted
from equivalence.planted.published import right_of
from refimpl.forms import Form

_EVERY: tuple[Form, ...] = get_args(Form)
_CELLS: tuple[Form, ...] = ("bool", "packed")
_IDS: tuple[Form, ...] = ("unordered", "ascending")
_BLOCKS = frozenset({"mask-missing", "mask-extra", "wrong-tie"})
_FREE = "order=any,ties=any"


@dataclass(frozen=True, kw_only=True)
class MaskPlant:
    """One way to publish another mask.

    Attributes:
        edit: makes it.
        rules: what its findings may be called; none where it is legal.
        shows: what it does, in one sentence.
        forms: of the masks it applies to.
        contract: under which it is judged.
        needs: what the scores must have for it to show.
    """

    edit: Edit
    shows: str
    rules: frozenset[str] = frozenset()
    forms: tuple[Form, ...] = _EVERY
    contract: str = "strict"
    needs: str = "a row that selects"


def plant(name: str, case: Case, right: Outputs, seed: int = 0) -> Planted | None:
    """What a faulty or varied source gives; None where it has no room or takes another form.

    Args:
        name: in FAULTS or VARIANTS.
        case: of publish_mask, or with its inputs and parameters.
        right: the right outputs, mask or block_ids among them.
        seed: chooses the row of an edit of one.

    Returns:
        The outputs, and the numbers of the rows that differ; all where dtype or width do.
    """
    found = FAULTS[name] if name in FAULTS else VARIANTS[name]
    stage = "mask" if "mask" in right else "block_ids"
    given = right_of(case, right[stage], seed=seed)
    wrong = found.edit(given) if given.form in found.forms and len(given.mask) else None
    if wrong is None:
        return None
    differs = torch.ones_like(given.rows, dtype=torch.bool)
    if wrong.dtype is given.mask.dtype and wrong.shape == given.mask.shape:
        as_bytes = torch.uint8 if wrong.dtype is torch.bool else wrong.dtype
        differs = (wrong.view(as_bytes) != given.mask.view(as_bytes)).any(1)
    if not bool(differs.any()):
        return None
    return Planted(outputs={**right, stage: wrong}, rows=tuple(given.rows[differs].tolist()))


def _named(**plants: MaskPlant) -> Mapping[str, MaskPlant]:
    return MappingProxyType({name.replace("_", "-"): each for name, each in plants.items()})


FAULTS: Mapping[str, MaskPlant] = _named(
    one_bit_flipped=MaskPlant(
        edit=edits.one_bit,
        shows="one live bit of one row is the other one",
        rules=frozenset({"mask-missing", "mask-extra"}),
        forms=_CELLS,
        needs="a row with a column",
    ),
    tail_shifted=MaskPlant(
        edit=edits.tail_shifted,
        shows="each row holds the mask of the row before it",
        rules=_BLOCKS | {"out-of-window"},
        needs="rows that publish otherwise than the row before",
    ),
    newest_block_dropped=MaskPlant(
        edit=of_blocks(edits.without_newest),
        shows="the newest block of every row that selects is left out",
        rules=frozenset({"mask-missing"}),
    ),
    newest_not_pinned=MaskPlant(
        edit=of_blocks(edits.unpinned),
        shows="the newest block is ranked as the others are",
        rules=frozenset({"mask-missing"}),
        needs="a newest block that is not among the best",
    ),
    offset_by_request_start=MaskPlant(
        edit=edits.grid_of_k,
        shows="blocks begin at multiples of 8 of the concatenated K",
        rules=_BLOCKS,
        forms=_CELLS,
        needs="a request that begins elsewhere",
    ),
    ids_from_request_start=MaskPlant(
        edit=edits.ids_of_k,
        shows="ids count the blocks of the concatenated K",
        rules=_BLOCKS | {"out-of-window"},
        forms=_IDS,
        needs="a request that begins a block or more behind column 0",
    ),
    threshold_admits_ties=MaskPlant(
        edit=of_blocks(edits.whole_tie_set),
        shows="every block that is tied at the cutoff is admitted",
        rules=frozenset({"mask-extra"}),
        contract=_FREE,
        needs="more blocks tied at the cutoff than places",
    ),
    inverse_polarity=MaskPlant(
        edit=edits.inverted,
        shows="True where a column may not be picked",
        rules=_BLOCKS | {"out-of-window"},
        forms=_CELLS,
    ),
    additive_mask=MaskPlant(
        edit=edits.additive,
        shows="0 and -inf in fp32, to be added to scores",
        rules=frozenset({"dtype"}),
        forms=("bool",),
        needs="a call: as a record it is invalid",
    ),
    stale_mask=MaskPlant(
        edit=edits.previous_step,
        shows="the mask of the step before, which had one column less",
        rules=_BLOCKS,
        needs="a row whose newest column changes what is published",
    ),
    padding_counted=MaskPlant(
        edit=of_blocks(edits.padding_counted),
        shows="the newest block of every row is the last of the widest one",
        rules=_BLOCKS | {"out-of-window"},
        needs="a row that sees less than the widest one",
    ),
    future_block_visible=MaskPlant(
        edit=of_blocks(edits.future_block),
        shows="each row sees a block more than it may",
        rules=_BLOCKS | {"out-of-window"},
    ),
    minus_inf_published=MaskPlant(
        edit=of_blocks(edits.with_minus_inf),
        shows="places that stay empty are filled with blocks at -inf",
        rules=frozenset({"mask-extra"}),
        needs="a row that selects, of fewer finite blocks than places",
    ),
    nan_block_dropped=MaskPlant(
        edit=of_blocks(edits.nan_dropped),
        shows="a NaN block takes a place and is then left out",
        rules=frozenset({"mask-missing"}),
        contract="nan=first",
        needs="a NaN block that is not the newest",
    ),
    last_id_repeated=MaskPlant(
        edit=edits.last_repeated,
        shows="the last id of one row stands in its first slot too",
        rules=frozenset({"duplicate"}),
        forms=_IDS,
        needs="a row of two blocks",
    ),
    pads_are_0=MaskPlant(
        edit=edits.pads_are_0,
        shows="unused slots hold block 0",
        rules=frozenset({"duplicate", "out-of-window", "mask-extra"}),
        forms=_IDS,
        needs="a row of fewer blocks than slots",
    ),
    byte_2=MaskPlant(
        edit=edits.byte_2,
        shows="one True is the byte 2",
        rules=frozenset({"bits"}),
        forms=("bool",),
        needs="a row that admits a column",
    ),
    bits_reversed=MaskPlant(
        edit=edits.bits_reversed,
        shows="the highest bit of a byte is its first column",
        rules=frozenset({"mask-missing"}),
        forms=("packed",),
        needs="a row whose newest block is not whole",
    ),
    row_of_zeros=MaskPlant(
        edit=edits.none,
        shows="one row admits nothing",
        rules=frozenset({"mask-missing"}),
        needs="a row with a column",
    ),
    row_of_ones=MaskPlant(
        edit=edits.every,
        shows="one row that selects admits all that it sees",
        rules=frozenset({"mask-extra"}),
    ),
    neighbour_request=MaskPlant(
        edit=edits.of_neighbour,
        shows="one row holds that of another request",
        rules=_BLOCKS | {"out-of-window"},
        needs="two requests",
    ),
    blocks_of_4=MaskPlant(
        edit=edits.finer_blocks,
        shows="blocks have 4 columns and are as many",
        rules=_BLOCKS,
        forms=_CELLS,
    ),
    block_sum=MaskPlant(
        edit=of_blocks(partial(edits.pooled, how="sum")),
        shows="a block scores the sum of its columns",
        rules=_BLOCKS,
    ),
    block_mean=MaskPlant(
        edit=of_blocks(partial(edits.pooled, how="mean")),
        shows="a block scores the mean of its columns",
        rules=_BLOCKS,
    ),
    block_minimum=MaskPlant(
        edit=of_blocks(partial(edits.pooled, how="amin")),
        shows="a block scores its worst column",
        rules=_BLOCKS,
    ),
    one_block_less=MaskPlant(
        edit=of_blocks(partial(edits.one_place, more=-1)),
        shows="rows have a place less than topk_blocks",
        rules=frozenset({"mask-missing"}),
    ),
    one_block_more=MaskPlant(
        edit=of_blocks(partial(edits.one_place, more=1)),
        shows="rows have a place more than topk_blocks",
        rules=frozenset({"mask-extra"}),
    ),
    scored_from_column_0=MaskPlant(
        edit=of_blocks(edits.from_column_0),
        shows="blocks are scored from column 0 of the buffer on",
        rules=_BLOCKS,
        needs="a row that begins elsewhere and selects",
    ),
    highest_ties=MaskPlant(
        edit=of_blocks(edits.other_ties),
        shows="the highest of the tied blocks stand where the lowest are owed",
        rules=frozenset({"wrong-tie"}),
        needs="more blocks tied at the cutoff than places",
    ),
)

VARIANTS: Mapping[str, MaskPlant] = _named(
    other_tie_set=MaskPlant(
        edit=of_blocks(edits.other_ties),
        shows="the highest of the tied blocks, where any will do",
        contract=_FREE,
        needs="more blocks tied at the cutoff than places",
    ),
    whole_tie_set=MaskPlant(
        edit=of_blocks(edits.whole_tie_set),
        shows="every block that is tied at the cutoff, where all are admitted",
        contract="order=any,ties=all",
        needs="more blocks tied at the cutoff than places",
    ),
    dead_columns_true=MaskPlant(
        edit=edits.dead_true,
        shows="columns past the window are True",
        forms=_CELLS,
        needs="a row that sees less than the mask has columns",
    ),
    wider=MaskPlant(
        edit=edits.wider, shows="rows are aligned to 64 columns more", forms=_CELLS, needs="nothing"
    ),
    ids_in_another_order=MaskPlant(
        edit=edits.shuffled,
        shows="ids descend",
        forms=("unordered",),
        contract="order=any",
        needs="a row of two blocks",
    ),
    other_pad=MaskPlant(
        edit=edits.other_pad,
        shows="unused slots hold the other pad",
        forms=_IDS,
        contract="order=any",
        needs="a row of fewer blocks than slots",
    ),
    more_slots=MaskPlant(
        edit=edits.more_slots, shows="rows have 5 slots more", forms=_IDS, needs="nothing"
    ),
    all_rows=MaskPlant(
        edit=edits.all_rows,
        shows="rows that nobody asked for are published too",
        needs="declared rows",
    ),
)
