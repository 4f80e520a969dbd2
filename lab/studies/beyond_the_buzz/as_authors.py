"""Judge the claims of "Beyond the Buzz" in the words of its text: heights of curves, even experts, a free chunk.

The paper has a simulator and no engine, so that claims are judged by profile; experts are even in it. Acceptances
were set before these runs; where they are not this project's own, ``inferred`` says what they read. Sections are those
of arXiv 2506.05508; values of figures were read from them, to a few percent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.workload.lengths import lengths
from lab.studies.as_authors import AsAuthors
from lab.studies.beyond_the_buzz import claims_gain, claims_limits, claims_ratio, claims_sharing, claims_transfer
from lab.studies.beyond_the_buzz.claims import CLAIMS as OURS
from lab.studies.beyond_the_buzz.evidence import (
    DOMAIN,
    LONG_PROMPTS,
    MIDDLE,
    R1,
    Evidence,
    Front,
    listed,
    shared,
    third,
    throughput,
)
from lab.studies.claims import Finding, Without

#: Chunks of figure 5, of which the paper names none: the best keeps the rate within a tenth. [token]
CHUNKS = (512, 1024, 2048, 4096)
#: "in the hundreds". [request]
HUNDREDS = (100, 1000)
#: Rise of the ingress that two integer matchings may make. [1]
NOISE = 0.01
POINTS = 201  # of interactivity, on a log axis [1]


def heights(evidence: Evidence) -> Finding:
    """Figure 6: where whole curves lie furthest apart, relative to the peak, on its linear axis."""
    said, holds = [], True
    for model in (R1, MIDDLE):
        ours, theirs = evidence.both("fig06", model=model, isl=LONG_PROMPTS[0])
        x = np.linspace(max(ours.x[0], theirs.x[0]), min(ours.x[-1], theirs.x[-1]), POINTS)
        apart = (throughput(ours, x) - throughput(theirs, x)) / float(throughput(ours, x).max())
        best = int(apart.argmax())
        holds = holds and POINTS // 10 < best < POINTS - 1 - POINTS // 10
        said.append(
            f"{model} {apart[best]:.2f} at {x[best]:.0f} of {x[0]:.0f} to {x[-1]:.0f} tokens/s/user, {apart[0]:.2f} "
            f"and {apart[-1]:.2f} at the ends"
        )
    return Finding(f"difference over the peak: {'; '.join(said)}", holds, "")


def expert_parallel(evidence: Evidence) -> Finding:
    """Share of R1's frontier that runs experts in parallel inside the domain, even and picked at random."""

    def share(front: Front) -> tuple[str, bool]:
        stage = front.column("decode_gpus") / front.column("decode_pp")
        parallel = float(((front.column("decode_ep") > 1) & (stage <= DOMAIN)).mean())
        return f"{parallel:.2f} of the points", parallel >= 0.9

    at = evidence.setup(R1)
    even = at.changed(profile=replace(at.profile, random_routing=False, expert_skew=0.0, rank_skew=0.0))
    table, work = evidence.mappings(R1), lengths(*LONG_PROMPTS)
    pools = (
        prefill_grid(even, table, work, allow_long_context=True),
        decode_grid(even, table, work, allow_long_context=True),
    )
    front = Front(match_pools(*pools, Rules(keep="frontier")))
    usual = evidence.front("fig06", model=R1, isl=LONG_PROMPTS[0])
    return Finding(*share(front), "", Without("experts as the profile has them", *share(usual)))


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


def pipelined(evidence: Evidence) -> Finding:
    """Figure 5: FTL and rate from one to 32 stages by chunk."""
    rows = {}
    for chunk in CHUNKS:
        times, rates = [], []
        for depth in claims_limits.DEPTHS:
            ranks = 64 // depth
            grid = prefill_grid(
                evidence.setup(R1),
                Sharding(dp_attn=ranks, ep=ranks, pp=depth),
                lengths(262_144, 2),
                batch=ranks,
                chunk_tokens=chunk,
                mla_form="cached",
                allow_long_context=True,
            )
            row = int((grid.mappings.chunk_tokens == (chunk if depth > 1 else 0)).argmax())
            times.append(float(grid.latency[row, 0]))
            rates.append(float(grid.request_rate[row, 0]))
        rows[chunk] = times[0] / times[1], rates[1] / rates[0], times
    kept = {chunk: each for chunk, each in rows.items() if each[1] >= 0.9}
    said = ", ".join(f"{chunk} {factor:.1f} at {rate:.3f}" for chunk, (factor, rate, _) in rows.items())
    if not kept:
        return Finding(f"factor of the FTL at the rate, by chunk: {said}", False, "")
    factor, _, (first, last) = kept[max(kept, key=lambda chunk: kept[chunk][0])]
    holds = 20 <= factor <= 32 and 60 <= first <= 140 and 2 <= last <= 5
    return Finding(f"factor of the FTL at the rate, by chunk: {said}; {first:.1f} s to {last:.2f} s", holds, "")


def ingress(evidence: Evidence) -> Finding:
    """Ingress of a decode GPU along R1's frontier, but for noise of matching."""
    front = evidence.front("fig12", isl=LONG_PROMPTS[0])
    found = front.column(claims_transfer.INGRESS) * front.column("decode_unique_gpus") / front.column("decode_gpus")
    rise = float((found / np.minimum.accumulate(found)).max() - 1)
    return Finding(f"falls {found[0] / found[-1]:.0f} times, rises by {rise:.2%} at most", rise <= NOISE, "")


def mitigated(evidence: Evidence) -> Finding:
    """Every step mixed with the projected past kept in memory, over the same without."""
    naive, cached = (
        evidence.front(claims_sharing.MIXED, modes=("piggyback",), model=R1, mla_form=form)
        for form in ("naive", "cached")
    )
    x = third(*shared(naive, cached), 1)
    ratio = throughput(cached, x) / throughput(naive, x)
    return Finding(f"{ratio.min():.2f} to {ratio.max():.2f} times over the middle third", bool(ratio.min() > 1), "")


def higher_tp(evidence: Evidence) -> Finding:
    """TP of disaggregated decode over co-located TP, in the middle half of the range."""
    medians = {}
    for model in (R1, MIDDLE):
        ours, theirs = evidence.both("fig06", model=model)
        x = np.geomspace(*shared(ours, theirs), POINTS)[50:151]
        medians[model] = float(np.median(ours.at("decode_tp_attn", x) / theirs.at("decode_tp_attn", x)))
    return Finding(f"median ratio {listed(medians)}", min(medians.values()) > 1, "")


def in_tensors(evidence: Evidence) -> tuple[str, bool]:
    """FTL of C32 with TP in place of stages."""
    ratios = claims_limits.by_tp(evidence)
    return f"FTL {listed(ratios, '.2f')}", all(map(claims_limits.near_parameters, ratios.values()))


def beside(
    ours: Callable[[Evidence], Finding], rule: str, second: Callable[[Evidence], tuple[str, bool]]
) -> Callable[[Evidence], Finding]:
    """Judge a claim as we do, and by another reading of what the paper leaves open."""
    return lambda evidence: ours(evidence)._replace(without=Without(rule, *second(evidence)))


#: Section or figure, setting, and what the paper says, by claim.
PLACES = {
    "C1": (
        "4, figure 8",
        "R1, four kinds of traffic",
        "wide gap at 16384/2048 and 16384/16384, narrow at the two others",
    ),
    "C2": ("4, figure 7", "Llama 8B, 70B, 405B, 4096/256", "gap grows with the size"),
    "C3": ("figures 1, 7", "8B 4096/256; R1 1024/32768", "small gaps"),
    "C4": ("4, figure 6", "R1 and Llama-70B, 16384/2048", "superior performance in the medium-latency regime"),
    "C5": ("4", "frontiers of figure 6", "batch falls, TP rises"),
    "C6": ("4", "Llama-70B, 16384/2048, domain of 72", "TP from 2 to 64"),
    "C7": ("4", "R1, 16384/2048", "EP consistently preferred"),
    "C8": ("4", "R1, 16384/2048", "attention from DP to TP"),
    "C9": ("4, appendix A", "R1, throughput end", "hundreds"),
    "C10": ("4, figure 5", "R1, 256k prompts, EP x PP = 64", "90 to 2.9 s, 31 times, rate 0.99 to 1.03"),
    "C11": ("4.3, figure 9", "16384/2048, four models", "ratio falls"),
    "C12": ("4.3, figure 9", "16384/2048, four models", "spread > 40, 10, 2, 1.3 times"),
    "C13": ("4.3, figure 9", "loose end", "3.6, 2.1, 0.95, 0.4"),
    "C14": ("4.3, figure 10", "R1, ratios of 0.5 and 3.5", "0.5 flat at 0.42; 3.5 at 0.05 at the tight end"),
    "C15": ("none: our own derivation", "R1, fixed ratios", "no formula is printed"),
    "C16": ("4.4, figure 11", "domains of 8 and 72", "72 never below"),
    "C17": ("4.4, figure 11", "R1 and Llama-70B", "R1 at medium, 70B at low latency"),
    "C18": ("5.1, eq. (1)", "R1 and Llama-70B", "egress falls with ISL"),
    "C19": ("5.1, eq. (2)", "R1 and Llama-70B", "ingress insensitive to ISL, 1/(TTL x OSL)"),
    "C20": ("5.1, figure 12", "R1, 16384/2048", "ingress falls as TTL tightens"),
    "C21": ("5.1", "R1 and Llama-70B at 16k", "MLA needs less egress"),
    "C22": ("5.1, figure 12", "R1, 16384/2048 and 1M/2048", "1.23 to 0.4; 1.82 to 1.0 GB/s"),
    "C23": ("5.1", "caches under TP", "copies"),
    "C24": ("none: our own check", "matched pools", "no such equation is printed"),
    "C25": ("4.1, figure 6", "R1 and Llama-70B, every step mixed", "R1 well below, 70B close"),
    "C26": ("4.1", "R1, up-projected past kept", "can be mitigated"),
    "C27": ("4", "R1, figure 8", "piggybacking suits decode-heavy traffic, relaxed latency"),
    "C28": ("appendix C, figure 14", "Llama-70B, its distribution against 4096/512", "curves close together"),
    "C29": ("3.2", "FTL within 10 s", "cut-off"),
    "C30": ("4.3", "few GPUs", "degrades like a fixed ratio"),
    "C31": ("4", "R1 and Llama-70B, medium latency", "TP more aggressive than co-located"),
    "C32": ("4", "70B and 405B at 4k", "FTL goes with active parameters"),
    "C33": ("4", "R1, prompts of mixed lengths", "CPP especially effective, without wide TP"),
    "C34": ("4.1", "R1, 405B and 8B, 16384/2048", "different mappings for prefill and decode"),
    "C35": ("3.2, appendix B", "R1, 16384/2048", "one prefill mapping, integer counts"),
    "C36": ("3.1", "R1, 16384/2048", "the best mix is chosen for each latency"),
}
AXIS = "20 to 100 tokens/s/user: the paper's axes are normalised"
#: Judges that read the text otherwise than ours, or in two ways: judge, acceptance ("" = ours), what is inferred.
READ = {
    "C3": (
        beside(
            claims_gain.c3_little_gain,
            "over the whole range that both curves reach",
            lambda evidence: claims_gain.little(evidence, own=True),
        ),
        "",
        AXIS,
    ),
    "C4": (
        heights,
        "the largest difference of heights over the peak is in neither the loosest nor the tightest tenth of what both "
        "curves reach",
        "the figure shows heights of whole curves over a linear axis; where the medium lies",
    ),
    "C7": (
        expert_parallel,
        "EP > 1 on at least 90 % of the points",
        "the paper says nothing of uneven experts: even ones",
    ),
    "C9": (loose_batch, "100 to 999 requests", "batch per model replica: the instance, or under DP its attention"),
    "C10": (
        pipelined,
        "the chunk of the largest factor at a rate of at least 0.9: 20 to 32 times, 60-140 s to 2-5 s",
        "no chunk is named: the best of 512 to 4,096; MLA with its projected past kept",
    ),
    "C13": (
        beside(
            claims_ratio.c13_loose_end,
            "attention in bf16",
            lambda evidence: claims_ratio.loose_ends(evidence, claims_ratio.SWITCHED),
        ),
        "",
        f"{AXIS}; attention in fp8, of which the paper says nothing",
    ),
    "C20": (ingress, "no rise above 1 %", "integer matching moves neighbours"),
    "C26": (
        mitigated,
        "above 1 over the middle third",
        "how much is not said; every step mixed, the middle third of 20 to 100 tokens/s/user",
    ),
    "C31": (
        higher_tp,
        "median of the ratio above 1",
        "more aggressively: strictly above, middle half of 20 to 100 tokens/s/user",
    ),
    "C32": (
        beside(claims_limits.c32_active_parameters, "TP 2, 4 and 8 in place of stages", in_tensors),
        "",
        "two stages, as no mapping is named",
    ),
}
#: What is inferred where the judge is ours, and the words of the paper where our statement goes beyond them.
INFERRED = dict.fromkeys(("C2", "C11", "C12", "C14", "C15"), AXIS) | {
    "C1": "the range that both curves reach; 16384/16384, wide in the paper, is narrow here and not judged",
    "C18": "a cache in fp8",
    "C19": "a cache in fp8; OSL - 1 in place of OSL",
    "C21": "a cache in fp8",
    "C22": "a cache in fp8; FTL is not limited at 1M",
    "C23": "an identity, which no run can refute",
    "C24": "an identity, which no run can refute",
    "C25": "every step mixed, the past projected again; thirds of 20 to 100 tokens/s/user",
    "C27": f"every step mixed, the past projected again; {AXIS}",
    "C29": "an identity, which no run can refute",
    "C30": "that few GPUs lose what a fixed ratio loses is not tested, only that they lose",
    "C33": "4k, 16k and 64k in equal shares; TP of attention up to 8 is not wide, experts may be cut further",
    "C34": f"{AXIS}; no integer counts",
    "C35": "that little is lost, and at most a tenth, is our question",
    "C36": f"{AXIS}; the mix, as tokens a step grow with the batch, too",
}
STATED = {"C26": "keeping the projected past can mitigate that loss"}
#: Why a claim does not hold, or is not judged.
WHY = {
    "C3": "8B gains most beyond 100 tokens/s/user, where its own range goes on (to 464 under `measured`)",
    "C2": "without latencies 8B and 70B gain nothing up to 100 tokens/s/user: co-located steps overlap decode, bound "
    "by memory, with prefill, bound by compute; over own ranges the order holds",
    "C4": "without latencies curves reach thousands of tokens/s/user and lie furthest apart in their loosest tenth",
    "C6": "beyond 16 GPUs the all-reduce takes what smaller matrices save, by a form measured up to 16",
    "C7": "experts cut over TP load all ranks alike, which wins at short latency where picks are random; under "
    "`optimistic` it wins with even ones, too, from 114 tokens/s/user on",
    "C9": "a whole instance takes thousands of requests, an attention rank hundreds",
    "C10": "at the peak rates of the chip a prompt takes 40 s at PP 1 and 1.85 s at PP 32, below the 60 to 140 s and 2 "
    "to 5 s that we accept around the figure's 90 and 2.9",
    "C12": "models end at different speeds: 405B's whole curve lies below 100 tokens/s/user under `measured`; under "
    "`optimistic` R1's ratio has fallen 5.4 times by 100, short of 10, and without latencies (`ideal`) the curves are "
    "flat there",
    "C13": "attention in bf16 slows R1's decode more than its prefill: the ratio falls below 405B's, and under "
    "`measured` below a third of the paper's",
    "C14": "without latencies curves are flat up to 100 tokens/s/user",
    "C17": "without latencies R1 gains most where the small domain ends",
    "C20": "integer matching tells neighbours apart",
    "C25": "small chunks on a long past take a block of 256 query rows each in today's kernels",
    "C26": "kept keys and values are read again where projecting them cost little",
    "C27": "what mixing is compared with prefills the attention ranks in turn, which costs most where prompts are "
    "long; under `optimistic` the order holds, but the gain does not fall from third to third",
    "C28": "the distribution is private: its spread decides, and half of the one that was assumed would hold",
    "C31": "R1 has the same TP in both over most of the middle, under `measured` Llama-70B, too: medians of exactly 1",
    "C32": "elementwise work and all-reduces go with layers and width, not with parameters: TP leaves more of them",
    "C36": "without latencies every step is mixed all along the range, so that only the batch changes, not the mix",
}

CLAIMS: tuple[AsAuthors[Evidence], ...] = tuple(
    AsAuthors(
        each,
        place=PLACES[each.id][0],
        setting=PLACES[each.id][1],
        paper=PLACES[each.id][2],
        statement=STATED.get(each.id, ""),
        judge=READ[each.id][0] if each.id in READ else None,
        acceptance=READ[each.id][1] if each.id in READ else "",
        inferred=READ[each.id][2] if each.id in READ else INFERRED.get(each.id, ""),
        why=WHY.get(each.id, ""),
        judged=each.id != "C28",
    )
    for each in OURS
)
