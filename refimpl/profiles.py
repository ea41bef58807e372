"""How each scoring kernel does its arithmetic, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from refimpl.bits import E4M3


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one kernel does its arithmetic.

    Attributes:
        name: key in `PROFILES`; what a case calls its `arithmetic`.
        instructions: operand dtype to a name in `tensorcore.INSTRUCTIONS`; None accumulates in
            fp64.
        reduction: of the heads. `quad`: four lanes of fused sums, `pairs`: (0 + 1) + (2 + 3),
            `fp64`: head by head.
        rounded_product: of `quad`, the place in a lane's sum whose product is rounded by itself.
        scale: where `quad` multiplies with k_scale, on each lane or once on the sum.
        device: where the bits were seen; empty where none are claimed.
        status: `measured` on hardware, or `exact`.
        source: the kernel and its version.
    """

    name: str
    instructions: Mapping[torch.dtype, str] | None
    reduction: Literal["quad", "pairs", "fp64"]
    rounded_product: int = 1
    scale: Literal["lane", "sum"] = "lane"
    device: str
    status: Literal["measured", "exact"]
    source: str


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        row.name: row
        for row in (
            Profile(
                name="deep_gemm.sm90",
                instructions=MappingProxyType({E4M3: "sm90.wgmma.e4m3"}),
                reduction="quad",
                device="NVIDIA H200",
                status="measured",
                source="DeepGEMM sm90_fp8_mqa_logits and sm90_fp8_paged_mqa_logits, "
                "sgl-deep-gemm 0.1.4, CUDA 13.0",
            ),
            Profile(
                name="vllm_qsa_prefill.sm90",
                instructions=MappingProxyType(
                    {E4M3: "sm90.wgmma.e4m3", torch.bfloat16: "sm90.wgmma.bf16"}
                ),
                reduction="pairs",
                device="NVIDIA H200",
                status="measured",
                source="vLLM 0.33.0 QSA prefill logits, Triton 3.6",
            ),
            Profile(
                name="exact",
                instructions=None,
                reduction="fp64",
                device="",
                status="exact",
                source="the formula in fp64",
            ),
        )
    }
)
