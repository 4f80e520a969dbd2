"""Test C25-C27: piggybacked prefill, and its price for latent attention."""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.facts.layers import MlaAttention
from disagg_sim.facts.load import load_model, load_system
from disagg_sim.physics.blocks.mla import Mla, MlaDims, mla_work
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.gains import COLOCATED, gain
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import pareto_front
from disagg_sim.workload.lengths import lengths
from lab.studies.beyond_the_buzz import TEXT
from lab.studies.beyond_the_buzz.evidence import (
    BF16_ATTENTION,
    HIGH,
    LONG_PROMPTS,
    LOW,
    MIDDLE,
    R1,
    SYSTEM,
    Evidence,
    Front,
    listed,
    shared,
    third,
)
from lab.studies.claims import Finding

MIXED = "fig06_every_step_mixed"
FIGURE_8 = ((16_384, 2048), (2048, 16_384))


@TEXT.claim("C25")
def c25_piggyback(evidence: Evidence) -> Finding:
    """Figure 6: every step mixed, over the best co-located mode."""
    latent, base = evidence.front(MIXED, modes=("piggyback",), model=R1, mla_form="naive"), _base(evidence, R1)
    grouped, other = evidence.front(MIXED, modes=("piggyback",), model=MIDDLE), _base(evidence, MIDDLE)
    latent_range = shared(latent, base)
    middle = _ratio(latent, base, third(*latent_range, 1))
    low, high = shared(grouped, other)
    loose = np.concatenate([_ratio(grouped, other, third(low, high, part)) for part in (0, 1)])
    tight = _ratio(grouped, other, third(low, high, 2))
    share = _projected_again(latent, float(np.sqrt(np.prod(latent_range))))
    free = _ratio(evidence.front("fig06", modes=("piggyback",), model=R1), base, third(*latent_range, 1))
    x = np.geomspace(low, high, 300)
    below = x[_ratio(grouped, other, x) <= 0.9]
    end = f"below 0.9 from {below[0]:.0f} on" if below.size else "nowhere below 0.9"
    cost = [
        1e6 * _token_cost(evidence.front(sweep, modes=("piggyback",), model=MIDDLE), high) for sweep in (MIXED, "fig06")
    ]
    note = (
        f"chunks of the balance, past projected again: {share:.2f} of R1's attention FLOP in the middle; {R1} on "
        f"{latent_range[0]:.0f}-{latent_range[1]:.0f}, {MIDDLE} on {low:.0f}-{high:.0f} tokens/s/user; {MIDDLE} {end}, "
        f"down to {tight.min():.2f} in the tight third, where a "
        f"prompt token costs {cost[0]:.0f} GPU-us in place of {cost[1]:.0f} in the best mix; reach in tokens/s/user: "
        f"{R1} {latent.x[-1]:.0f} against {base.x[-1]:.0f}, {MIDDLE} {grouped.x[-1]:.0f} against {other.x[-1]:.0f}. "
        f"With the best mix in place of every step: {R1} {free.min():.2f} and more"
    )
    value = f"{R1} down to {middle.min():.2f} in the middle third, {MIDDLE} down to {loose.min():.2f} in the loose two"
    return Finding(value, bool(middle.min() < 0.9 and loose.min() > 0.9), note)


@TEXT.claim("C26")
def c26_cached(evidence: Evidence) -> Finding:
    """Figure 6: every step mixed with the projected past kept in memory."""
    naive, cached = (
        evidence.front(MIXED, modes=("piggyback",), model=R1, mla_form=form) for form in ("naive", "cached")
    )
    base = _base(evidence, R1)
    x = third(*shared(naive, cached, base), 1)
    before, after = _ratio(naive, base, x), _ratio(cached, base, x)
    short = after <= 0.95
    filled = cached.at("decode_memory_bytes", x) / evidence.decode_pool(R1).memory_limit
    middle = float(np.sqrt(x[0] * x[-1]))
    best = evidence.front("fig06", modes=("piggyback",), model=R1)
    plain = _mixed_with_bf16(evidence, x)
    traffic, chunk = _read_again(cached, middle)
    note = (
        f"the past is projected once, where projecting it again was {_projected_again(naive, middle):.2f} of the "
        f"FLOP of attention; mean over the middle third of {LOW:.0f}-{HIGH:.0f}: {before.mean():.2f} naive, "
        f"{after.mean():.2f} cached; memory filled to {filled.min():.2f}-{filled.max():.2f} of the limit. At "
        f"{middle:.0f} tokens/s/user a rank takes {chunk:.0f} prompt tokens a step and reads the "
        f"{_dims().up_projected:.0f} expanded values of each earlier token again: {traffic * 1e3:.1f} "
        f"ms at the peak of HBM, of a TTL of {1e3 / middle:.1f} ms. A prompt "
        f"token costs {_token_cost(cached, middle) * 1e6:.0f} GPU-us, and {_token_cost(best, middle) * 1e6:.0f} in the "
        f"best mix, whose chunks are {_rank_chunk(best, middle):.0f}; mean with bf16 attention: {plain}"
    )
    holds = bool(np.all(filled[short] >= 0.95))
    value = f"naive {before.min():.2f}-{before.max():.2f}, cached {after.min():.2f}-{after.max():.2f}"
    return Finding(value, holds, note)


@TEXT.claim("C27")
def c27_decode_heavy(evidence: Evidence) -> Finding:
    """Figure 8: every step mixed over no piggyback, by traffic and along the curve."""
    areas, falls, mixes, largest = {}, {}, {}, {}
    for isl, osl in FIGURE_8:
        plain = evidence.front("fig08", modes=("colocated",), isl=isl, osl=osl)
        mixed = evidence.front("fig08_every_step_mixed", modes=("piggyback",), isl=isl, osl=osl)
        best = evidence.front("fig08", modes=("piggyback",), isl=isl, osl=osl)
        every = gain(mixed.curve, plain.curve, low=LOW, high=HIGH)
        areas[f"{isl}/{osl}"], largest[f"{isl}/{osl}"] = every.area_ratio, every.largest
        mixes[f"{isl}/{osl}"] = gain(best.curve, plain.curve, low=LOW, high=HIGH).area_ratio
        low, high = shared(plain)
        falls[f"{isl}/{osl}"] = tuple(float(_ratio(mixed, plain, third(low, high, part)).mean()) for part in range(3))
    prefill, decode = areas.values()
    falling = all(loose >= middle >= tight for loose, middle, tight in falls.values())
    along = "; ".join(f"{name} {', '.join(f'{value:.2f}' for value in parts)}" for name, parts in falls.items())
    pays = "pays somewhere" if max(largest.values()) > 1 else "pays nowhere, below 1 everywhere"
    note = (
        f"every step mixed {pays}: largest G {listed(largest, '.3f')}; "
        f"area ratios on a log axis over {LOW:.0f}-{HIGH:.0f} tokens/s/user; means of its three thirds, loose to "
        f"tight: {along}; with the best mix, which contains the plain mode up to its chunks: {listed(mixes)}"
    )
    return Finding(listed(areas), decode > prefill and falling, note)


def _base(evidence: Evidence, model: str) -> Front:
    return evidence.front("fig06", modes=COLOCATED, model=model)


def _ratio(front: Front, base: Front, x: Floats) -> Floats:
    return front.throughput(x) / base.throughput(x)


def _rank_chunk(front: Front, x: float) -> float:
    """Prompt tokens of one attention rank in a mixed step. [token]"""
    return float(front.at("mixed_chunk_tokens", x) / front.at("decode_dp_attn", x))


def _dims() -> MlaDims:
    """R1's latent attention on one GPU that holds all heads, in fp8."""
    attention = load_model(R1).layers[0].attention
    assert isinstance(attention, MlaAttention)
    return Mla(attention).dims(1, 1.0)


def _token_cost(front: Front, x: float) -> float:
    """GPU time that a prompt token adds to a mixed step: (T_mix - T_d)*G/c. [s]"""
    step = front.at("decode_batch", x) / (front.at("decode_request_rate_per_s", x) * (LONG_PROMPTS[1] - 1))
    added = front.at("ttl_largest_gap_s", x) - step
    return float(added * front.at("decode_gpus", x) / front.at("mixed_chunk_tokens", x))


def _projected_again(front: Front, x: float) -> float:
    """Share of projecting the past again in the FLOP of naive attention, chunks as at interactivity ``x``. [1]"""
    whole, new = LONG_PROMPTS[0], min(max(_rank_chunk(front, x), 1.0), LONG_PROMPTS[0])
    work = (mla_work(form, _dims(), sequences=1, new=new, past=(whole - new) / 2) for form in ("naive", "cached"))
    naive, cached = (each.flops for each in work)
    return float(1 - cached / naive)


def _read_again(front: Front, x: float) -> tuple[float, float]:
    """Time to read the expanded past of a chunk of one rank at the peak of HBM [s], and the chunk [token]."""
    new = _rank_chunk(front, x)
    prompts = max(np.ceil(new / LONG_PROMPTS[0]), 1.0)
    past = max(LONG_PROMPTS[0] - new / prompts, 0.0) / 2
    heads = _dims().up_projected / float(front.at("decode_tp_attn", x))
    layers = len(load_model(R1).layers) / float(front.at("decode_pp", x))
    return float(prompts * past * heads * layers / load_system(SYSTEM).hbm_bandwidth), new


def _mixed_with_bf16(evidence: Evidence, x: Floats) -> str:
    """Naive and cached over the best co-located mode without fp8 attention arithmetic."""
    import pandas as pd

    at, table = evidence.setup(R1, BF16_ATTENTION), evidence.mappings(R1, BF16_ATTENTION)
    both = (serve(at, table, lengths(*LONG_PROMPTS)) for serve in (colocated, piggyback))
    base = Front(pareto_front(pd.concat(both), by=[]))
    means = {
        form: float(
            _ratio(
                evidence.front(f"bf16_attention_{MIXED}", modes=("piggyback",), model=R1, mla_form=form), base, x
            ).mean()
        )
        for form in ("naive", "cached")
    }
    return listed(means, ".2f")
