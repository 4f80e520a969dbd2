"""Test C5-C9 and C31: the mappings and batches on the frontier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.search.grid import decode_grid
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import lengths
from lab.calibration.kernels.residuals import rank_correlation
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    DOMAIN,
    HIGH,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    Evidence,
    Front,
    listed,
    shared,
)
from lab.studies.claims import Finding

WIDE_SLICES, MEASURED_SLICES = 16, 32  # TP of R1's experts: slices of 128 and 64 of 2048 columns [1]
PLACES = (20.0, 50.0, 75.0, 80.0, 85.0, 90.0, 95.0, 100.0)  # where C7 compares frontiers [token/s]


@TEXT.claim("C5")
def c5_batch_and_tp(evidence: Evidence) -> Finding:
    """Figure 6: the batch per GPU falls and TP rises along the frontier."""
    found: dict[str, float] = {}
    holds = True
    for model in (R1, MIDDLE):
        front = _front(evidence, model)
        batch = rank_correlation(front.x, front.column("decode_batch") / front.column("decode_gpus"))
        tp = rank_correlation(front.x, front.column("decode_tp_attn"))
        found |= {f"{model} batch per GPU": batch, f"{model} TP": tp}
        holds &= batch < -0.8 and tp > 0.5
    spans = "; ".join(f"{model} {_front(evidence, model).span}" for model in (R1, MIDDLE))
    note = f"rank correlations with interactivity over the whole frontiers: {spans}"
    return Finding(listed(found, ".2f"), holds, note)


@TEXT.claim("C6")
def c6_llama_tp(evidence: Evidence) -> Finding:
    """Decode TP of Llama-70B at both ends of the frontier."""
    tp = _front(evidence, MIDDLE).column("decode_tp_attn")
    degrees = (2, 8, 16, 32, 64)
    mappings = [Sharding(tp_attn=n, tp_ffn=n) for n in degrees]
    ttl = decode_grid(evidence.setup(MIDDLE), mappings, lengths(*LONG_PROMPTS), batch=1).latency[:, 0]
    times = ", ".join(f"TP{n} {1e3 * t:.2f}" for n, t in zip(degrees, ttl, strict=True))
    best = degrees[int(np.argmin(ttl))]
    note = (
        f"TTL of one request in ms: {times}; the fastest is TP{best}. Arithmetic falls with TP, the latency of two "
        "all-reduces a layer grows with it, and the profile decides where they cross"
    )
    return Finding(f"first TP {tp[0]:.0f}, last TP {tp[-1]:.0f}", bool(tp[0] <= 4 and tp[-1] >= 32), note)


@TEXT.claim("C7")
def c7_expert_parallel(evidence: Evidence) -> Finding:
    """Share of R1's frontier that runs experts in parallel inside the domain."""
    front = _front(evidence, R1)
    ep, stage = front.column("decode_ep"), front.column("decode_gpus") / front.column("decode_pp")
    parallel = (ep > 1) & (stage <= DOMAIN)
    low, high = shared(front)
    inside = (front.x >= low) & (front.x <= high)
    narrow = inside & (front.column("decode_tp_ffn") > WIDE_SLICES)
    beyond = inside & (front.column("decode_tp_ffn") > MEASURED_SLICES)
    only = _restricted(evidence, lambda table: table.ep > 1)
    wide = _restricted(evidence, lambda table: table.tp_ffn <= WIDE_SLICES)
    losses = 1 - only.throughput(PLACES) / front.throughput(PLACES)
    by_place = ", ".join(f"{loss:.0%} at {x:.0f}" for loss, x in zip(losses, PLACES, strict=True))
    capped = [float(each.throughput(HIGH)) for each in (front, wide)]
    note = (
        f"EP > 1 from {_span(front.x[parallel])} and EP 1 (experts cut by TP) from {_span(front.x[~parallel])} "
        f"tokens/s/user; no instance leaves the domain ({stage.max():.0f} GPUs a stage at most). With EP > 1 alone the "
        f"frontier lies lower by {by_place} tokens/s/user. Of {inside.sum()} points in {LOW:.0f}-{HIGH:.0f}, "
        f"{narrow.sum()} ({_span(front.x[narrow])}) cut experts by TP 32 or 64"
    )
    if narrow.any():
        note += (
            f", and {beyond.sum()} ({_span(front.x[beyond])}) by 64, into slices of 32 columns: one fit scores expert "
            f"TP at any width, and NVFP4 kernels were measured down to 64 columns (TP {MEASURED_SLICES}), so these are "
            f"extrapolated. With TP of experts up to {WIDE_SLICES}, {HIGH:.0f} tokens/s/user gives {capped[1]:.0f} in "
            f"place of {capped[0]:.0f} tokens/s/GPU; the tight ends of C12 and C14 rest on the same points"
        )
    return Finding(f"{parallel.mean():.2f} of {parallel.size} points", bool(parallel.mean() >= 0.9), note)


@TEXT.claim("C8")
def c8_attention_modes(evidence: Evidence) -> Finding:
    """R1's attention by its TP degree along the frontier."""
    front = _front(evidence, R1)
    tp = front.column("decode_tp_attn")
    below = float(np.mean(tp < np.maximum.accumulate(tp)))
    met = list(dict.fromkeys(tp.astype(int).tolist()))
    note = (
        f"degrees in order of first use: {met}; points below an earlier degree: {below:.2f}; hybrids (TP and DP of "
        f"attention above 1): {np.mean((tp > 1) & (front.column('decode_dp_attn') > 1)):.2f} of the points"
    )
    holds = below <= 0.1 and tp[0] <= 2 and tp[-1] >= 4
    return Finding(f"starts at TP {tp[0]:.0f}, ends at TP {tp[-1]:.0f}, falls at {below:.2f}", bool(holds), note)


@TEXT.claim("C9")
def c9_loose_batch(evidence: Evidence) -> Finding:
    """Batch of R1's instance at the throughput end."""
    front = _front(evidence, R1)
    batch, gpus = front.column("decode_batch")[0], front.column("decode_gpus")[0]
    note = f"{batch / gpus:.0f} a GPU on {gpus:.0f} GPUs, at {front.x[0]:.0f} tokens/s/user"
    return Finding(f"{batch:.0f} requests", bool(batch >= 100), note)


@TEXT.claim("C31")
def c31_tensor_parallel(evidence: Evidence) -> Finding:
    """TP of disaggregated decode over co-located TP at the same interactivity, in the middle half of the range."""
    medians, notes = {}, []
    for model in (R1, MIDDLE):
        a, b = both_tp(evidence, model)
        medians[model] = float(np.median(a / b))
        notes.append(f"{model}: {np.mean(a > b):.2f} of the range above, {np.mean(a < b):.2f} below, equal elsewhere")
    note = f"middle half of {LOW:.0f}-{HIGH:.0f} tokens/s/user on a log axis; " + "; ".join(notes)
    return Finding(listed(medians), all(value >= 1 for value in medians.values()), note)


def both_tp(evidence: Evidence, model: str) -> tuple[Floats, Floats]:
    """TP of disaggregated decode and of co-located instances over the middle half of the range of both. [1]"""
    fronts = evidence.both("fig06", model=model)
    x = np.geomspace(*shared(*fronts), 201)[50:151]
    ours, theirs = (front.at("decode_tp_attn", x) for front in fronts)
    return ours, theirs


def _front(evidence: Evidence, model: str) -> Front:
    return evidence.front("fig06", model=model, isl=LONG_PROMPTS[0])


def _restricted(evidence: Evidence, keep: Callable[[Sharding], Any]) -> Front:
    """R1's frontier where decode may use some mappings alone."""
    table = evidence.mappings(R1)
    decode = decode_grid(evidence.setup(R1), table[keep(table)], lengths(*LONG_PROMPTS))
    return Front(match_pools(evidence.prefill_pool(R1), decode, Rules(keep="frontier")))


def _span(x: Floats) -> str:
    return f"{x.min():.0f} to {x.max():.0f}" if x.size else "nowhere"
