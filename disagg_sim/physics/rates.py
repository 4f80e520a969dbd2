"""Resolve the rates of every operator from vendor facts, fits and a profile.

This is the one place where peaks meet efficiencies. ``ideal`` (speed of light), ``optimistic`` and
``measured`` differ only in what is resolved here. Source: physics page, section 9.

Past 400 lines: the order in which fits stand in for one another is one idea, for all kinds of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from disagg_sim.domain import MAX_INSTANCE_GPUS
from disagg_sim.errors import InputError, check_word
from disagg_sim.facts.efficiency import (
    ANY_REGIME,
    ASSUMED,
    CHOSEN,
    LARGE_MESSAGES,
    SPLIT,
    DecodeAttentionFit,
    EfficiencySpec,
    Fit,
    GemmFit,
    MoeFit,
    PrefillAttentionFit,
)
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import BF16, FORMATS, Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.physics.attention import AttentionRate
from disagg_sim.physics.attention_parts import ASSUMED_PARTS, PartRate, part_rate
from disagg_sim.physics.blocks import ATTENTION
from disagg_sim.physics.collectives import (
    AllToAllRate,
    LinkCurve,
    collective_curve,
    copies_per_pick,
    exchange_curve,
    flat_curve,
    pick_backend,
)
from disagg_sim.physics.experts import MoeRate
from disagg_sim.physics.gemm import FEW_ROWS, TILE_M, GemmRate
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.work import Operator

ENGINES = ("trtllm", "vllm", "sglang")
#: Share of the arithmetic of scores and values that is softmax, at heads of 128, by format: FlashAttention-3 on an H100
#: reaches 648 TFLOP/s there and 497 at heads of 64 (arXiv:2407.08608, figure 5); fp8 halves the rest. [1]
SOFTMAX = {"bf16": 0.30, "fp8": 0.47}
#: Parallel regimes of the grouped MoE GEMM fits, and where to look when one was not measured.
REGIME_FALLBACK = {
    "single": ("tp", "ep2_8"),
    "tp": ("single", "ep2_8"),
    "ep2_8": ("ep16_256", "tp"),
    "ep16_256": ("ep2_8", "tp"),
}

#: Name of TensorRT-LLM's generated expert kernels in libraries that have them from FlashInfer, and their formats there.
GENERATED, GENERATED_FORMATS = "flashinfer_trtllm", ("fp8_block", "nvfp4")


#: 90 % error of a fit above which another expert kernel of the format is taken instead. [1]
WORST_FIT = 0.5

#: Share of the HBM bandwidth at which rows of experts pass at most, some of them within L2: the fastest kernel that was
#: timed reaches 1.6, on an A100. It binds cards with many multiprocessors and slow memory. [1]
MOST_PASSING = 2.0

F = TypeVar("F", bound=Fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Fits that were taken for operators of one kind."""

    what: str  # they were taken for, in words
    kind: str  # of the operators, of ``physics.work.KINDS``; "" = none by themselves
    form: str = ""  # format of a GEMM, kind of attention; "" = any
    name: str  # of the operators; "" = any
    chosen: Fit  # the one whose engine comes first
    fits: tuple[Fit, ...]  # all that speak together

    @property
    def inherited(self) -> bool:
        """Whether the chosen one was made on another system."""
        return bool(self.chosen.inherited_from)

    @property
    def text(self) -> str:
        """What they were taken for, and where the chosen one comes from, in words."""
        origin = f", inherited from {self.chosen.inherited_from}" if self.inherited else ""
        lent = f", stands for {self.chosen.stands_for}" if self.chosen.stands_for else ""
        return f"{self.what}: {self.chosen.engine} {self.chosen.version}{origin}{lent}"

    def serves(self, name: str, kind: str, form: str) -> bool:
        """Whether the operator of a name, kind and format is timed by them."""
        return kind == self.kind and self.form in ("", form) and self.name in ("", name.partition(" of ")[0])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Everything that turns the counts of one model on one system into seconds."""

    gemm: Mapping[str, GemmRate]  # by format name
    prefill_attention: Mapping[str, AttentionRate]  # by kind of attention
    decode_attention: Mapping[str, AttentionRate]
    attention_parts: Mapping[str, PartRate]  # by kind of attention and part
    moe: Mapping[str, tuple[MoeRate, ...]]  # by regime; the fastest kernel counts at each point
    elementwise_bandwidth: float  # [B/s]
    all_reduce: LinkCurve
    all_gather: LinkCurve
    reduce_scatter: LinkCurve
    dispatch: Mapping[str, AllToAllRate]  # by phase, "prefill" or "decode"
    combine: Mapping[str, AllToAllRate]
    prepare: LinkCurve | None  # latency only
    prepare_per_token: float  # [s]
    used: tuple[Taken, ...]  # every fit taken
    adjust: Callable[[Operator, Cost], Cost] | None = None  # changes costs of operators; None = as fitted

    @property
    def inherited(self) -> bool:
        """Whether any fit was made on another system."""
        return any(taken.inherited for taken in self.used)


def gemm_rate(fit: GemmFit, system: SystemSpec) -> GemmRate:
    """Find what a fitted GEMM reaches, in FLOP/s, B/s and s, quantising of A included where the fit's rows hold it."""
    form = FORMATS[fit.format]
    flops, bandwidth = fit.e_compute * system.peak_flops[form.arithmetic], fit.e_memory * system.hbm_bandwidth
    if not fit.tiled:
        return GemmRate(flops, bandwidth, fit.t0, fit.blend_q)
    ridge = 0.5 * form.bytes * flops / bandwidth  # rows that take as long to multiply as their weights to read
    return GemmRate(
        flops,
        bandwidth,
        fit.t0,
        fit.blend_q,
        multiprocessors=system.sm_count,
        step=fit.k_step,
        split=fit.k_split,
        reuse=np.inf if fit.reuse is None else fit.reuse,
        cache=system.l2_capacity,
        quantise=np.inf if fit.e_quantise is None else fit.e_quantise * system.hbm_bandwidth,
        least_row=fit.least_row,
        write=np.inf if fit.e_write is None else fit.e_write * system.hbm_bandwidth,
        element=form.bytes,
        tile_rows=TILE_M if ridge >= TILE_M else FEW_ROWS,
    )


def prefill_attention_rate(fit: PrefillAttentionFit, system: SystemSpec, *, reads_past_at: float) -> AttentionRate:
    """Find what a fitted prefill attention reaches on a system, in FLOP/s, B/s and s.

    Whatever the format, the share is one of the BF16 peak, 989 TFLOP/s:

    >>> from disagg_sim.facts.load import load_system
    >>> row = {"engine": "trtllm", "version": "", "points": 0, "median_error": 0.0, "p90_error": 0.0, "t0": 0.0}
    >>> fit = PrefillAttentionFit(**row, kind="gqa", compute="fp8", cache="fp8", e_compute=0.8, e_io=0.5)
    >>> rate = prefill_attention_rate(fit, load_system("h200_sxm"), reads_past_at=4e12)
    >>> f"{rate.flops / 1e12:.0f} TFLOP/s in tiles of {rate.s_half:.0f} rows"
    '792 TFLOP/s in tiles of 128 rows'
    """
    flops = fit.e_compute * system.peak_flops["bf16"]
    if fit.e_io is None:
        return AttentionRate(flops, reads_past_at, fit.t0, fit.s_half)
    return AttentionRate(
        flops,
        reads_past_at,
        fit.t0,
        float(system.attention_tile_rows),
        multiprocessors=system.sm_count,
        io_bandwidth=fit.e_io * system.hbm_bandwidth,
        tail=fit.tail,
        splits_keys=fit.keys == SPLIT,
        softmax=SOFTMAX[fit.compute] if fit.kind == "gqa" else 0.0,
    )


def decode_attention_rate(fit: DecodeAttentionFit, system: SystemSpec, *, resident: float = 0.0) -> AttentionRate:
    """Find what a fitted decode attention reaches on a system, in FLOP/s, B/s and s.

    Where memory was always the limit the fit leaves the arithmetic open, and the peak counts:

    >>> from disagg_sim.facts.load import load_system
    >>> row = {"engine": "trtllm", "version": "", "points": 0, "median_error": 0.0, "p90_error": 0.0, "t0": 0.0}
    >>> rate = decode_attention_rate(
    ...     DecodeAttentionFit(**row, kind="gqa", cache="fp8", e_memory=0.8), load_system("h200_sxm")
    ... )
    >>> f"{rate.flops / 1e12:.0f} TFLOP/s, {rate.bandwidth / 1e12:.2f} TB/s"
    '989 TFLOP/s, 3.84 TB/s'
    """
    flops, bandwidth = _decode_flops(fit, system), fit.e_memory * system.hbm_bandwidth
    if fit.block_time is None:
        return AttentionRate(flops, bandwidth, fit.t0)
    return AttentionRate(
        flops,
        bandwidth,
        fit.t0,
        multiprocessors=system.sm_count,
        block_time=fit.block_time,
        serial_time=fit.serial_time,
        serial_power=fit.serial_power,
        ramp=fit.ramp,
        resident=resident,
    )


def _decode_flops(fit: DecodeAttentionFit, system: SystemSpec) -> float:
    """Rate of multiplying: the peak where the fit could not tell, memory being the limit. [FLOP/s]"""
    peak = system.peak_flops["bf16"]
    return peak if fit.e_compute is None else fit.e_compute * peak


def moe_rate(fit: MoeFit, system: SystemSpec) -> MoeRate:
    """Find what a fitted grouped GEMM reaches, in FLOP/s, B/s and s; without ``e_compute`` arithmetic has no limit."""
    form = FORMATS[fit.format]
    flops = np.inf if fit.e_compute is None else fit.e_compute * system.peak_flops[form.arithmetic]
    handling, passing = _handling(fit, system)
    return MoeRate(
        flops,
        fit.e_memory * system.hbm_bandwidth,
        fit.t0,
        fit.blend_q,
        least_rows=fit.least_rows,
        per_expert=fit.per_expert,
        handling=handling,
        passing=passing,
        element=form.bytes,
        block_rows=fit.block_rows,
        input_multiple=fit.input_multiple,
        multiple=fit.multiple,
    )


def _handling(fit: MoeFit, system: SystemSpec) -> tuple[float, float]:
    """Rates of multiprocessors that handle rows, and of rows that pass HBM; inf for what does not bind. [B/s]"""
    if fit.handling is None:
        return np.inf, np.inf
    handled, passed = fit.handling * system.vector_flops, MOST_PASSING * system.hbm_bandwidth
    return (handled, np.inf) if np.real(handled) <= np.real(passed) else (np.inf, passed)


def _tables(kind: str) -> tuple[str, ...]:
    """Kinds whose fits time scores and values of a kind."""
    tables = ATTENTION[kind].tables
    return (kind,) if tables is None else tables


def _best_match(rows: Iterable[F], order: tuple[str, ...]) -> F | None:
    """The row of the first engine in ``order``; among several the one fitted on most points."""
    found = sorted(rows, key=lambda row: (order.index(row.engine), -row.points))
    return found[0] if found else None


class _Resolver:
    """Picks the fits of one engine order and remembers which were taken."""

    def __init__(
        self,
        system: SystemSpec,
        spec: EfficiencySpec | None,
        profile: ProfileSpec,
        order: tuple[str, ...],
        expert_kernel: str,
    ):
        self.system, self.spec, self.profile, self.order = system, spec, profile, order
        self.expert_kernel = expert_kernel
        self.used: dict[str, Taken] = {}
        self.leaves_domain = system.nvlink_domain < MAX_INSTANCE_GPUS  # whether any stage can

    def note(self, what: str, kind: str, fits: Sequence[Fit], *, form: str = "", name: str = "") -> None:
        """Remember fits, the chosen one first."""
        self.used[what] = Taken(what=what, kind=kind, form=form, name=name, chosen=fits[0], fits=tuple(fits))

    def take(self, what: str, rows: Iterable[F], *, kind: str = "", form: str = "") -> F:
        row = _best_match((row for row in rows if row.engine in self.order), self.order)
        if row is None:
            fault = f"system {self.system.name!r} has no fitted {what}"
            raise InputError(f"{fault}: use profile 'ideal' or add the fit to its file")
        self.note(what, kind, [row], form=form)
        return row

    def gemm(self, name: str) -> GemmRate:
        peak, bandwidth = self.system.peak_flops[FORMATS[name].arithmetic], self.system.hbm_bandwidth
        if self.spec is None:
            return GemmRate(peak, bandwidth, 0.0, np.inf)
        fit: GemmFit = self.take(
            f"{name} GEMM", (row for row in self.spec.gemm if row.format == name), kind="gemm", form=name
        )
        rate, floor, cap = gemm_rate(fit, self.system), self.profile.gemm_t0, self.profile.gemm_t0_cap_static_scales
        if floor is None and (cap is None or FORMATS[name].arithmetic == "bf16"):
            return rate
        # Engines fuse and overlap what such a floor takes off: the operator before quantises A, whose bytes are
        # elementwise, and a graph starts a kernel before the one ahead of it has ended. Scales of blocks need the
        # values of A first: the start of the kernel that finds them, which the fitted t0 holds, stays.
        t0 = fit.t0 if floor is None else floor
        if cap is not None and FORMATS[name].static_scales:
            t0 = min(t0, cap)
        return replace(rate, t0=t0, quantise=np.inf, floor_is_all=True)

    def attention(self, kind: str, precision: Precision) -> tuple[AttentionRate, AttentionRate]:
        bandwidth = self.system.hbm_bandwidth
        if self.spec is None:
            both = AttentionRate(self.system.peak_flops[precision.attention], bandwidth, 0.0)
            return both, both
        cache = "bf16" if precision.cache.arithmetic == "bf16" else "fp8"
        mine = [row for row in self.spec.prefill_attention if row.kind == kind]
        wanted = [row for row in mine if row.cache == cache]
        exact = [row for row in wanted if row.compute == precision.attention]
        alike = [row for row in mine if row.compute == precision.attention]  # arithmetic binds, not the cache
        what = f"{cache}-cache {kind.upper()}"
        own = [row for row in wanted if row.engine == self.order[0] and precision.attention == "fp8"]
        exact = [row for row in own if row in exact] or own or exact  # an engine without such a kernel takes bf16
        prefill = self.take(f"{what} prefill attention", exact or alike or wanted, kind="prefill_attention", form=kind)
        served = [row for row in self.spec.decode_attention if row.kind == kind]
        cached = (row for row in served if row.cache == cache)
        decode = self.take(f"{what} decode attention", cached, kind="decode_attention", form=kind)
        multiplied = decode  # kernels multiply in the format of their cache, if they multiply enough to be fitted
        if decode.e_compute is not None and precision.attention != cache:
            what = f"{precision.attention} {kind.upper()} decode arithmetic"
            multiplied = self.take(what, (r for r in served if r.cache == precision.attention))
        floor = self.profile.attention_t0
        fast = prefill_attention_rate(prefill, self.system, reads_past_at=decode.e_memory * bandwidth)
        slow = replace(decode_attention_rate(decode, self.system), flops=_decode_flops(multiplied, self.system))
        return (fast, slow) if floor is None else (replace(fast, t0=floor), replace(slow, t0=floor))

    def part(self, kind: str, part: str, precision: Precision) -> PartRate:
        """Rate of a kernel of linear or sparse attention; assumed where no system's file has one."""
        if self.spec is None:
            arithmetic = precision.attention if part == CHOSEN else "bf16"
            return PartRate(self.system.peak_flops[arithmetic], self.system.hbm_bandwidth)
        rows = [row for row in self.spec.attention_parts if (row.kind, row.part) == (kind, part)]
        first = _best_match((row for row in rows if row.engine in self.order), self.order) or ASSUMED_PARTS[part]
        self.note(f"{kind.upper()} {part.replace('_', ' ')}", "attention_part", [first], form=f"{kind} {part}")
        rate, floor = part_rate(first, self.system, precision.cache.arithmetic), self.profile.attention_t0
        return rate if floor is None else replace(rate, t0=floor)

    def moe(self, name: str) -> dict[str, tuple[MoeRate, ...]]:
        if self.spec is None:
            peak = self.system.peak_flops[FORMATS[name].fastest(self.system.peak_flops)]
            return dict.fromkeys(REGIME_FALLBACK, (MoeRate(peak, self.system.hbm_bandwidth, 0.0, np.inf),))
        mine = self.spec.expert_fits(name, self.order)
        first = _best_match((row for row in mine if row.engine in self.order), self.order)
        if first is not None and first.regime == ANY_REGIME:
            return dict.fromkeys(REGIME_FALLBACK, self._moe_regime(name, ANY_REGIME, mine))
        return {regime: self._moe_regime(name, regime, mine) for regime in REGIME_FALLBACK}

    def _moe_regime(self, name: str, regime: str, rows: list[MoeFit]) -> tuple[MoeRate, ...]:
        for candidate in (regime, *REGIME_FALLBACK.get(regime, ())):
            here = [row for row in rows if row.regime == candidate]
            if here and any(row.engine in self.order for row in here):
                break
        what = f"{name} MoE GEMM ({regime})"
        chosen = self.take(what, here, kind="experts", form=name)
        kernels = self._expert_kernels(name, chosen.engine, here)
        self.used[what] = replace(self.used[what], fits=tuple(kernels))
        # A fit that could not identify its compute term borrows that of its sibling kernel.
        known = [row for row in rows if row.engine == chosen.engine and row.e_compute is not None]
        siblings = [row for row in known if row.regime == candidate] or known
        floor = self.profile.moe_t0
        rates = []
        for row in kernels:
            own = row.e_compute is not None or row.block_rows  # blocks hold their arithmetic
            e_compute = row.e_compute if own else siblings[0].e_compute
            rate = moe_rate(replace(row, e_compute=e_compute), self.system)
            rates.append(rate if floor is None else replace(rate, t0=floor, per_expert=0.0))
        return tuple(rates)

    def _expert_kernels(self, name: str, engine: str, rows: list[MoeFit]) -> list[MoeFit]:
        """Fits of the kernels that an engine chooses among, its own in another library included; the sound ones.

        Where the engine's file names a kernel, that one alone; one that runs in blocks only if it is named.
        """
        if named := [row for row in rows if row.engine == engine and row.kernel == self.expert_kernel]:
            return named
        rows = [row for row in rows if not row.block_rows]
        lent = _best_match((row for row in rows if GENERATED in row.kernel and name in GENERATED_FORMATS), self.order)
        kernels = [row for row in rows if row.engine == engine or (engine == "trtllm" and row is lent)]
        return [row for row in kernels if row.p90_error <= WORST_FIT] or kernels

    def collective(self, op: str, what: str, kind: str) -> LinkCurve:
        link = self.system.nvlink_bandwidth
        latency = self.profile.all_reduce_latency
        if self.spec is None:
            return flat_curve(link, latency or 0.0)
        rows = [row for row in self.spec.collectives if row.op == op]
        order = self.order if any(row.engine in self.order for row in rows) else ("nccl",)
        first = _best_match((row for row in rows if row.engine in order), order)
        if first is None:
            raise InputError(f"system {self.system.name!r} has no fitted {what}; use profile 'ideal'")
        mine = [row for row in rows if row.engine in (first.engine, ASSUMED)]
        if first.algorithm and first.engine != LARGE_MESSAGES:  # an engine hands its large messages on
            mine += [row for row in rows if row.engine == LARGE_MESSAGES]
        self.used[what] = Taken(
            what=what, kind=kind, name="" if kind == "all_reduce" else what, chosen=first, fits=tuple(mine)
        )
        return collective_curve(mine, link, latency=latency, step=self.profile.all_reduce_step_latency)

    def all_to_all(self, phase: str, direction: str, wire: str) -> AllToAllRate:
        link, nic = self.system.nvlink_bandwidth, self.system.nic_bandwidth
        profile = self.profile
        if self.spec is None:
            ideal = profile.all_to_all_latency or 0.0
            return AllToAllRate(flat_curve(link, ideal), flat_curve(nic * profile.nic_efficiency, ideal))
        backend = "deepep_normal" if phase == "prefill" else "deepep_ll"
        rows = [row for row in self.spec.alltoall if row.phase == direction and row.e_bandwidth is not None]
        inside = pick_backend([row for row in rows if row.link == "nvlink"], ("NVLinkTwoSided", backend), wire)
        across = pick_backend([row for row in rows if row.link == "nic" and self.leaves_domain], (backend,), wire)
        floor, name = profile.all_to_all_latency, f"{phase} {direction}"
        if inside:
            self.note(name, "all_to_all", inside, name=name)
            near = exchange_curve(inside, link, floor, nodes=False)
        else:
            near = replace(self.collective("alltoall", name, "all_to_all"), copies=copies_per_pick)
        if across:
            self.note(f"{name} across domains", "all_to_all", across, name=name)
            return AllToAllRate(near, exchange_curve(across, nic, floor, nodes=True))
        latency = profile.nic_latency if floor is None else floor
        return AllToAllRate(near, flat_curve(nic * profile.nic_efficiency, latency))


def resolve_rates(
    model: ModelSpec,
    system: SystemSpec,
    precision: Precision,
    profile: ProfileSpec,
    efficiency: EfficiencySpec | None,
    engine: str = "",
    expert_kernel: str = "",
) -> Rates:
    """Rates of every operator of ``model`` on ``system``, in FLOP/s, B/s and s, with every fit that was taken.

    Fits of ``engine`` come first, those of others where it has none; ``expert_kernel`` multiplies experts wherever the
    engine has a row of it.
    """
    if engine:
        check_word("engine", engine, ENGINES)
    if profile.fitted and efficiency is None:
        raise InputError(
            f"system {system.name!r} has no fitted efficiencies: only profile 'ideal' can be used; "
            f"hw_specs/efficiency/{system.name}.yaml may inherit those of another (docs/howto/my_gpu.md)"
        )
    spec = efficiency if profile.fitted else None
    preferred = spec.engine_order if spec is not None else ENGINES
    order = (engine, *(e for e in preferred if e != engine)) if engine else preferred
    if untimed := [kind for kind in model.attention_kinds if kind not in ATTENTION]:
        raise InputError(f"attention of kind {untimed[0]!r}: not timed yet; timed: {', '.join(ATTENTION)}")
    resolver = _Resolver(system, spec, profile, order, expert_kernel)
    tables = dict.fromkeys(kind for each in model.attention_kinds for kind in _tables(each))
    absorbed = [BF16] * ("mla" in tables)
    formats = dict.fromkeys((*precision.projections, precision.ffn, precision.head, precision.router, *absorbed))
    parts = {f"{kind} {part}": (kind, part) for kind in model.attention_kinds for part in ATTENTION[kind].parts}
    attention = {kind: resolver.attention(kind, precision) for kind in tables}
    wire = {0.5625: "nvfp4", 2.0: "bf16"}.get(precision.dispatch_bytes, "fp8")
    phases = ("prefill", "decode") if model.is_moe else ()
    prepare = None
    per_token = 0.0
    if spec is not None and model.is_moe and profile.all_to_all_latency is None:
        rows = pick_backend([r for r in spec.alltoall if r.phase == "prepare"], ("NVLinkTwoSided",), wire)
        if rows:
            prepare = exchange_curve(rows, system.nvlink_bandwidth, None, nodes=False)
            per_token = float(np.mean([row.seconds_per_token or 0.0 for row in rows]))
    return Rates(
        gemm={f.name: resolver.gemm(f.name) for f in formats},
        prefill_attention={kind: prefill for kind, (prefill, _) in attention.items()},
        decode_attention={kind: decode for kind, (_, decode) in attention.items()},
        attention_parts={name: resolver.part(*which, precision) for name, which in parts.items()},
        moe=resolver.moe(precision.expert.name) if model.is_moe else {},
        elementwise_bandwidth=profile.elementwise_efficiency * system.hbm_bandwidth,
        all_reduce=resolver.collective("all_reduce", "all-reduce", "all_reduce"),
        all_gather=resolver.collective("all_gather", "all-gather", "gather"),
        reduce_scatter=resolver.collective("reduce_scatter", "reduce-scatter", "gather"),
        dispatch={phase: resolver.all_to_all(phase, "dispatch", wire) for phase in phases},
        combine={phase: resolver.all_to_all(phase, "combine", wire) for phase in phases},
        prepare=prepare,
        prepare_per_token=per_token,
        used=tuple(resolver.used.values()),
    )
