"""C5-C9 and C31: which mappings and batches lie on the frontier."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.search.grid import decode_grid
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import pareto_front
from disagg_sim.study.claims_evidence import (
    DOMAIN,
    HIGH,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    RECIPE,
    SYSTEM,
    Evidence,
    Finding,
    Floats,
    Front,
    listed,
    shared,
    throughput,
)


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's coefficient; equal values share their mean rank, and a constant has none (NaN). [1]"""
    import pandas as pd

    return float(pd.Series(x).rank().corr(pd.Series(y).rank()))


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


def c6_llama_tp(evidence: Evidence) -> Finding:
    """Decode TP of Llama-70B at both ends of the frontier."""
    tp = _front(evidence, MIDDLE).column("decode_tp_attn")
    degrees = (2, 8, 16, 32, 64)
    ttl = _ttl(evidence, MIDDLE, [Mapping(tp_attn=n, tp_ffn=n) for n in degrees], batch=1)
    times = ", ".join(f"TP{n} {1e3 * t:.2f}" for n, t in zip(degrees, ttl, strict=True))
    best = degrees[int(np.argmin(ttl))]
    note = (
        f"TTL of one request in ms: {times}; the fastest is TP{best}. Arithmetic falls with TP, the latency of two "
        "all-reduces a layer grows with it, and the profile decides where they cross"
    )
    return Finding(f"first TP {tp[0]:.0f}, last TP {tp[-1]:.0f}", bool(tp[0] <= 4 and tp[-1] >= 32), note)


def c7_expert_parallel(evidence: Evidence) -> Finding:
    """Share of R1's frontier that runs experts in parallel inside the domain."""
    front = _front(evidence, R1)
    ep, stage = front.column("decode_ep"), front.column("decode_gpus") / front.column("decode_pp")
    parallel = (ep > 1) & (stage <= DOMAIN)
    pair = [Mapping(dp_attn=32, tp_ffn=32), Mapping(dp_attn=32, ep=32)]
    tensor, expert = 1e3 * _ttl(evidence, R1, pair, batch=256)
    only = _expert_parallel_only(evidence)
    x = np.geomspace(*shared(only, front), 200)
    loss = 1 - throughput(only, x) / throughput(front, x)
    note = (
        f"EP > 1 from {_span(front.x[parallel])} and EP 1 (experts cut by TP) from {_span(front.x[~parallel])} "
        f"tokens/s/user; 256 requests on 32 GPUs: TTL {tensor:.2f} ms with expert TP, {expert:.2f} ms with EP 32, "
        "whose dispatch and combine have the higher floors where these are counted; no instance leaves the domain "
        f"({stage.max():.0f} GPUs a stage at most). Without cutting experts the frontier reaches {only.x[-1]:.0f} in "
        f"place of {front.x[-1]:.0f} tokens/s/user and lies {loss.mean():.0%} lower on average over "
        f"{LOW:.0f}-{HIGH:.0f}, at most {loss.max():.0%}"
    )
    return Finding(f"{parallel.mean():.2f} of {parallel.size} points", bool(parallel.mean() >= 0.9), note)


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


def c9_loose_batch(evidence: Evidence) -> Finding:
    """Batch of R1's instance at the throughput end."""
    front = _front(evidence, R1)
    batch, gpus = front.column("decode_batch")[0], front.column("decode_gpus")[0]
    note = f"{batch / gpus:.0f} a GPU on {gpus:.0f} GPUs, at {front.x[0]:.0f} tokens/s/user"
    return Finding(f"{batch:.0f} requests", bool(batch >= 100), note)


def c31_tensor_parallel(evidence: Evidence) -> Finding:
    """TP of disaggregated decode over co-located TP at the same interactivity, in the middle half of the range."""
    medians, notes = {}, []
    for model in (R1, MIDDLE):
        ours, theirs = evidence.both("fig06", model=model)
        low, high = shared(ours, theirs)
        x = np.geomspace(low, high, 201)[50:151]
        a, b = (front.at("decode_tp_attn", x) for front in (ours, theirs))
        medians[model] = float(np.median(a / b))
        notes.append(f"{model}: {np.mean(a > b):.2f} of the range above, {np.mean(a < b):.2f} below, equal elsewhere")
    note = f"middle half of {LOW:.0f}-{HIGH:.0f} tokens/s/user on a log axis; " + "; ".join(notes)
    return Finding(listed(medians), all(value >= 1 for value in medians.values()), note)


def _front(evidence: Evidence, model: str) -> Front:
    return evidence.front("fig06", model=model, isl=LONG_PROMPTS[0])


def _ttl(evidence: Evidence, model: str, mappings: list[Mapping], *, batch: int) -> Any:
    """TTL of some mappings at one batch. [s]"""
    isl, osl = LONG_PROMPTS
    arguments: dict[str, Any] = {"isl": isl, "osl": osl, "precision": RECIPE, "profile": evidence.profile}
    return decode_grid(model, SYSTEM, mappings, batch=batch, **arguments).latency[:, 0]


def _expert_parallel_only(evidence: Evidence) -> Front:
    """R1's frontier where decode must have EP > 1."""
    isl, osl = LONG_PROMPTS
    table = enumerate_mappings(load_model(R1), load_system(SYSTEM))
    arguments: dict[str, Any] = {"isl": isl, "osl": osl, "precision": RECIPE, "profile": evidence.profile}
    decode = decode_grid(R1, SYSTEM, table[table.ep > 1], **arguments)
    return Front(pareto_front(disaggregated(evidence.pools(R1)[0], decode), by=[]))


def _span(x: Floats) -> str:
    return f"{x.min():.0f} to {x.max():.0f}" if x.size else "nowhere"
