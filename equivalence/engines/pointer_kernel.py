"""The Triton kernel of `pointer_gather`; importing this needs triton."""

import triton  # type: ignore[import-not-found,unused-ignore]  # there is none for a CPU
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]  # triton may have no types
def gather_words(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0917 - it is compiled
    table,  # noqa: ANN001 - pointers, and how many words a page has
    source,  # noqa: ANN001
    row,  # noqa: ANN001
    slots,  # noqa: ANN001
    out,  # noqa: ANN001
    words,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803 - triton's custom for what is compiled in
):
    """Program (read, block): words of one page from the pointer that its source names, or zeros."""
    read = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < words
    which = tl.load(source + read)
    page = tl.load(row + read) * words
    slot = tl.load(slots + read)
    base = tl.load(table + tl.maximum(which, 0)).to(tl.pointer_type(out.dtype.element_ty))
    value = tl.load(base + page + at, mask=live & (which >= 0), other=0)
    tl.store(out + slot * words + at, value, mask=live)
