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
from lab.studies.beyond_the_buzz.evidence import (
    BF16_ATTENTION,
    LONG_PROMPTS,
    MIDDLE,
    R1,
    RECIPE,
    Evidence,
    Front,
    largest_rise,
    listed,
)
from lab.studies.claims import Finding

EGRESS, INGRESS = "kv_egress_bytes_per_s_per_gpu", "kv_ingress_bytes_per_s_per_gpu"
PROMPTS = (4096, 8192, 16_384, 32_768, 65_536)  # [token]
MILLION = 1_048_576  # [token]
NO_CUT_OFF = 1e6  # a first-token limit that nothing reaches [s]
#: max(egress, ingress) of figure 12: loose to tight, by prompt. [B/s]
FIGURE_12 = {LONG_PROMPTS[0]: (0.4 * GB, 1.2 * GB), MILLION: (1.0 * GB, 1.8 * GB)}
NIC = 50 * GB  # what one NIC carries [B/s]


@TEXT.claim("C18")
def c18_egress_falls(evidence: Evidence) -> Finding:
    """Egress of the best prefill pool by prompt length."""
    found = {model: [_best_egress(evidence, model, isl) for isl in PROMPTS] for model in (R1, MIDDLE)}
    value = "; ".join(f"{model} " + ", ".join(f"{e / GB:.3g}" for e in values) for model, values in found.items())
    falls = all(np.all(np.diff(values) < 0) for values in found.values())
    work = {model: values[0] / values[-1] for model, values in found.items()}
    note = f"GB/s per distinct GPU at {PROMPTS} prompt tokens; factor from the first to the last: {listed(work)}"
    return Finding(value, bool(falls), note)


@TEXT.claim("C19")
def c19_ingress_of_long_prompts(evidence: Evidence) -> Finding:
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
    note = (
        f"largest deviation from 1/(OSL-1) at fixed TTL and batch: {law:.1e}; the batch halves as the prompt doubles, "
        "so the cache that a step reads stays and a weight-bound remainder makes the change"
    )
    return Finding(listed(change, ".1%"), max(change.values()) < 0.25 and law < 1e-9, note)


@TEXT.claim("C20")
def c20_ingress_falls(evidence: Evidence) -> Finding:
    """Ingress of a decode GPU along R1's frontier."""
    front = evidence.front("fig12", isl=LONG_PROMPTS[0])
    distinct, ingress = front.column(INGRESS), decode_ingress(front)
    rise = largest_rise(ingress) - 1
    note = (
        f"largest rise above an earlier point: {rise:.1%}; per distinct GPU it falls to "
        f"{distinct[-1] / distinct[0]:.2g} of the loose end, as TP copies the latent cache"
    )
    value = f"{ingress[0] / GB:.3g} to {ingress[-1] / GB:.3g} GB/s per decode GPU"
    return Finding(value, rise <= 0, note)


@TEXT.claim("C21")
def c21_latent_cache(evidence: Evidence) -> Finding:
    """Egress of Llama-70B over that of R1, best pools at 16k."""
    isl = LONG_PROMPTS[0]
    found = {model: _best_egress(evidence, model, isl) for model in (MIDDLE, R1)}
    ratio = found[MIDDLE] / found[R1]
    cache = {m: load_model(m).kv_elements_per_token() for m in found}
    plain = _best_egress(evidence, MIDDLE, isl, BF16_ATTENTION) / _best_egress(evidence, R1, isl, BF16_ATTENTION)
    note = (
        f"{found[MIDDLE] / GB:.3g} and {found[R1] / GB:.3g} GB/s; the caches differ by "
        f"{cache[MIDDLE] / cache[R1]:.2f}, the prefill rates by the rest; bf16 attention: {plain:.2f}"
    )
    return Finding(f"{ratio:.2f}", 2 <= ratio <= 6, note)


@TEXT.claim("C22")
def c22_bandwidth(evidence: Evidence) -> Finding:
    """Figure 12: the larger of egress and ingress along R1's frontiers."""
    fronts = {LONG_PROMPTS[0]: evidence.front("fig12"), MILLION: evidence.front("fig12_long")}
    inside, values = True, []
    for isl, front in fronts.items():
        along, (low, high) = _larger(front), FIGURE_12[isl]
        inside &= bool(along.min() >= low / 3 and along.max() <= high * 3 and along.max() < 10 * GB)
        values.append(f"{isl}: {_span(along)} GB/s")
    pairs = {
        "bf16 attention": [evidence.front(f"bf16_attention_{sweep}") for sweep in ("fig12", "fig12_long")],
        "MLA chunks naive": [
            evidence.naive_pools(LONG_PROMPTS[0], ftl_limit=10.0),
            evidence.naive_pools(MILLION, ftl_limit=NO_CUT_OFF),
        ],
    }
    switched = [f"{name} {' and '.join(_span(_larger(front)) for front in pair)}" for name, pair in pairs.items()]
    highest = max(float(_larger(front).max()) for front in fronts.values())
    note = (
        f"per distinct GPU, loose to tight end {_ends(fronts[LONG_PROMPTS[0]])} and {_ends(fronts[MILLION])}; the "
        f"second without a limit on the first token (up to {fronts[MILLION].column('ftl_s').max():.0f} s); a NIC of 50 "
        "GB/s is "
        f"{NIC / highest:.0f} times the largest; " + "; ".join(switched)
    )
    return Finding("; ".join(values), inside, note)


@TEXT.claim("C23")
def c23_duplication(evidence: Evidence) -> Finding:  # noqa: ARG001 - counts know no profile
    """Copies of the cache over a TP group against max(1, TP/n_kv)."""
    degrees = [1, 2, 4, 8, 16, 32, 64]
    heads = {MIDDLE: 8, "qwen3_235b_a22b": 4, R1: 1}
    found = {model: [float(kv_duplication(load_model(model), float(tp))) for tp in degrees] for model in heads}
    exact = all(found[model] == [max(1.0, tp / n) for tp in degrees] for model, n in heads.items())
    spread = Sharding(tp_attn=16.0, dp_attn=4.0, pp=2.0)
    unique = {model: float(unique_gpus(load_model(model), spread)) for model in heads}
    exact &= all(unique[model] * found[model][4] == 16 * 4 * 2 for model in heads)
    note = f"TP {degrees}; distinct GPUs of TP16 x DP4 x PP2: {listed(unique, '.0f')}; a count, alike in every profile"
    return Finding("; ".join(f"{model} {values}" for model, values in found.items()), exact, note)


@TEXT.claim("C24")
def c24_conservation(evidence: Evidence) -> Finding:
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
    note = (
        f"real-valued counts at pp 1 and 4: {worst:.1e}; {len(p)} integer pairs scaled to the matched rate: "
        f"{scaled:.1e}; unscaled against n_p*p/(n_d*r): {unscaled:.1e}, which itself is up to "
        f"{np.max(np.abs(p / r - 1)):.2f} from 1"
    )
    largest = max(worst, scaled, unscaled)
    return Finding(f"largest deviation {largest:.1e}", largest <= 1e-9, note)


def decode_ingress(front: Front) -> Floats:
    """Cache that each decode GPU takes, copies counted once. [B/s]"""
    return front.column(INGRESS) * front.column("decode_unique_gpus") / front.column("decode_gpus")


_SIDES = ("prefill", "decode")


def _best_egress(evidence: Evidence, model: str, isl: int, precision: str = RECIPE) -> float:
    """Egress of a distinct GPU of the prefill pool with most requests/s per GPU within 10 s. [B/s]"""
    grid = evidence.prefill_pool(model, isl=isl, precision=precision)
    usable = grid.feasible & (grid.latency <= 10.0)
    per_gpu = np.where(usable, grid.request_rate / grid.gpus[:, None], 0.0)
    return float(kv_rate_per_gpu(grid).flat[np.argmax(per_gpu)])


def _decode(evidence: Evidence, model: str, mapping: Sharding, isl: int, osl: int, batch: int) -> PhaseGrid:
    return decode_grid(evidence.setup(model), mapping, lengths(isl, osl), batch=batch, allow_long_context=True)


def _larger(front: Front) -> Floats:
    return np.maximum(front.column(EGRESS), front.column(INGRESS))


def _span(flow: Floats) -> str:
    return f"{flow.min() / GB:.2f}-{flow.max() / GB:.2f}"


def _ends(front: Front) -> str:
    flow = _larger(front)
    return f"{flow[0] / GB:.2f} to {flow[-1] / GB:.2f}"
