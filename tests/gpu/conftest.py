"""What a test on a GPU needs; where it is missing, the test skips and says what."""

import os
from pathlib import Path

import pytest
import torch

from equivalence.engines import sglang


@pytest.fixture(scope="session")
def hopper() -> None:
    """Skip where there is no Hopper GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip(f"compute capability {major}.{minor}; the recorded kernels are 9.0")


@pytest.fixture(scope="session")
def deep_gemm(hopper: None) -> None:
    """Skip without a DeepGEMM of a generation that has `fp8_mqa_logits`."""
    del hopper
    module = pytest.importorskip("deep_gemm", reason="sgl-deep-gemm 0.1.4 is not installed")
    if not callable(getattr(module, "fp8_mqa_logits", None)):
        pytest.skip("this deep_gemm has no fp8_mqa_logits; sgl-deep-gemm 0.1.4 has")


@pytest.fixture(scope="session")
def fast_topk(hopper: None) -> None:
    """Skip without `sgl_kernel::fast_topk`."""
    del hopper
    if not Path(os.environ.get(sglang.LIBRARY, "")).is_file():
        pytest.importorskip(
            "sgl_kernel", reason=f"{sglang.LIBRARY} names no sgl_kernel common_ops library"
        )
