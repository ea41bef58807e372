"""What tests let ranks do: each is a function of a link, found by its name."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from equivalence import receipt
from equivalence.errors import UsageError
from equivalence.world import segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from equivalence.world.link import Link

NUMBER = 7


def numbers(link: Link, *, x: Tensor, add: int = 0) -> dict[str, Tensor]:
    """Who ran: its number, its process and what it was given."""
    x += link.rank
    return {
        "rank": torch.tensor(link.rank),
        "pid": torch.tensor(os.getpid()),
        "x": x + add,
        "threads": torch.tensor(torch.get_num_threads()),
    }


def odd_bools(link: Link, *, x: Tensor) -> dict[str, Tensor]:
    """The bytes of bools that came in, and bools of the byte 1 + rank."""
    made = torch.tensor([1 + link.rank], dtype=torch.uint8)
    return {"bytes": x.view(torch.uint8).clone(), "made": made.view(torch.bool)}


def pids(link: Link) -> Tensor:
    """The process of a rank."""
    return torch.tensor([os.getpid() + 0 * link.rank])


def rounds(link: Link, *, count: int, delay: float) -> dict[str, Tensor]:
    """Rounds of write, barrier, read, in halves by turn; one rank after another comes late."""
    size = 4096
    memory = link.export("rounds", (2, size))
    wrong = torch.zeros(link.ranks, dtype=torch.int64)
    for turn in range(count):
        if turn % link.ranks == link.rank:
            time.sleep(delay)
        memory[link.rank][turn % 2].fill_((turn * 7 + link.rank) % 251)
        link.barrier()
        for rank in range(link.ranks):
            wrong[rank] += int((memory[rank][turn % 2] != (turn * 7 + rank) % 251).sum())
    return {"wrong": wrong}


def collectives(link: Link) -> dict[str, Tensor]:
    """Sums of bytes, of floats as bytes and of int32, strided too, and the least number."""
    u8 = torch.full((5,), 100, dtype=torch.uint8)
    link.all_reduce(u8)
    e4m3 = torch.full((2,), link.rank + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    link.all_reduce(e4m3)
    strided = torch.zeros(3, 4, dtype=torch.int32)
    link.all_reduce(strided[:, link.rank // link.ranks].fill_(link.rank + 1))
    return {
        "u8": u8,
        "e4m3": e4m3.view(torch.uint8),
        "strided": strided,
        "least": torch.tensor(link.agree(10 - link.rank)),
    }


def unequal(link: Link, *, rank: int, size: int) -> None:
    """A sum of 8 bytes, of which one rank brings another number or none."""
    if link.rank == rank and not size:
        link.agree(1)
    else:
        link.all_reduce(torch.zeros(size if link.rank == rank else 8, dtype=torch.uint8))


def goes_on(link: Link, *, rounds: int) -> Tensor:
    """Sums of which every other one is refused, while one rank after another is late."""
    refused = 0
    for turn in range(rounds):
        part = torch.ones(1 + turn % 2 * (link.rank == 1), dtype=torch.int32)
        time.sleep(0.002 * (turn % link.ranks == link.rank))
        try:
            link.all_reduce(part)
        except ValueError:
            refused += 1
    return torch.tensor([refused, int(part[0])])


def stumbles(link: Link, *, rank: int, how: str) -> Tensor:
    """Two barriers, between which one rank does something else."""
    link.barrier()
    if link.rank == rank:
        stumble(link, how)
    elif how == "killed inside":
        time.sleep(0.6)
    if not (link.rank == rank and how == "skips"):
        link.barrier()
    if link.rank == rank and how == "dies after":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.6 if how == "dies after" else 0)
    return torch.tensor(link.rank)


def stumble(link: Link, how: str) -> None:
    """Whatever may happen to a rank."""
    here = os.getpid()
    later = threading.Timer(0.2, os.kill, (here, signal.SIGKILL))
    ways: dict[str, Callable[[], object]] = {
        "killed": lambda: os.kill(here, signal.SIGKILL),
        "killed inside": later.start,
        "segfault": lambda: os.kill(here, signal.SIGSEGV),
        "exits": lambda: os._exit(3),
        "sleeps": lambda: time.sleep(60),
        "naps": lambda: time.sleep(4),
        "stopped": lambda: os.kill(here, signal.SIGSTOP),
        "elsewhere": lambda: link.agree(0),
        "exports": lambda: link.export("alone", (8,)),
        "once more": link.barrier,
        "kills host": lambda: os.kill(os.getppid(), signal.SIGKILL),
    }
    raised = {
        "raises": ValueError("no such page\nand more"),
        "leaves": SystemExit(0),
        "memory": MemoryError("no room"),
    }
    if how in raised:
        raise raised[how]
    ways.get(how, int)()
    if how == "kills host":
        time.sleep(5)


def refuses(link: Link) -> None:
    """Every rank refuses for itself."""
    raise UsageError(f"rank {link.rank} has no room")


def wraps(link: Link) -> None:
    """Rank 0 raises; the others raise something else when they are released."""
    if not link.rank:
        raise ValueError("first")
    try:
        link.barrier()
    except RuntimeError as error:
        raise KeyError("later") from error


def exports(link: Link, *, shape: list[int], write: int = -1) -> Tensor:
    """What all ranks' memory of a name holds, before something is written to one's own."""
    memory = link.export("kept", tuple(shape))
    link.barrier()
    held = torch.stack([part.long().sum() for part in memory])
    link.barrier()
    if write >= 0:
        memory[link.rank].fill_(write + link.rank)
    return held


def exports_otherwise(link: Link) -> None:
    """Rank 1 has another shape."""
    link.export("pool", (4, 2 + link.rank % 2))


def exports_apart(link: Link) -> None:
    """Rank 1 exports another name."""
    link.export(f"pool {link.rank % 2}", (4,))


def exports_too_much(link: Link) -> None:
    """Memory that nobody has."""
    link.export("all", (1 << 50,))


def dies_with_memory(link: Link, *, rank: int) -> None:
    """A rank is killed before the others have opened its memory."""
    made = segment.create

    def create(size: int) -> int:
        found = made(size)
        if link.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    segment.create = create
    link.export("own", (8,))


def raises_while_others_wait(link: Link) -> None:
    """Rank 0 raises while the others exchange names."""
    if not link.rank:
        time.sleep(0.1)
        raise ValueError("no")
    link.export("pool", (4,))


def nothing(link: Link) -> None:
    """Return None."""
    link.barrier()


def returns(link: Link, *, what: str) -> object:
    """Something that is no output."""
    sparse = torch.zeros(2).to_sparse()
    return {"list": [link.rank], "names": {"a": 1}, "sparse": {"a": sparse}}[what]


def leaves_receipt(link: Link) -> Tensor:
    """Say that a kernel ran."""
    receipt.leave("a.kernel", rows=link.rank, version="1", flag=True)
    return torch.zeros(1)


def device_of(link: Link) -> Tensor:
    """Whether a link says what it is."""
    good = (link.device.type, link.transport, link.peer_memory) == ("cpu", "shm", True)
    return torch.tensor(good)


def mode(link: Link) -> Tensor:
    """The mode of exported memory, and how many names it has."""
    seen = []
    made = segment.create

    def create(size: int) -> int:
        handle = made(size)
        found = os.fstat(handle)
        seen.append([found.st_mode & 0o7777, found.st_nlink])
        return handle

    segment.create = create
    link.export("mode", (8,))
    segment.create = made
    return torch.tensor(seen)


class Held:
    """Functions that are found within a class."""

    @staticmethod
    def inside(link: Link) -> Tensor:
        """Its rank."""
        return torch.tensor(link.rank)


def own_group(link: Link, *, store: str) -> Tensor:
    """Sums over a default group made here and over the link's."""
    own = FileStore(store, link.ranks)
    dist.init_process_group("gloo", store=own, rank=link.rank, world_size=link.ranks)
    sums = torch.tensor([1, 2, 1])
    dist.all_reduce(sums[:1])
    link.all_reduce(sums[1:])
    return sums


class SpeechlessError(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        """Fail."""
        raise ValueError


def speechless(link: Link) -> None:
    """Raise what is hard to print."""
    if link.rank:
        raise ValueError("\x1b[31mred\nmore")
    raise SpeechlessError
