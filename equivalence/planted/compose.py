"""Faulty compositions: what every rank holds, edited in the way a known fault would."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from equivalence import poisons
from equivalence.case import Case
from equivalence.checks.composed import wanted, weighing
from refimpl import batch as batches
from refimpl.bits import SCALE_BYTES

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class ComposeFault:
    """One fault of a composition.

    Attributes:
        edit: spoils the right outputs of a case, in place.
        rule: what its finding is called.
        place: where the finding says that it is; other places may be wrong too.
        reading: what the finding says of it, in part.
    """

    edit: Callable[[Case, Outputs], None]
    rule: str
    place: str
    reading: str = ""


def right(case: Case) -> Outputs:
    """What every rank must hold, each in memory of its own."""
    return {name: tensor.clone() for name, tensor in weighing.reference(case).items()}


def spoilt(case: Case, fault: ComposeFault) -> Outputs:
    """The outputs of a case with one fault in them."""
    outputs = right(case)
    fault.edit(case, outputs)
    return outputs


def slot_of(case: Case, *, current: bool, at: int = 0) -> int:
    """A slot of a request, current or prefix."""
    batch = wanted.of_case(case).batch
    now = set(batches.current_slots(batch).tolist())
    held = (batches.slot_requests(batch) >= 0).nonzero()[:, 0].tolist()
    slots: list[int] = [slot for slot in held if (slot in now) == current]
    return slots[at]


def _pages(outputs: Outputs, kind: str = "token") -> Tensor:
    return outputs[f"{kind}_pages"].view(torch.uint8)


def other_slot(case: Case, outputs: Outputs) -> None:
    """A prefix page where another one belongs, on every rank."""
    one, two = (slot_of(case, current=False, at=at) for at in (0, 1))
    _pages(outputs)[:, 1, one] = _pages(outputs)[:, 1, two]


def one_byte(case: Case, outputs: Outputs) -> None:
    """One bit of one byte on one rank."""
    _pages(outputs)[2, 1, slot_of(case, current=True), 17] ^= 1


def token_missing(case: Case, outputs: Outputs) -> None:
    """The first new token of a page is not there."""
    slot = slot_of(case, current=True, at=1)
    width = case.inputs["token_rows"].shape[-1]
    _pages(outputs)[:, 0, slot, :width] = 0


def interleaved(case: Case, outputs: Outputs) -> None:
    """Index pages with each token's scale behind its key."""
    pages, size = _index(case, outputs)
    planes = pages[:, : -size * SCALE_BYTES], pages[:, -size * SCALE_BYTES :]
    pages.copy_(torch.cat([plane.reshape(len(pages), size, -1) for plane in planes], 2).flatten(1))


def planar(case: Case, outputs: Outputs) -> None:
    """Index pages read as interleaved and made planar again."""
    pages, size = _index(case, outputs)
    tokens = pages.reshape(len(pages), size, -1)
    planes = tokens[..., :-SCALE_BYTES], tokens[..., -SCALE_BYTES:]
    pages.copy_(torch.cat([plane.flatten(1) for plane in planes], 1))


def _index(case: Case, outputs: Outputs) -> tuple[Tensor, int]:
    """The first current index page of layer 0, u8 [cp, page_bytes], and its tokens."""
    size = wanted.of_case(case).batch.page_size
    return _pages(outputs, "index")[:, 0, slot_of(case, current=True)], size


def zero_page(case: Case, outputs: Outputs) -> None:
    """The first current page is never staged: row 0 is nobody's."""
    _pages(outputs)[:, 0, slot_of(case, current=True)] = 0


def two_layers_before(case: Case, outputs: Outputs) -> None:
    """A page of the same parity half, read too early, on one rank."""
    slot = slot_of(case, current=True)
    _pages(outputs)[3, 2, slot] = _pages(outputs)[3, 0, slot]


def next_layer(case: Case, outputs: Outputs) -> None:
    """A page whose half was written again by the next turn."""
    slot = slot_of(case, current=True, at=1)
    _pages(outputs)[1, 1, slot] = _pages(outputs)[1, 2, slot]


def owners_swapped(case: Case, outputs: Outputs) -> None:
    """The same local page of another rank's pool."""
    slot = slot_of(case, current=False)
    page = int(case.inputs["slot_pages"][slot])
    rank, local = (int(case.inputs[name][page]) for name in ("owner", "local_page"))
    pools = case.inputs["token_pools"].view(torch.uint8)
    _pages(outputs)[:, :, slot] = pools[:, (rank + 1) % pools.shape[1], local]


def one_rank(case: Case, outputs: Outputs) -> None:
    """Every page of one rank is inverted."""
    del case
    outputs["token_pages"].view(torch.uint8)[1] ^= 255


def writers_added(case: Case, outputs: Outputs) -> None:
    """A page that two ranks brought into a sum."""
    slot = slot_of(case, current=True)
    _pages(outputs)[:, 1, slot] *= 2


def pool_added(case: Case, outputs: Outputs) -> None:
    """A current page on top of what its owner had there."""
    slot = slot_of(case, current=True, at=1)
    page = int(case.inputs["slot_pages"][slot])
    rank, local = (int(case.inputs[name][page]) for name in ("owner", "local_page"))
    _pages(outputs)[:, 1, slot] += case.inputs["token_pools"].view(torch.uint8)[1, rank, local]


def locations_off(case: Case, outputs: Outputs) -> None:
    """Locations that count one page too many."""
    outputs["row_locations"][1] += int(case.params["page_size"])  # type: ignore[arg-type]  # JSON


def never_written(case: Case, outputs: Outputs) -> None:
    """A page that still holds the buffer's poison."""
    _pages(outputs, "index")[0, 1, slot_of(case, current=False)] = poisons.BYTE[0]


def padding_filled(case: Case, outputs: Outputs) -> None:
    """A padding slot with a page in it."""
    del case
    _pages(outputs)[:, 0, -1] = _pages(outputs)[:, 0, 0]


def rows_shifted(case: Case, outputs: Outputs) -> None:
    """Every token of a full page is the one after it."""
    step = wanted.of_case(case)
    size, slot = step.batch.page_size, slot_of(case, current=True)
    places = batches.row_locations(step.batch).tolist()
    first = places.index(slot * size)
    rows = step.kinds["token"].rows[0, first + 1 : first + 1 + size]
    _pages(outputs)[:, 0, slot] = rows.flatten()


def old_page(case: Case, outputs: Outputs) -> None:
    """A current page as its owner's pool had it before."""
    slot = slot_of(case, current=True)
    page = int(case.inputs["slot_pages"][slot])
    rank, local = (int(case.inputs[name][page]) for name in ("owner", "local_page"))
    _pages(outputs)[:, 2, slot] = case.inputs["token_pools"].view(torch.uint8)[2, rank, local]


def without_carried(case: Case, outputs: Outputs) -> None:
    """New tokens on zeros, where their page has earlier ones."""
    step = wanted.of_case(case)
    carried = int(batches.carried_tokens(step.batch)[0])
    width = step.kinds["token"].rows.shape[-1]
    _pages(outputs)[:, 0, slot_of(case, current=True), : carried * width] = 0


FAULTS: Mapping[str, ComposeFault] = MappingProxyType(
    {
        "other-slot": ComposeFault(other_slot, "page-mismatch", "layer 1 token slot", "which slot"),
        "one-byte": ComposeFault(one_byte, "bits", "rank 2 layer 1 token slot"),
        "token-missing": ComposeFault(token_missing, "bits", "layer 0 token", "token 0 is zero"),
        "interleaved": ComposeFault(interleaved, "bits", "layer 0 index", "interleaved"),
        "planar": ComposeFault(planar, "bits", "layer 0 index", "planar again"),
        "zero-page": ComposeFault(
            zero_page, "page-zero", "layer 0 token", "staging row 0 is reserved"
        ),
        "two-layers-before": ComposeFault(
            two_layers_before, "stale-round", "rank 3 layer 2 token", "2 turns before (layer 0)"
        ),
        "next-layer": ComposeFault(
            next_layer, "stale-round", "rank 1 layer 1 token", "reused at distance 1"
        ),
        "owners-swapped": ComposeFault(owners_swapped, "page-mismatch", "token slot", "it is rank"),
        "one-rank": ComposeFault(one_rank, "diverged", "token slot", "rank 1 another"),
        "writers-added": ComposeFault(
            writers_added, "two-writers", "layer 1 token", "twice the right"
        ),
        "pool-added": ComposeFault(pool_added, "two-writers", "layer 1 token", "owner's pool had"),
        "locations-off": ComposeFault(
            locations_off, "page-mismatch", "rank 1   ", "off by +1 page"
        ),
        "never-written": ComposeFault(
            never_written, "unwritten", "rank 0 layer 1 index", "never written"
        ),
        "padding-filled": ComposeFault(
            padding_filled, "pad", "layer 0 token slot", "filled with zeros"
        ),
        "rows-shifted": ComposeFault(
            rows_shifted, "page-mismatch", "layer 0 token", "shifted by one"
        ),
        "old-page": ComposeFault(old_page, "stale-round", "layer 2 token", "before this step"),
        "without-carried": ComposeFault(without_carried, "bits", "layer 0 token", "carried token"),
    }
)
"""By name; `without-carried` needs a carried prefix, the others a step with prefix pages, two
current ones, one of them full with a token behind it, and padding."""
