"""Bytes a second of composing, digesting and judging pages, each as a ratio to a named peer."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch
import xxhash
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from equivalence import draws
from equivalence.checks.composed import weighing
from equivalence.compose import digests, judging, steps
from equivalence.compose.requests import PAGE_SIZE
from equivalence.compose.steps import TOKEN_BYTES
from equivalence.verdict import Status
from refimpl import batch as batches
from refimpl import compose
from refimpl.bits import as_int

CP, LAYERS = 8, 8
BYTES = 2 << 30
NEW = 512
KINDS = ("token", "index")


def ratio_to(peer: Callable[[], object], call: Callable[[], object], *, rounds: int = 7) -> float:
    """How fast a call is beside its peer: the best of each, taken in turns."""
    times: dict[Callable[[], object], list[float]] = {peer: [], call: []}
    for _ in range(rounds):
        for each, taken in times.items():
            start = perf_counter()
            each()
            taken.append(perf_counter() - start)
    return min(times[peer]) / min(times[call])


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """One step of one request whose pages are 2 GiB over all layers and both kinds.

    Attributes:
        step: the batch by keyword.
        pools: by kind, u8 [LAYERS, CP, pool pages, page bytes].
        rows: by kind, u8 [LAYERS, NEW, token bytes].
        out: by kind, u8 [LAYERS, S, page bytes].
    """

    step: dict[str, Tensor]
    pools: dict[str, Tensor]
    rows: dict[str, Tensor]
    out: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Of what is composed."""
        return sum(out.nbytes for out in self.out.values())


def filled(*shape: int) -> Tensor:
    """Random bytes."""
    return draws.raw(torch.Generator().manual_seed(0), *shape)


@pytest.fixture(scope="module")
def pages() -> Pages:
    """A chunk of 512 tokens at the end of a prefix, its pages spread over all ranks."""
    page_bytes = {kind: PAGE_SIZE * TOKEN_BYTES[kind] for kind in KINDS}
    slots = BYTES // LAYERS // sum(page_bytes.values())
    prefix = (slots - NEW // PAGE_SIZE) * PAGE_SIZE
    page = torch.arange(slots + 1, dtype=torch.int32)
    each = 1 + -(-slots // CP)
    random = torch.Generator().manual_seed(0)
    return Pages(
        step={
            "slot_pages": 1 + torch.randperm(slots, generator=random).int(),
            "owner": page % CP,
            "local_page": 1 + (page - 1).clamp(min=0) // CP,
            "writer": batches.split_writers(
                prefix_lens=[prefix], extend_lens=[NEW], cp=CP, page_size=PAGE_SIZE
            ),
            "prefix_lens": torch.tensor([prefix], dtype=torch.int32),
            "extend_lens": torch.tensor([NEW], dtype=torch.int32),
        },
        pools={kind: filled(LAYERS, CP, each + 1, size) for kind, size in page_bytes.items()},
        rows={kind: filled(LAYERS, NEW, TOKEN_BYTES[kind]) for kind in KINDS},
        out={kind: filled(LAYERS, slots, size) for kind, size in page_bytes.items()},
    )


def compose_all(pages: Pages) -> None:
    """The dense buffers of every layer and both kinds."""
    step: dict[str, Any] = {**pages.step, "cp": CP, "page_size": PAGE_SIZE}
    for kind in KINDS:
        compose.compose_pages(
            pools=pages.pools[kind],
            rows=pages.rows[kind],
            kind=kind,
            out=pages.out[kind],
            **step,
        )


def copy_all(pages: Pages) -> None:
    """The same bytes copied from the same pools in one piece a kind."""
    for kind in KINDS:
        flat = pages.out[kind].view(-1)
        flat.copy_(pages.pools[kind].view(-1)[: len(flat)])


def test_composed_bytes_a_second(benchmark: BenchmarkFixture, pages: Pages) -> None:
    """Of the one-process reference; the peer is `copy_` of the same bytes in the same run."""
    benchmark(compose_all, pages)
    least = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    ratio = ratio_to(lambda: copy_all(pages), lambda: compose_all(pages))
    benchmark.extra_info["gib"] = round(pages.bytes / (1 << 30), 2)
    benchmark.extra_info["bytes_per_second"] = round(pages.bytes / least)
    benchmark.extra_info["ratio_to_copy"] = round(ratio, 2)
    assert ratio >= 0.5


def test_judged_bytes_a_second(benchmark: BenchmarkFixture) -> None:
    """Of the judge over what 8 ranks hold of a chunk; the peer is `torch.equal` of those bytes."""
    case = steps.sequence("chunk")[1]
    held = {name: whole.contiguous() for name, whole in weighing.reference(case).items()}
    same = {name: whole.clone() for name, whole in held.items()}
    size = sum(whole.nbytes for whole in held.values())

    def equal() -> bool:
        return all(torch.equal(as_int(held[name]), as_int(same[name])) for name in held)

    verdict = benchmark(judging.judge, case, held)
    assert verdict.status is Status.EQUAL
    least = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    benchmark.extra_info["mib"] = round(size / (1 << 20))
    benchmark.extra_info["bytes_per_second"] = round(size / least)
    ratio = ratio_to(equal, lambda: judging.judge(case, held))
    benchmark.extra_info["ratio_to_torch_equal"] = round(ratio, 2)


def test_digested_bytes_a_second(benchmark: BenchmarkFixture, pages: Pages) -> None:
    """Of position-keyed digests of what was composed; the peer is one XXH3 over the same bytes."""
    step = batches.Batch(**pages.step, cp=CP, page_size=PAGE_SIZE, pool_group=1)
    flat = {kind: memoryview(out.view(-1).numpy().data) for kind, out in pages.out.items()}

    def plain() -> list[bytes]:
        return [xxhash.xxh3_64_digest(data) for data in flat.values()]

    def digest() -> list[int]:
        return [len(digests.of_dense(out, step)) for out in pages.out.values()]

    found = benchmark(digest)
    assert found == [len(step.slot_pages)] * len(KINDS)
    least = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    ratio = ratio_to(plain, digest)
    benchmark.extra_info["bytes_per_second"] = round(pages.bytes / least)
    benchmark.extra_info["ratio_to_xxh3"] = round(ratio, 2)
    assert ratio >= 0.5
