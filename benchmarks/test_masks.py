"""Positions a second of comparing and judging masks, each as a ratio to a named peer."""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from equivalence.checks import masks
from equivalence.checks.maskwords import differing
from equivalence.checks.published import Published
from equivalence.checks.rows import IDENTICAL
from equivalence.contract import Contract
from refimpl import masks as reference

ROWS, COLUMNS = 1 << 14, 1 << 17
STATUS = Path("/proc/self/status")


def peer_seconds(call: Callable[[], object], *, rounds: int = 5) -> float:
    """The best of a few runs of a peer, in seconds."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def equal_seconds(mask: Tensor) -> float:
    """Of torch.equal over a mask and its copy."""
    same = mask.clone()
    return peer_seconds(lambda: torch.equal(mask, same))


def resident(key: str) -> int:
    """Bytes that the process holds, VmRSS, or held at most, VmHWM."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def held_beyond(call: Callable[[], object]) -> float:
    """The most MiB of memory that a call takes beyond what the process holds."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / (1 << 20)


@pytest.fixture(scope="module")
def blocks() -> Tensor:
    """Published blocks of all rows, uint8 [rows, columns / 8] of 0 and 1."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (ROWS, COLUMNS // 8), dtype=torch.uint8, generator=random)


def pair(blocks: Tensor, form: str, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks that are the same in the windows; past a shorter one the second is garbage."""
    want = blocks * 255
    if form == "bool":
        want = blocks.repeat_interleave(8, 1)
    got = want.clone()
    each = 1 if form == "bool" else 8
    for row, seen in enumerate(visible.tolist()):
        got[row, -(-seen // each) :] = 77
    if form == "bool":
        return want.view(torch.bool), got.view(torch.bool)
    return want, got


@pytest.mark.parametrize("windows", ["full", "causal", "ragged"])
@pytest.mark.parametrize("form", ["bool", "packed"])
def test_compared_positions_a_second(
    benchmark: BenchmarkFixture, blocks: Tensor, form: str, windows: str
) -> None:
    """Of `differing`; the peers are torch.equal over the bool masks, and `differing` of those."""
    visible = {
        "full": torch.full((ROWS,), COLUMNS),
        "causal": COLUMNS - ROWS + torch.arange(ROWS) + 1,
        "ragged": torch.randint(COLUMNS // 4, COLUMNS + 1, (ROWS,)),
    }[windows]
    wide = pair(blocks, "bool", visible)
    equal = ROWS * COLUMNS / equal_seconds(wide[0])
    want, got = wide if form == "bool" else pair(blocks, form, visible)

    def compare() -> Tensor:
        return differing(want=want, got=got, visible=visible)

    held = held_beyond(compare)
    found = benchmark(compare)
    assert not bool(found.any())
    least = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    rate = int(visible.sum()) / least
    benchmark.extra_info["positions_per_second"] = round(rate)
    benchmark.extra_info["mib_beyond_inputs"] = round(held, 1)
    benchmark.extra_info["ratio_to_torch_equal_of_bool"] = round(rate / equal, 2)
    if form == "packed":
        other = peer_seconds(lambda: differing(want=wide[0], got=wide[1], visible=visible))
        benchmark.extra_info["ratio_to_bool"] = round(other / least, 2)


@pytest.mark.parametrize("form", ["bool", "packed", "unordered"])
def test_judged_positions_a_second(benchmark: BenchmarkFixture, form: str) -> None:
    """Of the check by scores; the peer publishes the reference's mask and does nothing else."""
    rows, columns, topk_blocks = 64, 65536, 2048
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    visible = columns - rows + torch.arange(rows)
    start = torch.zeros_like(visible)

    def publish() -> Tensor:
        return reference.publish(
            scores=scores,
            row_start=start,
            row_end=visible,
            topk_blocks=topk_blocks,
            form=form,  # type: ignore[arg-type] # one of the forms
        )

    published = Published(
        got=publish(),
        scores=scores,
        at=torch.arange(rows),
        column=start,
        visible=visible,
        topk_blocks=topk_blocks,
        contract=Contract(),
        ids=torch.arange(rows),
    )
    held = held_beyond(lambda: masks.decide(published))
    decided = benchmark(masks.decide, published)
    assert decided.codes.tolist() == [IDENTICAL] * rows
    least = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    benchmark.extra_info["positions_per_second"] = round(int(visible.sum()) / least)
    benchmark.extra_info["mib_beyond_inputs"] = round(held, 1)
    benchmark.extra_info["ratio_to_publishing"] = round(peer_seconds(publish) / least, 2)
