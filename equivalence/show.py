"""Show: what is in a case, in words; and the table of a folder of cases."""

from collections.abc import Iterator

from torch import Tensor

from equivalence import flags, ops, plain, stages
from equivalence.case import Case, held
from equivalence.units import many
from refimpl.compose import KINDS


def lines(case: Case) -> Iterator[str]:
    """Everything a person asks of one case file, in lines that are safe to print.

    Raises:
        InvalidCase: a tensor cannot be read.
    """
    return map(plain.line, _lines(case))


def _lines(case: Case) -> Iterator[str]:
    loaded = held(case)
    sizes = ops.validate(case)
    op = ops.find(case.op)
    exact = op.exact is not None or op.weigh is not None
    unit = "ranks" if op.spec.rows == "cp" else "rows"
    yield f"{case.name}   {case.op}   {sizes['rows']:,} {unit}"
    if case.params:
        yield "  params      " + "  ".join(f"{k}={v}" for k, v in sorted(case.params.items()))
    judges = "the reference's bytes judge" if exact else "recorded scores judge, or nothing does"
    yield f"  arithmetic  {case.arithmetic or f'none: {judges}'}"
    yield f"  contract    {case.contract or 'strict'} (of the recorded kernel)"
    for name, tensor in loaded.inputs.items():
        yield f"  input       {name:<22} {describe(tensor)}"
    for i, entry in enumerate(loaded.recorded):
        for name, tensor in entry.items():
            space = case.spaces.get(name)
            where = f"  {space.kind}, pad {space.pad}" if space else ""
            yield f"  recorded {i}  {name:<22} {describe(tensor)}{where}"
    if op.spec.rows == "cp":
        kinds = " and ".join(kind for kind in KINDS if f"{kind}_pools" in loaded.inputs)
        yield f"  kinds       {kinds}, {many(sizes['layers'], 'layer')} each"
        counts = [
            many(sizes[n], what) for n, what in (("R", "request"), ("S", "slot"), ("N", "page"))
        ]
        yield f"  step        {', '.join(counts)}"
    yield from _rows(loaded, seen=not exact)
    for flag in sorted(case.flags):
        yield f"  hunts       {flag}: {flags.known().get(flag, 'nothing that is known')}"
    for key, value in sorted(case.provenance.items()):
        yield f"  origin      {key}: {value}"
    for stage, digest in sorted(case.reference.items()):
        yield f"  reference   {stage} xxh3-128 {digest}"


def _rows(case: Case, *, seen: bool) -> Iterator[str]:
    """What the windows of a case in memory hold, where its rows see columns."""
    windows = ops.find(case.op).windows(case)
    visible, k = windows.visible, stages.k_of(case)
    if len(visible) and seen:
        yield f"  windows     {int(visible.min()):,} to {int(visible.max()):,} columns"
    if k:
        selecting, empty = int((visible > k).sum()), int((visible == 0).sum())
        short = len(visible) - selecting - empty
        yield f"  rows        {selecting:,} select, {short:,} short, {empty:,} empty"
    for row, sentence in windows.broken.items():
        yield f"  broken      row {row}: {sentence}"


def describe(tensor: Tensor) -> str:
    """A tensor's dtype, shape, padding and size."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f"  strides {list(tensor.stride())}"
    size = tensor.numel() * tensor.element_size()
    return f"{dtype:<14} {list(tensor.shape)!s:<20} {size:,} bytes{strides}"
