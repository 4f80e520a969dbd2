"""Profiles: how far from the speed of light a forecast is made, and every assumption that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.notebook import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec(Shown):
    """Assumptions of one profile. ``None`` for a floor means "as fitted".

    ``fitted`` says whether the efficiencies of the system are used (else every e = 1, q = infinity).
    """

    name: str
    title: str
    fitted: bool
    best_algorithm: bool  # collectives take the fastest algorithm instead of the fitted ring
    gemm_t0: float | None  # all of the floor of a GEMM: start, quantising, loop along K [s]
    gemm_t0_cap_quantised: float | None  # cap on that floor of fp8 and fp4 GEMM, the fitted t0 being it [s]
    attention_t0: float | None  # [s]
    moe_t0: float | None  # [s]
    all_reduce_latency: float | None  # [s]
    all_to_all_latency: float | None  # of dispatch and of combine, each [s]
    elementwise_efficiency: float  # share of HBM bandwidth [1]
    elementwise_latency: float  # all elementwise kernels of a layer [s]
    host: float  # per pass; micro-batches and chunks in flight hide each other's [s]
    prefill_imbalance: float  # load of the fullest expert rank over the mean [1]
    decode_imbalance: float  # [1]
    p2p_latency_inside: float  # pipeline hand-over inside an NVLink domain [s]
    p2p_latency_across: float  # and across domains [s]
    p2p_efficiency: float  # share of the link [1]
    nic_latency: float  # one hop of a collective over NICs [s]
    nic_efficiency: float  # share of the NIC [1]
    all_reduce_step_latency: float  # added per doubling beyond the largest fitted group [s]
    memory_utilisation: float  # share of the reported memory that an engine may fill [1]
    runtime_bytes: float  # context, graphs, libraries [B]
    communication_library_bytes: float  # [B]
    resident_deviations: float  # standard deviations of resident tokens to provision for [1]
    shared_expert_overlaps_dispatch: bool
    all_reduce_hidden_fraction: float  # of prefill all-reduce [1]
    sources: tuple[tuple[str, str], ...]  # (key, where the figure comes from)
    random_routing: bool = False  # the fullest expert rank is that of random picks, not the mean one
