"""The transport over CUDA IPC, its ranks threads and its device memory this process's."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_driver
import fake_world
import pytest
import torch
from torch import Tensor

from equivalence.compose import steps
from equivalence.errors import UsageError
from equivalence.paths.ipc import step
from equivalence.paths.ipc.ways import WAYS
from equivalence.world import cuda, devices
from equivalence.world.link import Link
from equivalence.world.transport import Released, World
from refimpl.compose import KINDS, compose_pages

CPU = torch.device("cpu")
PARTS = ("pools", "rows")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> fake_driver.Driver:
    """Device memory is this process's, and every rank is on one GPU."""

    def enter(world: World, *, transport: str) -> tuple[torch.device, list[str]]:
        assert transport == "cuda"
        return CPU, ["GPU-0"] * world.ranks

    monkeypatch.setattr(devices, "enter", enter)
    return fake_driver.use(monkeypatch)


def on_ranks(ranks: int, function: Callable[[Link], Any]) -> list[Any]:
    """What a function of a link gives on every rank, or its error."""
    return fake_world.run(ranks, lambda world: function(cuda.link(world)))


def test_everybody_reads_what_everybody_exports(driver: fake_driver.Driver) -> None:
    """Zeros at first; after a barrier, what each rank wrote into its part."""
    del driver

    def write(link: Link) -> tuple[list[int], list[int]]:
        parts = link.export("pages", (2, 3))
        before = [int(part.sum()) for part in parts]
        link.barrier()
        parts[link.rank].fill_(link.rank + 1)
        link.barrier()
        assert link.export("pages", (2, 3)) is parts
        return before, [int(part.sum()) for part in parts]

    assert on_ranks(3, write) == [([0, 0, 0], [6, 12, 18])] * 3


def test_another_shape_is_other_memory_of_zeros(driver: fake_driver.Driver) -> None:
    """Room that a name no longer has is used again, by all ranks alike."""

    def reshape(link: Link) -> list[int]:
        seen = []
        for shape in ((4,), (8,), (4,), (5, 5)):
            parts = link.export("pages", shape)
            seen.append(sum(int(part.sum()) for part in parts))
            link.barrier()
            parts[link.rank].fill_(9)
            link.barrier()
        return seen

    assert on_ranks(2, reshape) == [[0, 0, 0, 0]] * 2
    # For each rank its flags and one room, which has every shape in turn.
    assert len(driver.sizes) == 4


def test_flags_are_a_name_like_any_other(driver: fake_driver.Driver) -> None:
    """Barriers go on, whatever a function exports and writes under the name of their memory."""
    del driver

    def flags(link: Link) -> list[list[int]]:
        seen = []
        for shape in ((2, link.ranks * 8), (3,), (2, link.ranks * 8)):
            parts = link.export("flags", shape)
            seen.append([int(part.sum()) for part in parts])
            link.barrier()
            parts[link.rank].fill_(255)
            link.barrier()
            seen.append([int(part.min()) for part in parts])
            link.barrier()
        return seen

    assert on_ranks(2, flags) == [[[0, 0], [255, 255]] * 3] * 2


def test_shapes_that_differ_by_rank_are_refused(driver: fake_driver.Driver) -> None:
    """Both ranks say which."""
    del driver
    found = on_ranks(2, lambda link: link.export("pages", (4 + link.rank,)))
    assert [type(each) for each in found] == [UsageError] * 2
    assert str(found[0]) == (
        "rank 0 exports 'pages' as [4], rank 1 as [5]: every rank gives the same shape"
    )


def test_memory_that_cannot_be_opened_ends_every_rank(driver: fake_driver.Driver) -> None:
    """The first that could not, whose memory it was, and the driver's word for it."""
    driver.refused = True
    found = on_ranks(2, lambda link: link)
    told = (
        "rank 0 on cpu cannot open 'flags' of rank 1: "
        "cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_CONTEXT (201)"
    )
    assert [str(each) for each in found] == [told] * 2


def test_a_rank_without_room_ends_every_rank(
    driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number, its device and how much was asked for."""
    monkeypatch.setattr(driver, "cuMemAlloc_v2", lambda *_: fake_driver.INVALID)
    found = on_ranks(2, lambda link: link)
    told = (
        "rank 0 on cpu cannot export 'flags', 2,097,152 bytes: "
        "cuMemAlloc_v2 failed with CUDA_ERROR_INVALID_CONTEXT (201)"
    )
    assert [str(each) for each in found] == [told] * 2


def test_sums_are_those_of_bytes(driver: fake_driver.Driver) -> None:
    """Two ranks on one GPU add up through the host."""
    del driver

    def add(link: Link) -> tuple[list[int], int]:
        tensor = torch.tensor([100 + link.rank, 1], dtype=torch.uint8)
        link.all_reduce(tensor)
        return tensor.tolist(), link.agree(link.rank + 5)

    assert on_ranks(3, add) == [([303 % 256, 3], 5)] * 3


def test_a_barrier_waits_for_the_last(driver: fake_driver.Driver) -> None:
    """Nobody returns before everybody has come, in a hundred rounds."""
    del driver
    came = [0, 0, 0, 0]
    lock = threading.Lock()

    def rounds(link: Link) -> list[int]:
        least = []
        for _ in range(100):
            with lock:
                came[link.rank] += 1
            link.barrier()
            least.append(min(came))
        return least

    for least in on_ranks(4, rounds):
        assert all(seen >= number for number, seen in enumerate(least, start=1))


def test_a_rank_that_does_not_come_is_no_reason_to_hang(driver: fake_driver.Driver) -> None:
    """The world ends, and whoever waits for the flags is released."""
    del driver

    def meet(link: Link) -> None:
        link.barrier()
        if link.rank == 1:
            raise ValueError("gone")
        link.barrier()

    found = on_ranks(3, meet)
    assert [type(each) for each in found] == [Released, ValueError, Released]


def test_a_copy_that_is_not_done_is_waited_for(
    driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host holds counts only once the stream has brought it."""
    del driver
    looks: list[int] = []

    def mark(_: torch.device) -> Callable[[], bool]:
        asked = 0

        def done() -> bool:
            nonlocal asked
            asked += 1
            looks.append(asked)
            return asked > 2

        return done

    monkeypatch.setattr(devices, "mark", mark)
    on_ranks(1, lambda link: link.barrier())
    assert looks == [1, 2, 3]


def test_streams_are_held_without_the_host(
    driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank writes its count everywhere, then holds until its own flags have everybody's."""
    del driver
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def rounds(link: Link) -> list[int]:
        parts = link.export("pages", (1,))
        sums = []
        for number in range(1, 20):
            parts[link.rank].fill_(number)
            link.barrier.on_stream()  # type: ignore[attr-defined]  # it is cuda.Barrier
            sums.append(min(int(part) for part in parts))
            link.barrier.on_stream()  # type: ignore[attr-defined]
        return sums

    assert on_ranks(3, rounds) == [list(range(1, 20))] * 3


@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_composes_the_reference_s_pages(driver: fake_driver.Driver, way: str) -> None:
    """Two steps of mixed requests on four ranks, one after the other in the same memory."""
    del driver
    cases = steps.sequence("mixed", cp=4, layers=2, scale=4)[:2]

    def compose(link: Link) -> list[dict[str, Tensor]]:
        return [
            step.compose(link, way=way, turn=2 * turn, **case.inputs, **case.params)
            for turn, case in enumerate(cases)
        ]

    found = on_ranks(4, compose)
    assert [type(each) for each in found] == [list] * 4, found
    for at, case in enumerate(cases):
        call: dict[str, Any] = {**case.inputs, **case.params}
        given = {kind: [call.pop(f"{kind}_{part}") for part in PARTS] for kind in KINDS}
        for kind, (pools, rows) in given.items():
            want = compose_pages(pools=pools, rows=rows, kind=kind, **call)
            for outputs in found:
                got = outputs[at][f"{kind}_pages"]
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
                assert not len(outputs[at]["strays"])


@pytest.mark.parametrize(
    ("rank", "asked", "count", "device"),
    [(0, None, 2, 0), (3, None, 2, 1), (5, "cuda", 3, 2), (5, "cuda:1", 2, 1), (5, "cuda:0", 1, 0)],
)
def test_ranks_take_devices_in_turn(rank: int, asked: str | None, count: int, device: int) -> None:
    """All of them, or the one that was named."""
    assert devices.of(rank, asked, count, transport="cuda") == torch.device("cuda", device)


@pytest.mark.parametrize(
    ("asked", "count", "message"),
    [
        (None, 0, "transport cuda needs a CUDA device; torch finds none"),
        ("cpu", 1, "transport cuda is memory of CUDA devices; device is cpu"),
        ("cuda:2", 2, "device is cuda:2; torch finds 2, from cuda:0 on"),
    ],
)
def test_a_device_that_is_not_there_is_refused(asked: str | None, count: int, message: str) -> None:
    """One sentence."""
    with pytest.raises(UsageError) as refused:
        devices.of(0, asked, count, transport="cuda")
    assert str(refused.value) == message


def test_a_rank_enters_its_device_and_tells_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on one GPU are seen by what identifies it."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    )
    found = fake_world.run(3, lambda world: devices.enter(world, transport="cuda"))
    names = ["GPU-0", "GPU-1", "GPU-0"]
    assert found == [(torch.device("cuda", rank % 2), names) for rank in range(3)]
    assert sorted(device.index for device in entered) == [0, 0, 1]
    assert not devices.apart(names)
    assert devices.apart(names[:2])
