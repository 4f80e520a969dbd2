"""A GPU system as its vendor describes it: chip, NVLink domain, scale-out network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg_sim.notebook import Shown


@dataclass(frozen=True, kw_only=True)
class SystemSpec(Shown):
    """One GPU and the links around it. Peaks are dense; links are one way, per GPU."""

    name: str
    title: str
    vendor: str
    architecture: str  # generation of the chip: spreads of fits carry over between equal ones
    peak_flops: Mapping[str, float]  # arithmetic ("bf16", "fp8", "nvfp4", ...) -> [FLOP/s]; absent = unsupported
    hbm_capacity: float  # nominal [B]
    hbm_reported: float  # what the driver reports: the usable size [B]
    hbm_bandwidth: float  # [B/s]
    l2_capacity: float  # [B]
    sm_count: int  # [1]
    attention_tile_rows: int  # query rows of a thread block of prefill attention [token]
    nvlink_bandwidth: float  # [B/s]
    nvlink_domain: int  # GPUs of one scale-up domain [1]
    in_switch_reduction: bool  # whether switches of the domain add up an all-reduce
    nic_bandwidth: float  # [B/s]
    tdp: float  # [W]
    usd_per_gpu_hour: tuple[float, float] | None  # low and high market price [USD/h]
    confidence: str
    sources: Mapping[str, str]  # key -> where its figure comes from
