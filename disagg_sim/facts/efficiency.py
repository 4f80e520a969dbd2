"""Fitted efficiencies: the share of the vendor's peaks that kernels reach, with the data behind each fit.

One file per system in ``hw_specs/efficiency/``, apart from the vendor's facts. Forms (physics page,
section 7): ``t = t0 + ((F/(e_c*Pi))^q + (bytes/(e_m*BW))^q)^(1/q)``; prefill attention
``t0 + F/(e*Pi_bf16)*(1 + S_half/S)``; collectives ``latency + V/(eta*BW)``.
A ``None`` efficiency means that the fit could not identify that term.

Past 400 lines: one file in ``hw_specs/`` holds all kinds of fits, and this one says what each of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.facts.layers import ATTENTION_KINDS
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.schema import NOT_IN_FILE, OneOf, Quantity, Range, Span, Written, keys_of, validate
from disagg_sim.units import GB, MB, MS

#: Sizes of a call, as kernel tables (``lab.calibration.kernels.tables``) and the ranges of fits name them.
GEMM_SIZES = ("m", "n", "k")
PROMPT_LENGTH, CACHE_LENGTH = "seq_len", "kv_len"
HEADS, LATENT_HEADS = ("q_heads", "kv_heads", "head_dim"), ("heads",)
COLLECTIVE_SIZES = ("num_gpus", "message_bytes")
#: ``width``, the columns of an expert on a rank, is made of the columns ``inter`` and ``tp`` of a table.
EXPERT_SIZES = ("num_tokens", "hidden", "width", "ep", "num_experts")
EXCHANGE_SIZES = ("ep_size", "node_num", "num_tokens")
#: Regime of a fit that holds for any expert and tensor parallelism.
ANY_REGIME = "any"
#: Software whose kernels were measured.
LIBRARIES = ("trtllm", "vllm", "sglang", "nccl", "torch")
#: Library that engines hand large messages to.
LARGE_MESSAGES = "nccl"
#: "Algorithm" of a call outside a CUDA graph.
EAGER = "eager"
#: "Library" of a row that nobody measured; it joins the rows of every library.
ASSUMED = "assumed"

#: Kernels of linear attention in prefill and decode, those by which sparse attention chooses, and those that attend to
#: the chosen keys of a prompt or stand around the shared kernels of a decode step.
SCAN, STEP, CONVOLUTION, CONVOLUTION_STEP = "scan", "step", "convolution", "convolution_step"
INDEX, INDEX_STEP = "index", "index_step"
CHOSEN, SMALL_STEP = "chosen", "small_step"
ATTENTION_PARTS = (SCAN, STEP, CONVOLUTION, CONVOLUTION_STEP, INDEX, INDEX_STEP, CHOSEN, SMALL_STEP)

#: What a prefill kernel does with the keys of a tile of query rows.
WALKED, SPLIT = "walked", "split"

_Library = Annotated[str, OneOf(LIBRARIES)]
_Format = Annotated[str, OneOf(FORMATS)]
_Arithmetic = Annotated[str, OneOf(("bf16", "fp8"))]
_AttentionKind = Annotated[str, OneOf(ATTENTION_KINDS)]
_KeysOfTile = Annotated[str, OneOf((WALKED, SPLIT))]
_Share = Annotated[float, Range(1e-6, 2.0)]  # of the BF16 peak: fp8 arithmetic passes 1
_Fraction = Annotated[float, Range(0.0, 1.0)]
_Handling = Annotated[float, Range(1e-5, 10.0)]
_Time = Annotated[float, Quantity("s", 0.0, 1.0)]
_Blend = Annotated[float, Range(1.0, 20.0)]
_Count = Annotated[float, Range(0.0, 1e9)]
_Sending = Annotated[float, Quantity("B/s", MB, MB * GB)]
_Algorithm = Annotated[str, OneOf(("", "ring", "ring_ll", "one_shot", "two_shot", "in_switch", EAGER))]
_Reuse = Annotated[float, Range(1.0, 1e9)]
_Size = Annotated[float, Range(0.0, 1e6)]
_Power = Annotated[float, Range(0.0, 2.0)]
_Error = Annotated[float, Range(0.0, 10.0)]
_Rows = Annotated[int, Range(0, 10**9)]
_Ranks = Annotated[int, Range(0, 10_000)]
_Multiple = Annotated[int, Range(1, 10_000)]
#: ``{m: [1, 8192]}`` in a file.
_Ranges = Annotated[
    tuple[tuple[str, float, float], ...],
    Written(
        dict[str, Annotated[tuple[float, float], Span(0.0, 1e18)]],
        lambda lines: tuple((size, *ends) for size, ends in lines.items()),
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Where a fitted row comes from and how well it holds."""

    engine: Annotated[str, OneOf((*LIBRARIES, ASSUMED))]
    version: str
    points: _Rows  # rows fitted [1]
    median_error: _Error  # median absolute relative error on them [1]
    p90_error: _Error  # 90 % quantile of it [1]
    inherited_from: Annotated[str, NOT_IN_FILE] = ""  # system that was measured, when it is another one
    stands_for: Annotated[str, NOT_IN_FILE] = ""  # kernel that runs and was not timed, when it is another one
    parameters: Annotated[int, Range(0, 100)] = 0  # numbers that the fit set freely [1]
    held_out_points: _Rows = 0  # rows of shapes that the fit did not see [1]
    held_out_median_error: _Error = 0.0  # on them [1]
    held_out_p90_error: _Error = 0.0  # on them [1]
    sigma_log: _Error = 0.0  # robust standard deviation of log(measured/fitted) on them; 0 = not known [1]
    valid: _Ranges = ()  # (size, least, largest) as fitted; nothing = not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit(Fit):
    """Dense matrix multiply in one weight format; the form is ``physics.gemm``, the plain roofline if not ``tiled``."""

    format: _Format
    e_compute: _Share
    e_memory: _Share
    t0: _Time  # [s]
    blend_q: _Blend
    tiled: bool = False  # whether tiles, waves and the fields below are part of the form
    k_step: _Time = 0.0  # time of one element of K in the loop of a tile [s]
    k_split: _Time = 0.0  # time to add up one more part of a split K [s]
    reuse: _Reuse | None = None  # elements for which one read of an operand beyond L2 serves; None = read once [1]
    e_quantise: _Share | None = None  # share of the HBM bandwidth at which A is quantised; None = not in the rows [1]
    e_write: _Share | None = (
        None  # share of the HBM bandwidth at which C is written after the loop; None = within it [1]
    )
    least_row: _Size = 0.0  # a row of A is quantised no faster than one of so many elements [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionFit(Fit):
    """Causal attention of many new tokens; ``kind`` is "gqa" or "mla" (naive form).

    The form is ``physics.attention``: tiled where ``e_io`` is given, else the smooth one of ``s_half``.
    """

    kind: _AttentionKind
    compute: _Arithmetic
    cache: _Arithmetic
    e_compute: _Share  # share of the BF16 peak [1]
    s_half: _Size = 0.0  # smooth form: tokens at which half of the plateau is reached [token]
    t0: _Time  # [s]
    e_io: _Share | None = None  # share of the HBM bandwidth at which queries, outputs, new keys and values move [1]
    tail: _Fraction = 0.0  # share of the longest thread block that stays visible [1]
    keys: Annotated[_KeysOfTile, NOT_IN_FILE] = WALKED  # as the ``PrefillKeys`` of the engine say
    kernel: str = ""  # where a library has several


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKeys:
    """What the prefill kernel that an engine takes on a system does with the keys of a tile of query rows.

    ``walked``: one thread block takes all of them. ``split``: blocks share them where tiles are few
    (``physics.attention``). It decides the time of few new tokens on a long cached past.
    """

    engine: _Library
    kernel: str
    keys: _KeysOfTile
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """What an engine multiplies experts of a format with that no fit of its own tells, and whose fits stand for it."""

    engine: _Library
    format: _Format  # of the weights
    kernel: str  # what the engine runs
    library: _Library  # whose fits stand for it
    like: _Format  # format of those fits, and of the arithmetic and the activations
    e_compute: _Share | None = None  # share of the peak, where the kernel expands the weights; None = as the fits [1]
    t0: _Time | None = None  # None = as the fits [s]
    input_multiple: _Multiple = 1  # to which the kernel rounds up the hidden size that the first matrices read [1]
    multiple: _Multiple = 1  # and all other sizes of an expert's matrices [1]
    source: str

    def instead_of(self, row: MoeFit) -> MoeFit:
        """A fit of the kernel that was timed, as the engine's own kernel runs."""
        share = row.e_compute if self.e_compute is None else self.e_compute
        start = row.t0 if self.t0 is None else self.t0
        row = replace(row, input_multiple=self.input_multiple, multiple=self.multiple)
        return replace(row, stands_for=self.kernel, e_compute=share, t0=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionFit(Fit):
    """One new token per sequence against the cache; ``kind`` is "gqa" or "mla" (absorbed).

    The form is ``physics.attention``: with thread blocks where ``block_time`` is given, else the plain roofline.
    """

    kind: _AttentionKind
    cache: _Arithmetic
    e_memory: _Share
    e_compute: _Share | None = None  # MLA: share of the BF16 peak, above 1 where the arithmetic is fp8 [1]
    t0: _Time  # [s]
    block_time: _Time | None = None  # of a thread block on its multiprocessor [s]
    serial_time: _Time = 0.0  # of 1024 keys of one sequence [s]
    serial_power: _Power = 1.0  # growth of it with the key length; 1 = the keys are not split over blocks [1]
    ramp: _Time = 0.0  # cost of streaming a large cache, beside its bytes [s]
    kernel: str = ""  # where a library has several


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPartFit(Fit):
    """A kernel of linear or sparse attention beside scores and values; the form is ``physics.attention_parts``."""

    kind: _AttentionKind
    part: Annotated[str, OneOf(ATTENTION_PARTS)]
    e_compute: _Share | None = None  # share of the BF16 peak; None = it does not bind [1]
    e_memory: _Share | None = None  # None = it does not bind [1]
    t0: _Time  # [s]
    walk: _Time = 0.0  # of a new token of one sequence [s]
    key_walk: _Time = 0.0  # of a key of one sequence, cached or new [s]
    token: _Time = 0.0  # of a new token of any sequence, in the small kernels around [s]
    choice: _Time | None = None  # start of what runs only where not all keys are chosen; None = it always runs [s]
    choice_until: _Count = 0.0  # longest context that pays this start; 0 = any [token]
    head_tile: _Count = 0.0  # query heads are padded to multiples of it; 0 = they are not [1]
    query_tile: _Count = 0.0  # so are new tokens of a sequence [token]
    few_heads: _Count = 0.0  # on an fp8 cache fewer query heads than that take ``few_token`` [1]
    few_token: _Time = 0.0  # of a new token of any sequence [s]
    host: _Time = 0.0  # the module takes no less outside a graph, whatever its kernels take; not in a served pass [s]
    kernel: str = ""  # where a library has several


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFit(Fit):
    """Grouped GEMM of the routed experts; the form is ``physics.experts``, with the defaults the plain roofline."""

    kernel: str
    format: _Format
    regime: Annotated[str, OneOf(("single", "tp", "ep2_8", "ep16_256", ANY_REGIME))]
    picks: Annotated[str, OneOf(("T*k/ep", "T*k"))]  # which count of picks a rank multiplies
    e_compute: _Share | None
    e_memory: _Share
    t0: _Time  # [s]
    blend_q: _Blend
    least_rows: Annotated[float, Range(0.0, 1e4)] = 0.0  # rows that an expert with fewer is padded to [1]
    per_expert: _Time = 0.0  # set-up of one expert of the rank [s]
    handling: _Handling | None = None  # bytes of rows gathered and summed a FLOP of the FP32 peak; None: free [B/FLOP]
    block_rows: Annotated[float, Range(0.0, 1e4)] = (
        0.0  # every expert of the rank runs in blocks of so many, picked or not [1]
    )
    stray: _Fraction = 0.0  # share of other ranks' picks that the rank measured multiplied, too; not so in serving [1]
    input_multiple: Annotated[_Multiple, NOT_IN_FILE] = 1  # as the ``ExpertKernels`` that it stands for say
    multiple: Annotated[_Multiple, NOT_IN_FILE] = 1  # the same


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit(Fit):
    """A collective of one library inside one domain.

    Without ``algorithm``: on ``gpus`` ranks, ``latency + V/(e_bandwidth*link)``, V of the ring. With one, for any
    number of ranks n: ``latency + hop*(n-1) + w + 2*sqrt(ramp*w)``, ``w = V/(e_bandwidth*link)`` with the volume V of
    that algorithm; the fastest algorithm counts. ``EAGER`` rows tell what a call outside a CUDA graph takes:
    ``max(latency, t + 2*S/(e_bandwidth*HBM))``, t being the time inside one.
    """

    op: Annotated[str, OneOf(("all_reduce", "all_gather", "reduce_scatter", "alltoall"))]
    gpus: _Ranks  # 0 = any number
    latency: _Time  # [s]
    e_bandwidth: _Share
    algorithm: _Algorithm = ""  # "ring_ll": low-latency protocol; "": the ring on ``gpus`` ranks
    hop: _Time = 0.0  # latency added by each rank beyond the first [s]
    ramp: _Time = 0.0  # hand-over of a pipelined message [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllFit(Fit):
    """MoE dispatch, combine or prepare of one backend on ``ranks`` ranks over ``nodes`` nodes.

    ``latency + step*log2(ranks; nodes over a NIC) + V/(e_bandwidth*link)``; "prepare":
    ``latency + step*log2(ranks) + T*seconds_per_token``. Across nodes the sending kernel may bind instead of the NIC:
    ``T*d*b/token_bandwidth``.
    """

    backend: str
    phase: Annotated[str, OneOf(("dispatch", "combine", "combine_low_precision", "prepare"))]
    format: Annotated[str, OneOf((*FORMATS, "unlabelled", "default"))]  # what is sent; "default" = any, by its bytes
    ranks: _Ranks  # 0 = any number
    nodes: _Ranks  # 0 = any number
    volume: str  # formula of the volume V of the fit
    bytes_per_element: Annotated[float, Range(0.1, 8.0)] | None  # b in that formula; None = that of the format sent [B]
    link: Annotated[str, OneOf(("nvlink", "nic"))]
    latency: _Time  # [s]
    e_bandwidth: _Share | None
    seconds_per_token: Annotated[float, Quantity("s", 0.0, MS)] | None  # "prepare" only [s]
    step: _Time = 0.0  # latency added per doubling of the group [s]
    token_bandwidth: _Sending | None = None  # across nodes, at the number of multiprocessors that engines give it [B/s]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseFit(Fit):
    """A kernel that reads and writes activations: ``t0 + bytes/(e_memory*HBM)``."""

    op: Annotated[str, OneOf(("scale_matrix", "compute_scale"))]  # 16 bit to 8 bit, or read alone
    e_memory: _Share
    t0: _Time  # [s]


#: Operator group of an ``EfficiencySpec`` -> class of its rows.
SECTIONS: dict[str, type[Fit]] = {
    "gemm": GemmFit,
    "prefill_attention": PrefillAttentionFit,
    "decode_attention": DecodeAttentionFit,
    "attention_parts": AttentionPartFit,
    "moe": MoeFit,
    "collectives": CollectiveFit,
    "alltoall": AllToAllFit,
    "elementwise": ElementwiseFit,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A table of measurements that fits were made from."""

    name: str
    sha256: str
    rows: _Rows  # of the system [1]
    fitted: _Rows  # [1]
    held_out: _Rows  # of shapes that no fit saw [1]
    dropped: Mapping[str, _Rows]  # reason -> rows left out of both [1]


@dataclass(frozen=True, kw_only=True)
class EfficiencySpec:
    """All fitted rows of one system."""

    system: str  # the system that uses them
    measured_on: Annotated[str, NOT_IN_FILE]  # the system that was measured
    data: str  # data set
    date: str  # of the data
    engine_order: tuple[_Library, ...]  # whose fit is taken first, per operator
    gemm: tuple[GemmFit, ...]
    prefill_attention: tuple[PrefillAttentionFit, ...]
    decode_attention: tuple[DecodeAttentionFit, ...]
    moe: tuple[MoeFit, ...]
    collectives: tuple[CollectiveFit, ...]
    alltoall: tuple[AllToAllFit, ...]
    elementwise: tuple[ElementwiseFit, ...] = ()
    attention_parts: tuple[AttentionPartFit, ...] = ()
    prefill_keys: tuple[PrefillKeys, ...] = ()  # by engine; walked where none is named
    expert_kernels: tuple[ExpertKernels, ...] = ()  # by engine and format
    files: tuple[DataFile, ...] = ()  # tables that the fits were made from, where the file says so

    @property
    def inherited(self) -> bool:
        """Whether these fits were made on another system."""
        return self.system != self.measured_on

    def expert_fits(self, name: str, order: Sequence[str]) -> list[MoeFit]:
        """Fits of experts in a format.

        Of the engines of ``order`` the first one counts that has fits of its own, which come with those of others, or
        for whose kernels fits of another library or format stand (``expert_kernels``). Without either: fits of the
        format whose dense kernels multiply it.
        """
        mine = [row for row in self.moe if row.format == name]
        told = {each.engine: each for each in self.expert_kernels if each.format == name}
        for engine in order:
            if any(row.engine == engine for row in mine):
                return mine
            if (word := told.get(engine)) is not None:
                like = [row for row in self.moe if (row.engine, row.format) == (word.library, word.like)]
                return [word.instead_of(row) for row in like if not row.block_rows]
        dense = [row for row in self.moe if row.format == FORMATS[name].dense]
        return mine or [replace(row, stands_for=f"experts in {name}") for row in dense]


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedRows:
    """Rows of a section taken over from another system: all of them, or those whose fields are as ``where`` says."""

    section: Annotated[str, OneOf(SECTIONS)]
    system: str
    where: Mapping[str, str] = field(default_factory=dict)
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What an efficiency file says of other systems beside its own rows."""

    inherits_rows: tuple[InheritedRows, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """An efficiency file without rows of its own: all are those of another system."""

    system: str
    inherits: str
    reason: str


def efficiency_of(path: Path, data: Mapping[str, Any], load: Callable[[str], EfficiencySpec]) -> EfficiencySpec:
    """Read the fits of one system: its own rows, rows taken over from another system, or all of a parent's."""
    if "inherits" in data:
        heir = Heir(**dict(validate(keys_of(Heir), data, path)))
        parent = load(heir.inherits)
        rows: dict[str, Any] = {
            key: tuple(_taken_over(row, parent.system) for row in getattr(parent, key)) for key in SECTIONS
        }
        return replace(parent, system=heir.system, **rows)
    fields = dict(validate(keys_of(EfficiencySpec, Inherited), data, path))
    fields["prefill_attention"] = with_keys(fields["prefill_attention"], fields["prefill_keys"])
    for transfer in fields.pop("inherits_rows"):
        parent = load(transfer.system)
        fields[transfer.section] += tuple(
            _taken_over(row, parent.system)
            for row in getattr(parent, transfer.section)
            if all(str(getattr(row, key, None)) == value for key, value in transfer.where.items())
        )
    return EfficiencySpec(measured_on=fields["system"], **fields)


def with_keys(fits: Iterable[Fit], told: Iterable[PrefillKeys]) -> tuple[Any, ...]:
    """Set, in fits of prefill attention, what the kernel of their engine does with the keys of a tile."""
    keys = {each.engine: each.keys for each in told}
    return tuple(
        replace(fit, keys=keys.get(fit.engine, WALKED)) if isinstance(fit, PrefillAttentionFit) else fit for fit in fits
    )


def _taken_over(row: Any, origin: str) -> Any:
    return replace(row, inherited_from=row.inherited_from or origin)
