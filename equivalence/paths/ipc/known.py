"""The faults on demand: what each does, where it has its place, and how it must show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivalence.paths.ipc import breaks, slips
from equivalence.paths.ipc.ways import WAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from equivalence.paths.ipc.peers import Peers
    from equivalence.paths.ipc.plan import Plan

EVERY = tuple(WAYS)
SUMS = tuple(name for name, way in WAYS.items() if way.sums)
PEERED = tuple(name for name, way in WAYS.items() if way.exports)
STAGED = tuple(name for name, way in WAYS.items() if "staging" in way.exports)
FENCED = tuple(name for name, way in WAYS.items() if way.fenced)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a fault does, and how it must show.

    Attributes:
        does: one sentence.
        ways: those that have the place where it is made.
        rules: a verdict has one of these at least; none where it must be equal.
        reads: whether the rank that has it is one that reads another's page, not its writer.
        needs: what a step must have for it to show, see `lacking`.
        plan: changes a plan: (fault, link, batch, build) -> plan.
        peers: changes a rank's side: (fault, link, peers, plan) -> peers.
        inputs: changes what a rank is given: (fault, link, tensors) -> tensors.
    """

    does: str
    ways: tuple[str, ...]
    rules: tuple[str, ...]
    reads: bool = False
    needs: tuple[str, ...] = ()
    plan: Callable[..., Plan] | None = None
    peers: Callable[..., Peers] | None = None
    inputs: Callable[..., Mapping[str, Tensor]] | None = None


_ENDS = ("crash", "timeout")
NEEDS: Mapping[str, str] = {
    "two ranks": "cp is 2 or more",
    "prefix": "a slot of a prefix",
    "current": "a slot that is written",
    "remote current": "a slot that is written, and another rank that reads it",
    "two current": "two slots written by one rank",
    "shared page": "a page with two or more new tokens",
    "one kind": "one kind: a barrier of another one hides it",
    "two rounds": "two layers",
    "two turns": (
        "a second step whose batch has the same shapes and other prefix pages or lengths"
    ),
    "values": "a byte 0x80 or 0xff in it",
}
"""What a fault may need to show."""


FAULTS: Mapping[str, Known] = {
    "producer-delay": Known(
        does="in each round another rank is `delay` late with what it writes",
        ways=EVERY,
        rules=(),
        peers=breaks.producer_delay,
    ),
    "slow-reader": Known(
        does="a rank is `delay` late to read after each barrier",
        ways=FENCED,
        reads=True,
        rules=(),
        peers=breaks.slow_reader,
    ),
    "late-reader": Known(
        does="a rank reads a round after the others have written the next one",
        ways=FENCED,
        reads=True,
        rules=(),
        needs=("two ranks",),
        peers=breaks.late_reader,
    ),
    "killed-before": Known(
        does="a rank is killed before a round",
        ways=EVERY,
        rules=_ENDS,
        needs=("two ranks",),
        peers=breaks.killed_before,
    ),
    "killed-inside": Known(
        does="a rank is killed while it waits in a round",
        ways=EVERY,
        rules=_ENDS,
        needs=("two ranks",),
        peers=breaks.killed_inside,
    ),
    "killed-after": Known(
        does="a rank is killed after a round",
        ways=EVERY,
        rules=_ENDS,
        needs=("two ranks",),
        peers=breaks.killed_after,
    ),
    "skipped-round": Known(
        does="a rank leaves out the barrier of a round",
        ways=FENCED,
        rules=_ENDS,
        needs=("two ranks",),
        peers=breaks.skipped_round,
    ),
    "no-release": Known(
        does="a rank signals first and writes its bytes after, when the others have read",
        ways=FENCED,
        rules=("stale-round", "unwritten"),
        needs=("remote current",),
        peers=breaks.no_release,
    ),
    "half-reused": Known(
        does="a round uses the half of the one before, which a rank reads late",
        ways=FENCED,
        reads=True,
        rules=("stale-round",),
        needs=("remote current", "one kind", "two rounds"),
        peers=breaks.half_reused,
    ),
    "own-capability": Known(
        does="a rank finds by itself that it has no peer memory, and takes the fallback alone",
        ways=FENCED,
        rules=_ENDS,
        needs=("two ranks",),
        peers=breaks.own_capability,
    ),
    "stale-pointers": Known(
        does="a rank reads stagings or dense buffers where they were before they were made anew",
        ways=FENCED,
        reads=True,
        # Bits are those of a step that nobody here has seen.
        rules=("unwritten", "stale-round", "page-mismatch", "bits"),
        needs=("remote current",),
        peers=breaks.stale_pointers,
    ),
    "address-key": Known(
        does="plans are kept by where the tensors of a batch are, and these are used again",
        ways=EVERY,
        rules=("page-mismatch", "bits"),
        needs=("two turns",),
        plan=slips.address_key,
    ),
    "overflow-past": Known(
        does="the staging has a page less than the batch writes, and nobody looks",
        ways=STAGED,
        rules=("wrote-outside",),
        needs=("current",),
        plan=slips.overflow_past,
        peers=slips.past_the_end,
    ),
    "overflow-wrapped": Known(
        does="staging rows past the end begin anew at row 1",
        ways=STAGED,
        rules=("page-mismatch", "bits"),
        needs=("two current",),
        plan=slips.overflow_wrapped,
    ),
    "row-zero": Known(
        does="staging begins at row 0, which the gather takes for no page",
        ways=STAGED,
        rules=("page-zero", "wrote-outside"),
        needs=("remote current",),
        plan=slips.row_zero,
        peers=slips.skips_zero,
    ),
    "unaligned-split": Known(
        does="a page's later tokens are computed by another rank than its writer",
        ways=FENCED,
        rules=("bits", "wrote-outside"),
        needs=("two ranks", "shared page"),
        plan=slips.unaligned_split,
    ),
    "offset-wrap": Known(
        does="byte offsets into a pool wrap: a page past the end of the positive ones reads zeros",
        ways=PEERED,
        rules=("page-zero", "page-mismatch"),
        needs=("prefix",),
        peers=slips.offset_wrap,
    ),
    "wrong-owner": Known(
        does="each prefix page is taken for the next rank's",
        ways=EVERY,
        rules=("page-mismatch", "bits"),
        needs=("two ranks", "prefix"),
        plan=slips.wrong_owner,
    ),
    "added-twice": Known(
        does="what a rank gives to a sum is given by a second writer too: the bytes add up",
        ways=SUMS,
        rules=("two-writers",),
        needs=("current",),
        peers=slips.added_twice,
    ),
    "added-by-value": Known(
        does="sums are those of fp8 values, not of bytes: -0.0 and the sign of a NaN are lost",
        ways=SUMS,
        rules=("bits",),
        needs=("current", "values"),
        peers=slips.added_by_value,
    ),
    "no-zero-fill": Known(
        does="a rank adds to what its buffer held before",
        ways=SUMS,
        rules=("bits", "pad"),
        needs=("current",),
        peers=slips.no_zero_fill,
    ),
    "another-size": Known(
        does="a rank's pools have a page more than the others'",
        ways=EVERY,
        rules=_ENDS,
        needs=("two ranks",),
        inputs=slips.another_size,
    ),
}
"""Every fault by name."""
