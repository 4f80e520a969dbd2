"""Judge the claims of "Beyond the Buzz" in the words of its text: heights of curves, even experts, a free chunk.

The paper has a simulator and no engine, so that claims are judged by profile; experts are even in it. Acceptances
were set before these runs; where they are not this project's own, ``inferred`` says what they read. Sections are those
of arXiv 2506.05508; values of figures were read from them, to a few percent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import lengths
from lab.studies.beyond_the_buzz import TEXT, claims_gain, claims_shape, claims_transfer
from lab.studies.beyond_the_buzz.evidence import (
    LONG_PROMPTS,
    MIDDLE,
    R1,
    Evidence,
    Front,
    largest_rise,
    listed,
    shared,
    third,
)
from lab.studies.beyond_the_buzz.frontiers import depth_row
from lab.studies.claims import Finding, Told, Without

#: Chunks of figure 5, of which the paper names none: the best keeps the rate within a tenth. [token]
CHUNKS = (512, 1024, 2048, 4096)
#: "in the hundreds". [request]
HUNDREDS = (100, 1000)
#: Rise of the ingress that two integer matchings may make. [1]
NOISE = 0.01
POINTS = 201  # of interactivity, on a log axis [1]


@TEXT.authors("C4")
def heights(evidence: Evidence) -> Told:
    """Figure 6: where whole curves lie furthest apart, relative to the peak, on its linear axis."""
    said, holds = [], True
    for model in (R1, MIDDLE):
        ours, theirs = evidence.both("fig06", model=model, isl=LONG_PROMPTS[0])
        x = np.linspace(max(ours.x[0], theirs.x[0]), min(ours.x[-1], theirs.x[-1]), POINTS)
        apart = (ours.throughput(x) - theirs.throughput(x)) / float(ours.throughput(x).max())
        best = int(apart.argmax())
        holds = holds and POINTS // 10 < best < POINTS - 1 - POINTS // 10
        said.append(
            f"{model} {apart[best]:.2f} at {x[best]:.0f} of {x[0]:.0f} to {x[-1]:.0f} tokens/s/user, {apart[0]:.2f} "
            f"and {apart[-1]:.2f} at the ends"
        )
    return f"difference over the peak: {'; '.join(said)}", holds


@TEXT.authors("C7")
def expert_parallel(evidence: Evidence) -> Finding:
    """Share of R1's frontier that runs experts in parallel inside the domain, even and picked at random."""

    def share(front: Front) -> tuple[str, bool]:
        parallel = float(claims_shape.in_parallel(front).mean())
        return f"{parallel:.2f} of the points", parallel >= 0.9

    at = evidence.setup(R1)
    even = at.changed(profile=replace(at.profile, random_routing=False, expert_skew=0.0, rank_skew=0.0))
    table, work = evidence.mappings(R1), lengths(*LONG_PROMPTS)
    prefill, decode = (score(even, table, work, allow_long_context=True) for score in (prefill_grid, decode_grid))
    front = Front(match_pools(prefill, decode, Rules(keep="frontier")))
    usual = evidence.front("fig06", model=R1, isl=LONG_PROMPTS[0])
    return Finding(*share(front), without=Without("experts as the profile has them", *share(usual)))


@TEXT.authors("C9")
def loose_batch(evidence: Evidence) -> Finding:
    """Batch of R1 at the throughput end, a replica of the model and one of its attention."""
    front = evidence.front("fig06", model=R1, isl=LONG_PROMPTS[0])
    batch, ranks = front.column("decode_batch")[0], front.column("decode_dp_attn")[0]

    def hundreds(requests: float) -> tuple[str, bool]:
        return f"{requests:.0f} requests", HUNDREDS[0] <= requests < HUNDREDS[1]

    return Finding(
        *hundreds(batch),
        f"{ranks:.0f} attention ranks",
        Without("a replica is that of attention, an attention rank", *hundreds(batch / ranks)),
    )


@TEXT.authors("C10")
def pipelined(evidence: Evidence) -> Told:
    """Figure 5: FTL and rate from one to 32 stages by chunk."""
    rows = {}
    for chunk in CHUNKS:
        one, many = (depth_row(evidence.setup(R1), depth, chunk_tokens=chunk) for depth in claims_shape.DEPTHS)
        times = one["ftl_s"], many["ftl_s"]
        rows[chunk] = times[0] / times[1], many["request_rate_per_s"] / one["request_rate_per_s"], times
    kept = {chunk: each for chunk, each in rows.items() if each[1] >= 0.9}
    said = ", ".join(f"{chunk} {factor:.1f} at {rate:.3f}" for chunk, (factor, rate, _) in rows.items())
    if not kept:
        return f"factor of the FTL at the rate, by chunk: {said}", False
    factor, _, (first, last) = kept[max(kept, key=lambda chunk: kept[chunk][0])]
    holds = 20 <= factor <= 32 and 60 <= first <= 140 and 2 <= last <= 5
    return f"factor of the FTL at the rate, by chunk: {said}; {first:.1f} s to {last:.2f} s", holds


@TEXT.authors("C20")
def ingress(evidence: Evidence) -> Told:
    """Ingress of a decode GPU along R1's frontier, but for noise of matching."""
    front = evidence.front("fig12", isl=LONG_PROMPTS[0])
    found = claims_transfer.decode_ingress(front)
    rise = largest_rise(found) - 1
    return f"falls {found[0] / found[-1]:.0f} times, rises by {rise:.2%} at most", rise <= NOISE


@TEXT.authors("C26")
def mitigated(evidence: Evidence) -> Told:
    """Every step mixed with the projected past kept in memory, over the same without."""
    naive, cached = (
        evidence.front(claims_gain.MIXED, modes=("piggyback",), model=R1, mla_form=form) for form in ("naive", "cached")
    )
    x = third(*shared(naive, cached), 1)
    ratio = cached.throughput(x) / naive.throughput(x)
    return f"{ratio.min():.2f} to {ratio.max():.2f} times over the middle third", bool(ratio.min() > 1)


@TEXT.authors("C31")
def higher_tp(evidence: Evidence) -> Told:
    """TP of disaggregated decode over co-located TP, in the middle half of the range."""
    medians = claims_shape.median_tp(evidence)
    return f"median ratio {listed(medians)}", min(medians.values()) > 1


@TEXT.authors("C32")
def in_tensors(evidence: Evidence) -> Finding:
    """FTL of C32 by stages, and with TP in their place."""
    ratios = {f"TP {n}": claims_shape.ftl_ratio(evidence, Sharding(tp_attn=n, tp_ffn=n)) for n in (2, 4, 8)}
    second = f"FTL {listed(ratios, '.2f')}", all(map(claims_shape.near_parameters, ratios.values()))
    found = claims_shape.c32_active_parameters(evidence)
    return found._replace(without=Without("TP 2, 4 and 8 in place of stages", *second))
