"""Where kernels are known to dispatch to another algorithm, as data."""

from dataclasses import dataclass

CHUNKS = (2, 7, 128, 256, 512, 1024, 2048, 4096)
"""Chunk sizes beside those of EDGES, in rows; 128 to 4096 are what SGLang compared with one call of
16,384."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Where a kernel is known to dispatch to another algorithm.

    Attributes:
        kernel: whose, or "any".
        of: what is counted: "rows" of a call, "columns" a row sees, or "k": columns beyond k.
        at: the counts at both sides of it.
        source: where that is known from.
    """

    kernel: str
    of: str
    at: tuple[int, ...]
    source: str


EDGES = (
    Edge(kernel="any", of="rows", at=(1,), source="a decode step of one request"),
    Edge(
        kernel="vllm.persistent_topk",
        of="rows",
        at=(32, 33),
        source="vllm-project/vllm#51782: more than 32 rows may take FilteredTopK",
    ),
    Edge(
        kernel="vllm.cooperative_topk",
        of="rows",
        at=(63, 64, 65),
        source="vLLM cooperative_topk: SM90 and later, at most 64 rows",
    ),
    Edge(
        kernel="vllm.top_k_per_row_prefill",
        of="rows",
        at=(12288, 12289),
        source="vLLM sampler.cu at 030ea52e: row 12288 of a launch on is finished by a radix sort",
    ),
    Edge(
        kernel="vllm.persistent_topk",
        of="columns",
        at=(8192,),
        source="vLLM persistent_topk.cuh: a histogram of 2048 up to 8192 columns, 256 above",
    ),
    Edge(
        kernel="vllm.persistent_topk",
        of="columns",
        at=(16384, 16385),
        source="vllm-project/vllm#51782: a stash of 16384 candidates",
    ),
    Edge(
        kernel="any",
        of="k",
        at=(-1, 0, 1),
        source="a row of at most k columns selects nothing",
    ),
)


def counts_of(of: str) -> list[int]:
    """The counts of all edges of one kind."""
    return [count for edge in EDGES if edge.of == of for count in edge.at]
