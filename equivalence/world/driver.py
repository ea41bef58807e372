"""Device memory that other processes open: a few calls of the CUDA driver, over ctypes."""

import base64
import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import UsageError

LIBRARY = "libcuda.so.1"
GRAIN = 2 << 20
"""Bytes: an allocation of whole grains shares no block with another, whose bytes stay private."""
_PEER_ACCESS = 1
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@cache
def library() -> Any:  # noqa: ANN401 - a shared library
    """The CUDA driver.

    Raises:
        UsageError: this machine has none.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UsageError(f"{LIBRARY} cannot be loaded: no CUDA driver is here") from error


def room(count: int) -> int:
    """Bytes that an allocation of so many takes."""
    return max(1, math.ceil(count / GRAIN)) * GRAIN


# torch's own sharing of CUDA tensors counts consumers in files of /dev/shm, which a killed process
# leaves behind, and orders them by interprocess events. These handles do neither: the memory is
# there until the process that allocated it ends, however it ends.
def allocate(count: int, device: torch.device) -> int:
    """The address of zeros in device memory of its own.

    Args:
        count: bytes, at least.
        device: where.
    """
    _enter(device)
    address = ctypes.c_uint64()
    size = room(count)
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    at(address.value, (size,), device).zero_()
    torch.cuda.synchronize(device)
    return address.value


def handle(address: int, device: torch.device) -> str:
    """What another process needs to open an allocation, as base64."""
    _enter(device)
    found = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
    return base64.b64encode(bytes(found.reserved)).decode()


def opened(told: str, device: torch.device) -> int:
    """The address at which this process reads and writes another's allocation.

    It is mapped for `device`, this process's own, also where the memory is another device's: then
    kernels reach it through peer access, and a tensor over it mixes with those of `device`.

    Args:
        told: by `handle` in the other process.
        device: this process's own.

    Raises:
        UsageError: that is no handle.
        RuntimeError: the driver refuses to open it.
    """
    try:
        raw = base64.b64decode(told, validate=True)
    except ValueError as error:
        raise UsageError(f"{told[:16]!r} is no base64 of a memory handle") from error
    if len(raw) != _HANDLE_BYTES:
        raise UsageError(f"a memory handle has {_HANDLE_BYTES} bytes, not {len(raw)}")
    _enter(device)
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(raw)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_PEER_ACCESS))
    return address.value


def at(address: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """u8 memory at an address as a tensor, which does not own it."""
    make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001 - as CUDA graphs do
    storage: Any = make(address, device, math.prod(shape))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(shape)


def signal(address: int, count: int) -> None:
    """Write a number after all that the current stream was given, and after what it wrote."""
    _call("cuStreamWriteValue64_v2", *_cell(address, count))


def hold(address: int, count: int) -> None:
    """Let the current stream go on once the number at an address is at least this one."""
    _call("cuStreamWaitValue64_v2", *_cell(address, count))


def _cell(address: int, count: int) -> tuple[object, ...]:
    """The arguments of both; 0 is "at least", and a fence before the write."""
    stream = torch.cuda.current_stream().cuda_stream
    flags = ctypes.c_uint(0)
    return ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(count), flags


def _enter(device: torch.device) -> None:
    """Make the context of torch on this device that of the calling thread."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def _call(name: str, *arguments: object) -> None:
    """Call the driver.

    Raises:
        RuntimeError: with the function and the driver's own word for what went wrong.
    """
    status = getattr(library(), name)(*arguments)
    if status:
        word = ctypes.c_char_p()
        library().cuGetErrorName(ctypes.c_int(status), ctypes.byref(word))
        told = (word.value or b"unknown").decode()
        raise RuntimeError(f"{name} failed with {told} ({status})")
