"""The transport over symmetric memory, its ranks threads, and groups with gloo for NCCL."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import fake_world
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from equivalence.compose import steps
from equivalence.errors import UsageError
from equivalence.paths.ipc import step
from equivalence.world import devices, symmetric
from equivalence.world.transport import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Handle:
    """What a rendezvous gives: every rank's tensor, and a barrier."""

    world: World
    parts: list[Tensor]
    limits: list[int]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A rank's tensor from its start."""
        flat = self.parts[rank].view(dtype)
        return flat[: torch.Size(sizes).numel()].view(sizes)

    def barrier(self, *, channel: int, timeout_ms: int) -> None:
        """Wait for every rank."""
        assert channel == 0
        self.limits.append(timeout_ms)
        self.world.share("barrier", {})


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Symmetric memory is this process's, every rank has a GPU, and its group is its world."""
    told: list[int] = []

    def rendezvous(own: Tensor, world: World) -> Handle:
        said = world.share("rendezvous", {"tensor": own})
        return Handle(world, [each["tensor"] for each in said], told)

    fake = SimpleNamespace(empty=torch.empty, rendezvous=rendezvous)
    monkeypatch.setattr(symmetric, "symm_mem", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(devices, "nccl", lambda world, _: world)
    monkeypatch.setattr(devices, "by_nccl", lambda world: world.all_reduce)

    def enter(world: World, *, transport: str) -> tuple[torch.device, list[str]]:
        assert transport == "symmetric"
        return CPU, [f"GPU-{rank}" for rank in range(world.ranks)]

    monkeypatch.setattr(devices, "enter", enter)
    return told


def test_ways_over_symmetric_memory_agree_on_every_rank(limits: list[int]) -> None:
    """Direct and fused give the same pages on both ranks, shape after shape."""
    cases = steps.sequence("mixed", cp=2, layers=2, scale=4)[:2]

    def compose(world: World) -> list[Tensor]:
        link = symmetric.link(world)
        return [
            step.compose(link, way=way, turn=0, **case.inputs, **case.params)["token_pages"]
            for case in cases
            for way in ("direct", "fused")
        ]

    found = fake_world.run(2, compose)
    assert [type(each) for each in found] == [list] * 2, found
    for pages in zip(*found, strict=True):
        assert torch.equal(*(page.view(torch.uint8) for page in pages))
    for direct, fused in zip(found[0][::2], found[0][1::2], strict=True):
        assert torch.equal(direct.view(torch.uint8), fused.view(torch.uint8))
    # A kernel that waits for nobody ends after the host has told of it.
    assert set(limits) == {int(2000 * fake_world.TIMEOUT_S)}


def test_memory_lasts_as_long_as_its_shape(limits: list[int]) -> None:
    """The same name and shape are the same memory; ranks that differ are refused."""
    del limits

    def export(world: World) -> str:
        link = symmetric.link(world)
        parts = link.export("pages", (3, 2))
        assert [int(part.sum()) for part in parts] == [0, 0]
        assert link.export("pages", (3, 2)) is parts
        assert [part.shape for part in link.export("pages", (0, 2))] == [(0, 2)] * 2
        with pytest.raises(UsageError) as refused:
            link.export("pages", (4 + link.rank,))
        return str(refused.value)

    told = "rank 0 exports 'pages' as [4], rank 1 as [5]: every rank gives the same shape"
    assert fake_world.run(2, export)[0] == told


@pytest.mark.parametrize(
    ("ranks", "gpus", "told"),
    [(3, 2, "3 ranks have 2"), (2, 1, "2 ranks have 1"), (1, 1, "1 rank")],
)
def test_ranks_that_share_a_gpu_are_refused(
    limits: list[int], monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, told: str
) -> None:
    """One sentence, on every rank, with what to use in its place."""
    del limits

    def enter(world: World, *, transport: str) -> tuple[torch.device, list[str]]:
        assert transport == "symmetric"
        return CPU, [f"GPU-{rank % gpus}" for rank in range(world.ranks)]

    monkeypatch.setattr(devices, "enter", enter)
    for error in fake_world.run(ranks, symmetric.link):
        assert type(error) is UsageError
        assert "transport symmetric is one rank a GPU and two at least: " + told in str(error)
        assert str(error).endswith("transport cuda shares GPUs")


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked for as NCCL is gloo; the backends asked for."""
    asked: list[str] = []
    init, new = dist.init_process_group, dist.new_group
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def first(backend: str, **call: Any) -> None:  # noqa: ANN401 - as dist's
        asked.append(backend)
        init("gloo", **call)

    def later(*, backend: str, **call: Mapping[str, Any]) -> object:
        asked.append(backend)
        return new(backend="gloo", **call)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(dist, "init_process_group", first)
    monkeypatch.setattr(dist, "new_group", later)
    yield asked
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("failed", [False, True])
def test_groups_meet_through_the_world_and_end_with_it(
    gloo: list[str],
    monkeypatch: pytest.MonkeyPatch,
    failed: bool,  # noqa: FBT001 - a parameter
) -> None:
    """The first is the process's own, a later one goes through it; ranks fail or do not."""
    aborted: list[object] = []

    def abort(group: dist.ProcessGroup) -> None:
        aborted.append(group)
        dist.destroy_process_group(group)

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    names: list[str] = []

    def both(world: World) -> list[int]:
        def store(name: str) -> Store:
            names.append(name)
            return world.store(name)

        ends: list[Callable[[bool], None]] = []
        told = replace(world, store=store, at_end=ends.append)
        sums = []
        for _ in range(2):
            tensor = torch.tensor([200, 1], dtype=torch.uint8).view(torch.float8_e4m3fn)
            devices.by_nccl(devices.nccl(told, CPU))(tensor)
            sums += tensor.view(torch.uint8).tolist()
        while ends:
            ends.pop()(failed)
        assert not dist.is_initialized()
        return sums

    assert fake_world.run(1, both) == [[200, 1, 200, 1]]
    assert (gloo, names) == (["nccl", "nccl"], ["nccl"])
    assert len(aborted) == (2 if failed else 0)


def test_a_group_that_does_not_add_up_is_refused(
    gloo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried before anybody relies on it."""

    def wrong(tensor: Tensor, **_: object) -> None:
        tensor.fill_(7)

    monkeypatch.setattr(dist, "all_reduce", wrong)
    (error,) = fake_world.run(1, lambda world: devices.nccl(world, CPU))
    assert (type(error), str(error)) == (RuntimeError, "NCCL adds 1 ones up to 7")
    assert gloo == ["nccl"]
