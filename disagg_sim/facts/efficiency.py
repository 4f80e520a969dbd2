"""Fitted efficiencies: the share of the vendor's peaks that kernels reach, with the data behind each fit.

One file per system in ``hw_specs/efficiency/``, apart from the vendor's facts. Forms (physics page,
section 7): ``t = t0 + ((F/(e_c*Pi))^q + (bytes/(e_m*BW))^q)^(1/q)``; prefill attention
``t0 + F/(e*Pi_bf16)*(1 + S_half/S)``; collectives ``latency + V/(eta*BW)``.
A ``None`` efficiency means that the fit could not identify that term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Sizes of a call, as kernel tables (``calibration.kernels.forms``) and the ranges of fits name them.
GEMM_SIZES = ("m", "n", "k")
PROMPT_LENGTH, CACHE_LENGTH = "seq_len", "kv_len"
HEADS, LATENT_HEADS = ("q_heads", "kv_heads", "head_dim"), ("heads",)
COLLECTIVE_SIZES = ("num_gpus", "message_bytes")
#: ``width``, the columns of an expert on a rank, is made of the columns ``inter`` and ``tp`` of a table.
EXPERT_SIZES = ("num_tokens", "hidden", "width", "ep", "num_experts")
EXCHANGE_SIZES = ("ep_size", "node_num", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Where a fitted row comes from and how well it holds."""

    engine: str  # one of LIBRARIES, or ASSUMED
    version: str
    points: int  # rows fitted [1]
    median_error: float  # median absolute relative error on them [1]
    p90_error: float  # 90 % quantile of it [1]
    inherited_from: str = ""  # system that was measured, when it is another one
    parameters: int = 0  # numbers that the fit set freely [1]
    held_out_points: int = 0  # rows of shapes that the fit did not see [1]
    held_out_median_error: float = 0.0  # on them [1]
    held_out_p90_error: float = 0.0  # on them [1]
    sigma_log: float = 0.0  # robust standard deviation of log(measured/fitted) on them; 0 = not known [1]
    valid: tuple[tuple[str, float, float], ...] = ()  # (size, least, largest) as fitted; nothing = not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit(Fit):
    """Dense matrix multiply in one weight format; the form is ``physics.gemm``, the plain roofline if not ``tiled``."""

    format: str
    e_compute: float
    e_memory: float
    t0: float  # [s]
    blend_q: float
    tiled: bool = False  # whether tiles, waves and the fields below are part of the form
    k_step: float = 0.0  # time of one element of K in the loop of a tile [s]
    k_split: float = 0.0  # time to add up one more part of a split K [s]
    reuse: float | None = None  # elements for which one read of an operand beyond L2 serves; None = read once [1]
    e_quantise: float | None = None  # share of the HBM bandwidth at which A is quantised; None = not in the rows [1]
    least_row: float = 0.0  # a row of A is quantised no faster than one of so many elements [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionFit(Fit):
    """Causal attention of many new tokens; ``kind`` is "gqa" or "mla" (naive form).

    The form is ``physics.attention``: tiled where ``e_io`` is given, else the smooth one of ``s_half``.
    """

    kind: str
    compute: str  # "bf16" or "fp8" arithmetic
    cache: str  # "bf16" or "fp8"
    e_compute: float  # share of the BF16 peak [1]
    s_half: float = 0.0  # smooth form: tokens at which half of the plateau is reached [token]
    t0: float  # [s]
    e_io: float | None = None  # share of the HBM bandwidth at which queries, outputs, new keys and values move [1]
    tail: float = 0.0  # share of the longest thread block that stays visible [1]
    kernel: str = ""  # where a library has several


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionFit(Fit):
    """One new token per sequence against the cache; ``kind`` is "gqa" or "mla" (absorbed).

    The form is ``physics.attention``: with thread blocks where ``block_time`` is given, else the plain roofline.
    """

    kind: str
    cache: str
    e_memory: float
    e_compute: float | None = None  # MLA: share of the BF16 peak, above 1 where the arithmetic is fp8 [1]
    t0: float  # [s]
    block_time: float | None = None  # of a thread block on its multiprocessor [s]
    serial_time: float = 0.0  # of 1024 keys of one sequence [s]
    serial_power: float = 1.0  # growth of it with the key length; 1 = the keys are not split over blocks [1]
    ramp: float = 0.0  # cost of streaming a large cache, beside its bytes [s]
    kernel: str = ""  # where a library has several


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFit(Fit):
    """Grouped GEMM of the routed experts; the form is ``physics.experts``, with the defaults the plain roofline."""

    kernel: str
    format: str
    regime: str  # "single", "tp", "ep2_8", "ep16_256", or ANY_REGIME
    picks: str  # "T*k/ep" or "T*k": which count of picks a rank multiplies
    e_compute: float | None
    e_memory: float
    t0: float  # [s]
    blend_q: float
    least_rows: float = 0.0  # rows that an expert with fewer is padded to [1]
    per_expert: float = 0.0  # set-up of one expert of the rank [s]
    e_handling: float | None = None  # share of the HBM bandwidth at which rows are gathered and summed; None = free [1]
    stray: float = 0.0  # share of other ranks' picks that the rank measured multiplied as well; not so in serving [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit(Fit):
    """A collective of one library inside one domain.

    Without ``algorithm``: on ``gpus`` ranks, ``latency + V/(e_bandwidth*link)``, V of the ring. With one, for any
    number of ranks n: ``latency + hop*(n-1) + w + 2*sqrt(ramp*w)``, ``w = V/(e_bandwidth*link)`` with the volume V of
    that algorithm; the fastest algorithm counts. ``EAGER`` rows tell what a call outside a CUDA graph takes:
    ``max(latency, t + 2*S/(e_bandwidth*HBM))``, t being the time inside one.
    """

    op: str  # "all_reduce", "all_gather", "reduce_scatter", "alltoall"
    gpus: int  # 0 = any number
    latency: float  # [s]
    e_bandwidth: float
    algorithm: str = ""  # "ring", "ring_ll" (low-latency protocol), "one_shot", "two_shot", "in_switch", EAGER, or none
    hop: float = 0.0  # latency added by each rank beyond the first [s]
    ramp: float = 0.0  # hand-over of a pipelined message [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllFit(Fit):
    """MoE dispatch, combine or prepare of one backend on ``ranks`` ranks over ``nodes`` nodes.

    ``latency + step*log2(ranks; nodes over a NIC) + V/(e_bandwidth*link)``; "prepare":
    ``latency + step*log2(ranks) + T*seconds_per_token``. Across nodes the sending kernel may bind instead of the NIC:
    ``T*d*b/token_bandwidth``.
    """

    backend: str
    phase: str  # "dispatch", "combine", "combine_low_precision", "prepare"
    format: str  # what is sent: "bf16", "fp8", "nvfp4", "unlabelled", ...; "default" = any, by its bytes
    ranks: int  # 0 = any number
    nodes: int  # 0 = any number
    volume: str  # formula of the volume V of the fit
    bytes_per_element: float | None  # b in that formula; None = that of the format sent [B]
    link: str  # "nvlink" or "nic"
    latency: float  # [s]
    e_bandwidth: float | None
    seconds_per_token: float | None  # "prepare" only [s]
    step: float = 0.0  # latency added per doubling of the group [s]
    token_bandwidth: float | None = None  # across nodes, at the number of multiprocessors that engines give it [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseFit(Fit):
    """A kernel that reads and writes activations: ``t0 + bytes/(e_memory*HBM)``."""

    op: str  # "scale_matrix" (16 bit to 8 bit), "compute_scale" (read alone)
    e_memory: float
    t0: float  # [s]


#: Regime of a fit that holds for any expert and tensor parallelism.
ANY_REGIME = "any"
#: Operator group of an ``EfficiencySpec`` -> class of its rows.
SECTIONS: dict[str, type[Fit]] = {
    "gemm": GemmFit,
    "prefill_attention": PrefillAttentionFit,
    "decode_attention": DecodeAttentionFit,
    "moe": MoeFit,
    "collectives": CollectiveFit,
    "alltoall": AllToAllFit,
    "elementwise": ElementwiseFit,
}
#: Software whose kernels were measured.
LIBRARIES = ("trtllm", "vllm", "sglang", "nccl", "torch")
#: Library that engines hand large messages to.
LARGE_MESSAGES = "nccl"
#: "Algorithm" of a call outside a CUDA graph.
EAGER = "eager"
#: "Library" of a row that nobody measured; it joins the rows of every library.
ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A table of measurements that fits were made from."""

    name: str
    sha256: str
    rows: int  # of the system [1]
    fitted: int  # [1]
    held_out: int  # of shapes that no fit saw [1]
    dropped: Mapping[str, int]  # reason -> rows left out of both [1]


@dataclass(frozen=True, kw_only=True)
class EfficiencySpec:
    """All fitted rows of one system."""

    system: str  # the system that uses them
    measured_on: str  # the system that was measured
    data: str  # data set
    date: str  # of the data
    engine_order: tuple[str, ...]  # whose fit is taken first, per operator
    gemm: tuple[GemmFit, ...]
    prefill_attention: tuple[PrefillAttentionFit, ...]
    decode_attention: tuple[DecodeAttentionFit, ...]
    moe: tuple[MoeFit, ...]
    collectives: tuple[CollectiveFit, ...]
    alltoall: tuple[AllToAllFit, ...]
    elementwise: tuple[ElementwiseFit, ...] = ()
    files: tuple[DataFile, ...] = ()  # tables that the fits were made from, where the file says so

    @property
    def inherited(self) -> bool:
        """Whether these fits were made on another system."""
        return self.system != self.measured_on
