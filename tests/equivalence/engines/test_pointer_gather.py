"""The gather over a table of addresses; its kernel is here in torch, since Triton needs a GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence.engines import found, pointer_gather
from equivalence.errors import UsageError
from equivalence.paths.ipc import moves
from equivalence.paths.ipc.moves import Read


class Kernel:
    """As `pointer_kernel.gather_words`, one program after another, over raw addresses."""

    def __init__(self) -> None:
        """Start without a call."""
        self.words: list[torch.dtype] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:  # noqa: ANN401 - a compiled kernel
        """Launch over a grid."""

        def launch(*call: Any, BLOCK: int) -> None:  # noqa: ANN401, N803 - as the kernel's
            table, source, row, slots, out, words = call
            self.words.append(out.dtype)
            for read in range(grid[0]):
                for block in range(grid[1]):
                    at = slice(block * BLOCK, min((block + 1) * BLOCK, words))
                    out[slots[read], at] = _page(table, source[read], row[read], out)[at]

        return launch


def _page(table: Tensor, source: Tensor, row: Tensor, out: Tensor) -> Tensor:
    """The words of one page, or zeros."""
    if int(source) < 0:
        return torch.zeros_like(out[0])
    count = out[0].nbytes
    address = int(table[int(source)]) + int(row) * count
    return torch.frombuffer(bytearray(ctypes.string_at(address, count)), dtype=out.dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel in torch, found where the real one is."""
    made = Kernel()
    named = SimpleNamespace(gather_words=made)
    monkeypatch.setattr(found, "module", lambda name, **_: {pointer_gather.KERNEL: named}[name])
    return made


def parts_of(page_bytes: int) -> list[Tensor]:
    """Four tensors of five pages."""
    random = torch.Generator().manual_seed(page_bytes)
    shape = (5, page_bytes)
    return [torch.randint(256, shape, dtype=torch.uint8, generator=random) for _ in range(4)]


@pytest.mark.parametrize(
    ("page_bytes", "word"),
    [
        (656 * 64, torch.int64),
        (132 * 64, torch.int64),
        (12, torch.int32),
        (10, torch.int16),
        (7, torch.uint8),
    ],
)
def test_each_slot_gets_the_page_of_its_source(
    kernel: Kernel, page_bytes: int, word: torch.dtype
) -> None:
    """By the widest word that a page is made of; a slot without a source is zeros."""
    parts = parts_of(page_bytes)
    source, row = torch.tensor([0, 3, -1, 2, 1, 1]), torch.tensor([4, 0, 0, 2, 3, 1])
    out = torch.full((6, page_bytes), 9, dtype=torch.uint8)
    table = pointer_gather.addresses(parts)
    pointer_gather.gather(table=table, source=source, row=row, out=out)
    zeros = torch.zeros(page_bytes, dtype=torch.uint8)
    want = [parts[0][4], parts[3][0], zeros, parts[2][2], parts[1][3], parts[1][1]]
    assert torch.equal(out, torch.stack(want))
    assert kernel.words == [word]


def test_no_slot_launches_nothing(kernel: Kernel) -> None:
    """An empty grid is none."""
    none = torch.empty(0, dtype=torch.int64)
    table = pointer_gather.addresses(parts_of(8))
    pointer_gather.gather(
        table=table, source=none, row=none, out=torch.empty(0, 8, dtype=torch.uint8)
    )
    assert kernel.words == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": torch.zeros(2, dtype=torch.int32)}, "row is torch.int32 [2]: it is contiguous"),
        ({"source": torch.zeros(2, 1, dtype=torch.int64)}, "source is torch.int64 [2, 1]: it is"),
        ({"out": torch.zeros(2, 8)}, "out is torch.float32 [2, 8]: it is contiguous u8"),
        ({"row": torch.zeros(3, dtype=torch.int64)}, "2 sources, 3 rows and 2 slots are not one"),
        ({"out": torch.zeros(1, 8, dtype=torch.uint8)}, "2 sources, 2 rows and 2 slots are not"),
        ({"slots": torch.zeros(2)}, "slots is torch.float32 [2]: it is contiguous int64"),
    ],
)
def test_other_tensors_are_refused(kernel: Kernel, change: dict[str, Tensor], message: str) -> None:
    """Before the kernel sees an address."""
    call = {
        "table": torch.zeros(1, dtype=torch.int64),
        "source": torch.zeros(2, dtype=torch.int64),
        "row": torch.zeros(2, dtype=torch.int64),
        "out": torch.zeros(2, 8, dtype=torch.uint8),
    }
    with pytest.raises(UsageError) as refused:
        pointer_gather.gather(**(call | change))
    assert str(refused.value).startswith(message)
    assert kernel.words == []


def test_a_gather_of_peers_is_one_launch(kernel: Kernel) -> None:
    """The same bytes as through one index after another, and no slot but those that are read."""
    parts = parts_of(24)
    reads = (
        Read(source=2, slots=torch.tensor([5, 0]), rows=torch.tensor([1, 4])),
        Read(source=0, slots=torch.tensor([2]), rows=torch.tensor([3])),
    )
    ask = pointer_gather.Gather()
    for number in range(3):
        got = torch.full((6, 24), number, dtype=torch.uint8)
        want = got.clone()
        table = parts if number < 2 else parts[::-1]
        ask(table, reads, got)
        moves.gather(table, reads, want)
        assert torch.equal(got, want)
    ask(parts, (), got)
    assert torch.equal(got, want)
    assert kernel.words == [torch.int64] * 3


def test_other_reads_are_never_taken_for_those_kept(kernel: Kernel) -> None:
    """Reads made anew for each call, as a way does, more often than any are kept."""
    del kernel
    parts = parts_of(8)
    ask = pointer_gather.Gather()
    for number in range(300):
        row = torch.tensor([number % 5])
        reads = [Read(source=number % 4, slots=torch.tensor([0]), rows=row)]
        out = torch.zeros(1, 8, dtype=torch.uint8)
        ask(parts, reads, out)
        assert torch.equal(out[0], parts[number % 4][number % 5])


def test_it_runs_where_there_is_a_gpu_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none of it; a GPU without triton neither."""
    assert not pointer_gather.available(torch.device("cpu"))
    monkeypatch.setattr(pointer_gather, "KERNEL", "equivalence.engines.no_such_kernel")
    assert not pointer_gather.available(torch.device("cuda", 0))
    monkeypatch.setattr(pointer_gather, "KERNEL", "equivalence.engines.found")
    assert pointer_gather.available(torch.device("cuda", 0))
