"""The CUDA driver's calls that `world.driver` makes, over memory of this process."""

import ctypes
import time
from typing import Any

import pytest
import torch

from equivalence.world import driver

INVALID = 201


class Driver:
    """Memory by address; a handle is its address, and opens where it was allocated."""

    def __init__(self) -> None:
        """Start with no memory."""
        self.memory: dict[int, Any] = {}
        self.sizes: list[int] = []
        self.refused = False

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: ANN401, N802 - as in C
        """Allocate garbage."""
        made = (ctypes.c_ubyte * (size.value + 256))()
        ctypes.memset(made, 0x5A, len(made))
        start = -(-ctypes.addressof(made) // 256) * 256
        self.memory[start] = made
        self.sizes.append(size.value)
        address._obj.value = start
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:  # noqa: ANN401, N802 - as in C
        """Tell the address, after a zero byte, as a real handle may."""
        if address.value not in self.memory:
            return INVALID
        handle._obj.reserved[1:9] = address.value.to_bytes(8, "little")
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:  # noqa: ANN401, N802
        """Give the address that a handle tells."""
        found = int.from_bytes(bytes(handle.reserved)[1:9], "little")
        if self.refused or found not in self.memory or flags.value != 1:
            return INVALID
        address._obj.value = found
        return 0

    def cuStreamWriteValue64_v2(  # noqa: N802 - as in C
        self,
        _: Any,  # noqa: ANN401 - a stream
        address: Any,  # noqa: ANN401 - a number of ctypes
        value: Any,  # noqa: ANN401 - likewise
        flags: Any,  # noqa: ANN401 - likewise
    ) -> int:
        """Write at once: there is no stream."""
        ctypes.c_uint64.from_address(address.value).value = value.value
        return int(flags.value)

    def cuStreamWaitValue64_v2(  # noqa: N802 - as in C
        self,
        _: Any,  # noqa: ANN401 - a stream
        address: Any,  # noqa: ANN401 - a number of ctypes
        value: Any,  # noqa: ANN401 - likewise
        flags: Any,  # noqa: ANN401 - likewise
    ) -> int:
        """Wait at once."""
        while ctypes.c_uint64.from_address(address.value).value < value.value:
            time.sleep(1e-4)
        return int(flags.value)

    def cuGetErrorName(self, status: Any, word: Any) -> int:  # noqa: ANN401, N802 - as in C
        """Name the one error there is."""
        word._obj.value = b"CUDA_ERROR_INVALID_CONTEXT" if status.value == INVALID else None
        return 0


def use(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put a driver of this process's memory in place of the machine's."""
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return fake
