"""Fit the MoE exchange: dispatch, combine and prepare of each backend.

Dispatch and combine take ``latency + step*log2(group) + copies*T*d*b/(e_bandwidth*link)``. All formats (which differ
only in b), models and versions of a backend are fitted together. Each phase of DeepEP has its own latency; the phases
of an NVLink exchange wait at the same barriers and share one. The phases of a backend share the step (if several group
sizes were measured) and the share of the link bandwidth; a combine in low precision also converts, and has its own
share. The number of copies that cross the link is known for each backend. Across nodes there is one more parameter:
the rate of the sending kernel on its multiprocessors. Prepare takes ``latency + step*log2(n) + T*seconds_per_token``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.facts.efficiency import AllToAllFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.collectives import COPIES
from disagg_sim.units import GB, US
from lab.calibration.kernels.robust import Array, Parameter, by_fit, origin, solved

PER_PICK, PER_RANK, WITH_OWN = "T*k*d*b*(1-1/n)", "T*d*b*(n-1)*(1-(1-1/n)^k)", "T*d*b*n*(1-(1-1/n)^k)"
PER_PICK_NODES, PER_NODE = "T*k*d*b*(1-1/nodes)", "T*d*b*(nodes-1)*(1-(1-1/nodes)^k)"
PREPARE = "T (seconds per token)"
#: What a low-latency kernel sends: every pick on its own. All others send one copy to a rank (or node).
_PICKS = ("deepep_ll", "trtllm_deepep_ll", "deepep_v2_generation")
#: Two-sided NVLink exchange: a rank's own tokens pass through its buffers, too; its low-precision combine sends picks.
_TWO_SIDED = "NVLinkTwoSided"
_NVLINK = (_TWO_SIDED, "NVLinkOneSided")
#: Types of the tables -> bytes of an element sent, scales included. [B]
_BYTES = {"bfloat16": 2.0, "fp8": 1.03125, "nvfp4": 0.5625, "fp4": 0.5625, "unlabelled": 1.03125, "default": 2.0}
#: Combine returns 16 bit, in low precision 8 bit with scales. [B]
_COMBINE_BYTES = {"combine": 2.0, "combine_low_precision": 1.03125}
#: Routing of the measurements across nodes: a token goes to at most so many of them (group-limited, as DeepSeek's). [1]
_NODE_LIMIT = 4.0
#: Multiprocessors that engines give an exchange of many tokens; ``token_bandwidth`` of a fit is that of so many. [1]
TUNED_SMS = 24

_LATENCY = Parameter("latency", 25 * US, 0.5 * US, 1000 * US)
_STEP = Parameter("step", US, 0.001 * US, 100 * US)
_SHARE = Parameter("e_bandwidth", 0.5, 0.01, 2.0)
_PER_TOKEN = Parameter("seconds_per_token", 5e-3 * US, 1e-5 * US, 0.1 * US)
_TOKEN_BANDWIDTH = Parameter("token_bandwidth", 40 * GB, GB, 2000 * GB)


def fit_alltoall(rows: pd.DataFrame, system: SystemSpec) -> list[AllToAllFit]:
    """One fit a framework, backend, phase and kind of link of a moe_alltoall table with ``latency`` [s]."""
    rows = rows[rows["dtype"].isin(list(_BYTES)) | (rows["phase"] != "dispatch")]  # others send bytes that nobody knows
    words = _words(rows, system)
    fits: list[AllToAllFit] = []
    for (_, backend, link), together in rows.groupby([words[name] for name in ("engine", "backend", "link")]):
        fits += _fit({str(phase): table for phase, table in together.groupby("phase")}, system, str(backend), str(link))
    return fits


def predict_alltoall(rows: pd.DataFrame, system: SystemSpec, fits: Sequence[AllToAllFit]) -> Array:
    """Time of each row of a moe_alltoall table by the fit of its backend, phase and link, NaN where none is. [s]"""
    return by_fit(rows, fits, _words(rows, system), lambda table, fit: _times(table, fit, system))


def _words(rows: pd.DataFrame, system: SystemSpec) -> dict[str, Any]:
    """What tells fits apart, of each row; its backend is the kernel where the table names one, else the library's."""
    backend = rows["comm_backend"].where(rows["kernel_source"] == "deepep", rows["kernel_source"])
    link = np.where(rows["ep_size"] > system.nvlink_domain, "nic", "nvlink")
    return {"engine": rows["framework"], "backend": backend, "phase": rows["phase"], "link": link}


def _volume(backend: str, phase: str, link: str) -> str:
    if phase == "prepare":
        return PREPARE
    if backend == _TWO_SIDED:
        return PER_PICK if phase == "combine_low_precision" else WITH_OWN
    per_pick = backend in _PICKS
    return (PER_PICK_NODES if per_pick else PER_NODE) if link == "nic" else (PER_PICK if per_pick else PER_RANK)


def _fit(tables: dict[str, pd.DataFrame], system: SystemSpec, backend: str, link: str) -> list[AllToAllFit]:
    """Fits of the phases of one backend on one kind of link, together."""
    every = pd.concat(list(tables.values()))
    group = "node_num" if link == "nic" else "ep_size"
    names = {_latency_of(backend, phase): _LATENCY for phase in tables}
    names |= {"step": _STEP} if every[group].min() < every[group].max() else {}
    names |= {_share_of(phase): _SHARE for phase in tables if phase != "prepare"}
    names |= {"seconds_per_token": _PER_TOKEN} if "prepare" in tables else {}
    if link == "nic" and every["sms"].min() < every["sms"].max():
        names["token_bandwidth"] = _TOKEN_BANDWIDTH

    def build(values: Array) -> list[AllToAllFit]:
        number = dict(zip(names, values.tolist(), strict=True))
        found: list[AllToAllFit] = []
        for phase, table in tables.items():
            prepares = phase == "prepare"
            versions = table.assign(version=" ".join(sorted(table["version"].unique())))
            found.append(
                AllToAllFit(
                    **origin(versions, (group, "num_tokens")),
                    parameters=0 if found else len(names),
                    backend=backend,
                    phase=phase,
                    format="default",
                    ranks=0,
                    nodes=0,
                    volume=_volume(backend, phase, link),
                    bytes_per_element=None,
                    link=link,
                    latency=number[_latency_of(backend, phase)],
                    step=number.get("step", 0.0),
                    e_bandwidth=None if prepares else number[_share_of(phase)],
                    seconds_per_token=number["seconds_per_token"] if prepares else None,
                    token_bandwidth=None if prepares else number.get("token_bandwidth"),
                )
            )
        return found

    def times(fits: list[AllToAllFit]) -> Array:
        return np.concatenate([_times(table, fit, system) for table, fit in zip(tables.values(), fits, strict=True)])

    return solved(build, times, every["latency"].to_numpy(dtype=float), list(names.values()))[1]


def _latency_of(backend: str, phase: str) -> str:
    """Name of the latency of a phase."""
    return f"latency of {phase}" if backend not in _NVLINK or _share_of(phase) == "low" else "latency"


def _share_of(phase: str) -> str:
    """Name of the share of the link that a phase reaches."""
    return "low" if phase == "combine_low_precision" else "full"


def _times(table: pd.DataFrame, fit: AllToAllFit, system: SystemSpec) -> Array:
    across = fit.link == "nic"
    tokens, hidden, top_k, group, sms = (
        table[name].to_numpy(dtype=float)
        for name in ("num_tokens", "hidden", "topk", "node_num" if across else "ep_size", "sms")
    )
    latency = fit.latency + fit.step * np.log2(group)  # shape (rows,)
    if fit.seconds_per_token is not None:
        return np.asarray(latency + tokens * fit.seconds_per_token)
    if fit.e_bandwidth is None:
        return np.asarray(latency)
    dispatched = table["dtype"].map(_BYTES).to_numpy(dtype=float)
    element = dispatched if fit.phase == "dispatch" else _COMBINE_BYTES[fit.phase]
    copies = COPIES[fit.volume](top_k, group)
    if fit.volume == PER_NODE:
        copies = np.minimum(copies, _NODE_LIMIT * (1.0 - 1.0 / group))
    link = system.nic_bandwidth if across else system.nvlink_bandwidth
    sent = tokens * hidden * element
    wire = sent * copies / (fit.e_bandwidth * link)
    if fit.token_bandwidth is not None:
        wire = np.maximum(wire, sent / (fit.token_bandwidth * sms / TUNED_SMS))
    return np.asarray(latency + wire)
