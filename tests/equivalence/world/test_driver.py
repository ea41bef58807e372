"""Handles of device memory, over a driver that has this process's memory."""

import base64

import fake_driver
import pytest
import torch

from equivalence.errors import UsageError
from equivalence.world import driver

CPU = torch.device("cpu")


def test_what_is_written_on_one_side_is_read_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory begins as zeros, whole grains of it, and a handle opens that memory."""
    fake = fake_driver.use(monkeypatch)
    mine = driver.allocate(100, CPU)
    theirs = driver.opened(driver.handle(mine, CPU), CPU)
    written, read = driver.at(mine, (10, 10), CPU), driver.at(theirs, (100,), CPU)
    assert (written.dtype, written.is_contiguous()) == (torch.uint8, True)
    assert not bool(read.any())
    written[3, 4] = 7
    assert read.nonzero().tolist() == [[34]]
    assert fake.sizes == [driver.GRAIN]
    driver.allocate(driver.GRAIN + 1, CPU)
    driver.allocate(0, CPU)
    assert fake.sizes[1:] == [2 * driver.GRAIN, driver.GRAIN]


def test_numbers_of_eight_bytes_fit_into_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory lies as an allocator's does, so that it can be read as other dtypes."""
    fake_driver.use(monkeypatch)
    memory = driver.at(driver.allocate(64, CPU), (64,), CPU)
    memory.view(torch.int64)[1] = -1
    assert memory.tolist() == [0] * 8 + [255] * 8 + [0] * 48


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("no handle!", "'no handle!' is no base64 of a memory handle"),
        (base64.b64encode(b"short").decode(), "a memory handle has 64 bytes, not 5"),
    ],
)
def test_what_is_no_handle_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, told: str, message: str
) -> None:
    """The driver does not see it."""
    fake_driver.use(monkeypatch)
    with pytest.raises(UsageError) as refused:
        driver.opened(told, CPU)
    assert str(refused.value) == message


def test_the_driver_names_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function and the error stand in the message."""
    fake_driver.use(monkeypatch)
    nobody = base64.b64encode(bytes(64)).decode()
    with pytest.raises(RuntimeError) as failed:
        driver.opened(nobody, CPU)
    told = "cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_CONTEXT (201)"
    assert str(failed.value) == told
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle failed"):
        driver.handle(12345, CPU)


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the library's name."""
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-none.so")
    driver.library.cache_clear()
    with pytest.raises(UsageError) as refused:
        driver.library()
    assert str(refused.value) == "libcuda-none.so cannot be loaded: no CUDA driver is here"
