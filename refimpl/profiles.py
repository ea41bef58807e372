"""How each scoring kernel does its arithmetic, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from refimpl.bits import E4M3
from refimpl.mx import E2M1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one kernel does its arithmetic.

    Attributes:
        name: key in `PROFILES`; what a case calls its `arithmetic`.
        instructions: operand dtype to a name in `tensorcore.INSTRUCTIONS`; None accumulates in
            fp64.
        scaled: the same for operands with MX scales, in `scaled.BLOCK_SCALED`; None where the
            kernel takes none.
        reduction: of the heads. `quad`: four lanes of fused sums, `packed`: four lanes of packed
            ones, `pairs`: (0 + 1) + (2 + 3), `fp64`: head by head.
        rounded_product: of `quad`, the place in a lane's sum whose product is rounded by itself.
        scale: where `quad` multiplies with k_scale, on each lane or once on the sum.
        sums: what a head's term and the sums over heads are rounded to.
        logits: what a logit is rounded to.
        order: in which a bound takes the heads to be summed: as `reduction` says, or in any.
        device: where the bits were seen; empty where none are claimed.
        status: `measured` on hardware, `exact`, or `published`: then it serves for bounds alone.
        source: the kernel and its version.
    """

    name: str
    instructions: Mapping[torch.dtype, str] | None
    scaled: Mapping[torch.dtype, str] | None = None
    reduction: Literal["quad", "packed", "pairs", "fp64"]
    rounded_product: int = 1
    scale: Literal["lane", "sum"] = "lane"
    sums: torch.dtype = torch.float32
    logits: torch.dtype = torch.float32
    order: Literal["documented", "any"] = "documented"
    device: str
    status: Literal["measured", "exact", "published"]
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
                order="any",
                device="",
                status="exact",
                source="the formula in fp64",
            ),
        )
    }
)

_SM100 = MappingProxyType({E4M3: "sm100.f8f6f4.e4m3"})
_SM100_SCALED = MappingProxyType({E4M3: "sm100.mxf8f6f4.e4m3", E2M1: "sm100.mxf4nvf4.e2m1"})

PUBLISHED: Mapping[str, Profile] = MappingProxyType(
    {
        row.name: row
        for row in (
            Profile(
                name="deep_gemm.sm100",
                instructions=_SM100,
                scaled=_SM100_SCALED,
                reduction="packed",
                device="",
                status="published",
                source="DeepGEMM 54e2261 sm100_mqa_logits.cuh:453-488",
            ),
            Profile(
                name="deep_gemm.sm100.bf16_logits",
                instructions=_SM100,
                scaled=_SM100_SCALED,
                reduction="packed",
                logits=torch.bfloat16,
                device="",
                status="published",
                source="the same with logits_dtype bf16: one rounding at the end",
            ),
            Profile(
                name="deep_gemm.sm100.bf16_sums",
                instructions=_SM100,
                scaled=_SM100_SCALED,
                reduction="packed",
                sums=torch.bfloat16,
                logits=torch.bfloat16,
                device="",
                status="published",
                source="sgl-deep-gemm 0.2.5 sm100_mqa_logits.cuh:472-515 (bf16 weights)",
            ),
            Profile(
                name="any_order.bf16",
                instructions=None,
                reduction="fp64",
                sums=torch.bfloat16,
                logits=torch.bfloat16,
                order="any",
                device="",
                status="published",
                source="the formula in fp64; a kernel may round each head and sum to bf16",
            ),
        )
    }
)
"""Kernels whose bits are not claimed: `refimpl.bound` says how far off they may be."""


def find(name: str) -> Profile:
    """The profile of this name, whatever its status.

    Raises:
        ValueError: there is none.
    """
    known = {**PROFILES, **PUBLISHED}
    if name not in known:
        raise ValueError(f"arithmetic is {name!r}: known are {', '.join(known)}")
    return known[name]
