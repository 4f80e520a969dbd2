"""Test C18-C24: KV transfer from prefill to decode."""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_model
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.memory import kv_duplication
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import kv_rate_per_gpu
from disagg_sim.units import GB
from disagg_sim.workload.lengths import lengths
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import LONG_PROMPTS, MIDDLE, R1, Evidence, Front, largest_rise, listed
from lab.studies.claims import Told

EGRESS, INGRESS = "kv_egress_bytes_per_s_per_gpu", "kv_ingress_bytes_per_s_per_gpu"
PROMPTS = (4096, 8192, 16_384, 32_768, 65_536)  # [token]
MILLION = 1_048_576  # [token]
NOISE = 0.01  # rise of the ingress that two integer matchings may make [1]
#: max(egress, ingress) of figure 12: loose to tight, by prompt. [B/s]
FIGURE_12 = {LONG_PROMPTS[0]: (0.4 * GB, 1.2 * GB), MILLION: (1.0 * GB, 1.8 * GB)}


@TEXT.claim("C18")
def c18_egress_falls(evidence: Evidence) -> Told:
    """Egress of the best prefill pool by prompt length. [GB/s] per distinct GPU"""
    found = {model: [_best_egress(evidence, model, isl) for isl in PROMPTS] for model in (R1, MIDDLE)}
    value = "; ".join(f"{model} " + ", ".join(f"{e / GB:.3g}" for e in values) for model, values in found.items())
    return value, all(bool(np.all(np.diff(values) < 0)) for values in found.values())


@TEXT.claim("C19")
def c19_ingress_of_long_prompts(evidence: Evidence) -> Told:
    """Ingress from 64k to 1M at the same resident tokens, and its dependence on OSL."""
    change, law = {}, 0.0
    for model, mapping, batch in ((R1, Sharding(dp_attn=64, ep=64), 2048), (MIDDLE, Sharding(tp_attn=8, tp_ffn=8), 64)):
        lengths = [(65_536 * 2**k, batch >> k) for k in range(5)]
        resident = [_decode(evidence, model, mapping, isl, 2048, each) for isl, each in lengths]
        ingress = [float(kv_rate_per_gpu(grid)[0, 0]) for grid in resident]
        change[model] = max(ingress) / min(ingress) - 1
        grids = [_decode(evidence, model, mapping, 16_384, osl, batch) for osl in (2, 256, 2048)]
        fixed = [float((kv_rate_per_gpu(g) * g.latency * g.lengths.gaps)[0, 0]) for g in grids]
        law = max(law, max(fixed) / min(fixed) - 1)
    return listed(change, ".1%"), max(change.values()) < 0.25 and law < 1e-9


@TEXT.claim("C20")
def c20_ingress_falls(evidence: Evidence) -> Told:
    """Ingress of a decode GPU along R1's frontier."""
    ingress = decode_ingress(evidence.front("fig12", isl=LONG_PROMPTS[0]))
    rise = largest_rise(ingress) - 1
    value = f"{ingress[0] / GB:.3g} to {ingress[-1] / GB:.3g} GB/s per decode GPU"
    return value, rise <= 0, f"largest rise above an earlier point: {rise:.1%}"


@TEXT.authors("C20")
def ingress(evidence: Evidence) -> Told:
    """Ingress of a decode GPU along R1's frontier, but for noise of matching."""
    front = evidence.front("fig12", isl=LONG_PROMPTS[0])
    found = decode_ingress(front)
    rise = largest_rise(found) - 1
    return f"falls {found[0] / found[-1]:.0f} times, rises by {rise:.2%} at most", rise <= NOISE


@TEXT.claim("C21")
def c21_latent_cache(evidence: Evidence) -> Told:
    """Egress of Llama-70B over that of R1, best pools at 16k."""
    ratio = _best_egress(evidence, MIDDLE, LONG_PROMPTS[0]) / _best_egress(evidence, R1, LONG_PROMPTS[0])
    return f"{ratio:.2f}", 2 <= ratio <= 6


@TEXT.claim("C22")
def c22_bandwidth(evidence: Evidence) -> Told:
    """Figure 12: the larger of egress and ingress along R1's frontiers, the second without a limit on the FTL."""
    inside, values, ends = True, [], []
    for isl, sweep in zip(FIGURE_12, ("fig12", "fig12_long"), strict=True):
        front, (low, high) = evidence.front(sweep), FIGURE_12[isl]
        along = np.maximum(front.column(EGRESS), front.column(INGRESS))
        inside &= bool(along.min() >= low / 3 and along.max() <= high * 3 and along.max() < 10 * GB)
        values.append(f"{isl}: {along.min() / GB:.2f}-{along.max() / GB:.2f} GB/s")
        ends.append(f"{along[0] / GB:.2f} to {along[-1] / GB:.2f}")
    return "; ".join(values), inside, f"loose to tight end {' and '.join(ends)}"


@TEXT.claim("C23")
def c23_duplication(_evidence: Evidence) -> Told:
    """Copies of the cache over a TP group against max(1, TP/n_kv)."""
    degrees = [1, 2, 4, 8, 16, 32, 64]
    heads = {MIDDLE: 8, "qwen3_235b_a22b": 4, R1: 1}
    found = {model: [float(kv_duplication(load_model(model), float(tp))) for tp in degrees] for model in heads}
    exact = all(found[model] == [max(1.0, tp / n) for tp in degrees] for model, n in heads.items())
    spread = Sharding(tp_attn=16.0, dp_attn=4.0, pp=2.0)
    exact &= all(unique_gpus(load_model(model), spread) * found[model][4] == 16 * 4 * 2 for model in heads)
    return "; ".join(f"{model} {values}" for model, values in found.items()), exact


@TEXT.claim("C24")
def c24_conservation(evidence: Evidence) -> Told:
    """Cache sent is cache received: real-valued pairs, and the integer pairs of figure 12."""
    isl, worst = LONG_PROMPTS[0], 0.0
    for model in (R1, MIDDLE):
        for pp in (1, 4):
            at, law = evidence.setup(model), lengths(isl, 2048)
            senders = prefill_grid(at, Sharding(tp_attn=4, tp_ffn=4, pp=pp), law, batch=8, chunk_tokens=2048)
            takers = decode_grid(at, Sharding(tp_attn=2, tp_ffn=2, pp=pp), law, batch=24)
            received = float((kv_rate_per_gpu(takers) * takers.unique_gpus[:, None] / takers.request_rate)[0, 0])
            sent = (kv_rate_per_gpu(senders) * senders.unique_gpus[:, None] / senders.request_rate)[:, 0]
            worst = max(worst, float(np.max(np.abs(sent / received - 1))))
    front = evidence.front("fig12", isl=isl)
    p, r = (front.column(f"{side}_instances") * front.column(f"{side}_request_rate_per_s") for side in _SIDES)
    sent, taken = (
        front.column(f"{side}_instances") * front.column(f"{side}_unique_gpus") * front.column(flow)
        for side, flow in zip(_SIDES, (EGRESS, INGRESS), strict=True)
    )
    unscaled = float(np.max(np.abs((sent / taken) / (p / r) - 1)))
    x = front.column("request_rate_per_s")
    scaled = float(np.max(np.abs((sent * x / p) / (taken * x / r) - 1)))
    largest = max(worst, scaled, unscaled)
    return f"largest deviation {largest:.1e}", largest <= 1e-9


def decode_ingress(front: Front) -> Floats:
    """Cache that each decode GPU takes, copies counted once. [B/s]"""
    return front.column(INGRESS) * front.column("decode_unique_gpus") / front.column("decode_gpus")


_SIDES = ("prefill", "decode")


def _best_egress(evidence: Evidence, model: str, isl: int) -> float:
    """Egress of a distinct GPU of the prefill pool with most requests/s per GPU within 10 s. [B/s]"""
    grid = evidence.pool(prefill_grid, model, isl)
    usable = grid.feasible & (grid.latency <= 10.0)
    per_gpu = np.where(usable, grid.request_rate / grid.gpus[:, None], 0.0)
    return float(kv_rate_per_gpu(grid).flat[np.argmax(per_gpu)])


def _decode(evidence: Evidence, model: str, mapping: Sharding, isl: int, osl: int, batch: int) -> PhaseGrid:
    return decode_grid(evidence.setup(model), mapping, lengths(isl, osl), batch=batch, allow_long_context=True)
