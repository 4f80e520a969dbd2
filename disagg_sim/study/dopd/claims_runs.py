"""Test the claims of DOPD on simulated runs: D4, D5, D9, D10, D12-D15."""

from __future__ import annotations

import numpy as np

from disagg_sim.simulation.metrics import summary
from disagg_sim.simulation.policies.dopd.batches import BATCHES
from disagg_sim.study.claims import PAPER, Finding, claim
from disagg_sim.study.dopd.claims import ratios, wanted_ratio
from disagg_sim.study.dopd.setup import BIMODAL, PLANNERS, SLO, DopdBench, steady_rate

MOST_PREFILL = 6  # instances of D4 and D5 [1]
#: Loads of D9 over what 4P serve one prompt at a time, and the one that is judged: batches need a queue. [1]
BIMODAL_LOADS, JUDGED_LOAD = (0.7, 0.8, 0.85, 0.9, 0.95, 1.0), 0.95
#: Lengths of D10 [token], and the transfers that the paper measured [s].
SHORT, TRANSFERS = (32, 64, 128), (0.015, 0.080)
#: Requests in service at which D12 and D13 compare latencies: the paper's, of DOPD.
AT_CONCURRENCY = {"llama": 112, "opt": 104}
#: Splits of eight GPUs, and the load of the open loop of D15 over what the best of them serves. [1]
SPLITS, OPEN_LOAD = ((6, 1), (4, 2), (2, 3)), 0.9


def throughputs(bench: DopdBench) -> list[float]:
    """Of 1 to ``MOST_PREFILL`` prefill instances and one decode instance, saturated. [request/s]"""
    return [steady_rate(bench.saturated(n)) for n in range(1, MOST_PREFILL + 1)]


def utilisations(bench: DopdBench) -> list[float]:
    """Share of the time in which the prefill instances of each work: throughput times busy time a prompt. [1]"""
    found = []
    for n in range(1, MOST_PREFILL + 1):
        result = bench.saturated(n)
        busy = float(result.instances.busy_s[:n].sum()) / len(result.requests.request)
        found.append(steady_rate(result) * busy / n)
    return found


@claim(
    "D4",
    kind=PAPER,
    statement="throughput at 1000/150 grows linearly up to 4 prefill instances, then stops",
    acceptance="gains >= 0.9 of linear up to 4; the 5th adds 30-75 % of one unit; the 6th < 5 %",
)
def d4_scaling(bench: DopdBench) -> Finding:
    """Gains of further prefill instances."""
    rates = throughputs(bench)
    gains = np.diff([0.0, *rates]) / rates[0]
    recomputed = [steady_rate(bench.saturated(n, recompute=True)) for n in (4, 5, 6)]
    holds = bool((gains[:4] >= 0.9).all()) and 0.3 <= gains[4] <= 0.75 and rates[5] / rates[4] - 1 < 0.05
    return Finding(
        f"{', '.join(f'{rate:.1f}' for rate in rates)} requests/s; gains of one unit "
        f"{', '.join(f'{gain:.2f}' for gain in gains)}",
        holds,
        f"the optimum by eq. (15) with the simulated times is {ratios(bench, own=True)[0]:.2f} prefill instances; "
        f"decode takes the {bench.full_batch} requests that it holds to their end. Up to 256, preempted ones are "
        f"computed again on it: {', '.join(f'{rate:.1f}' for rate in recomputed)} requests/s with 4, 5 and 6",
    )


@claim(
    "D5",
    kind=PAPER,
    statement="prefill instances idle only when they exceed the optimum",
    acceptance="utilisation > 0.97 up to 4, then falls as optimum/n_p",
)
def d5_idle(bench: DopdBench) -> Finding:
    """Utilisation of the prefill instances."""
    found, rates = utilisations(bench), throughputs(bench)
    optimum = rates[-1] / rates[0]
    after = [abs(found[n - 1] / (optimum / n) - 1) for n in (5, 6)]
    return Finding(
        ", ".join(f"{n}P {share:.3f}" for n, share in enumerate(found, 1)),
        min(found[:4]) > 0.97 and found[5] < found[4] < 0.97 and max(after) < 0.03,
        f"beyond the measured optimum of {optimum:.2f} it falls as {optimum:.2f}/n_p within {max(after):.1%}",
    )


def bimodal_ttft(bench: DopdBench, load: float, batches: str) -> float:
    """P90 of the TTFT at a load over what 4P serve one prompt at a time. [s]"""
    rate = load * one_by_one(bench)
    if batches in BATCHES:
        result = bench.bimodal(rate, "dopd", batches=batches, local_tokens=0, resize=False)
    else:
        result = bench.bimodal(rate, "disaggregated", prefill=batches)
    return summary(result, SLO).ttft_p90_s


def one_by_one(bench: DopdBench) -> float:
    """Bimodal prompts that 4P serve without batches. [request/s]"""
    times = bench.table(1)
    return 4 / float(np.mean([times.pass_time(tokens)[1] for tokens in BIMODAL]))


@claim(
    "D9",
    kind=PAPER,
    statement="batches of short prompts up to i_next cut TTFT under a bimodal 100/1900 mix",
    acceptance="P90 TTFT below that of batches in order, throughput not lower",
)
def d9_batches(bench: DopdBench) -> Finding:
    """Batches by length against batches in order of arrival, up to the same number of tokens."""
    rows = {load: [bimodal_ttft(bench, load, each) for each in BATCHES] for load in BIMODAL_LOADS}
    ours, theirs = rows[JUDGED_LOAD]
    full = [steady_rate(bench.bimodal_full(each)) for each in BATCHES]
    loads = ", ".join(f"{load:g}: {a:.2f}/{b:.2f} s" for load, (a, b) in rows.items())
    return Finding(
        f"P90 TTFT {ours:.2f} s against {theirs:.2f} s, throughput of full queues {full[0]:.1f} against {full[1]:.1f} "
        "requests/s",
        ours < theirs and full[0] >= full[1],
        f"TTFT at {JUDGED_LOAD:g} of what 4P serve one by one; by load {loads}: where nothing waits no batch fills, "
        "and short prompts stay behind long ones, which run at once; chunks of 2,048 tokens in order "
        f"{bimodal_ttft(bench, JUDGED_LOAD, 'chunked'):.2f} s",
    )


def short_ttft(bench: DopdBench, tokens: int, *, local: bool, transfer_s: float) -> tuple[float, float]:
    """Mean time to the first token of short prompts, and to where decode can go on from it. [s]"""
    r = bench.short(tokens, local=local, transfer_s=transfer_s).requests
    those = r.input_tokens == tokens
    first = r.first_token_s[those] - r.arrival_s[those]
    return float(first.mean()), float((first + r.exposed_transfer_s[those]).mean())


@claim(
    "D10",
    kind=PAPER,
    statement="ultra-short prompts are better prefilled on the decode instance",
    acceptance="TTFT lower for s <= 128 with transfers of 15-80 ms",
)
def d10_local(bench: DopdBench) -> Finding:
    """Short prompts on the decode instance against the prefill instance and a transfer."""
    rows, holds, bare = [], True, []
    for tokens in SHORT:
        for transfer in TRANSFERS:
            here, _ = short_ttft(bench, tokens, local=True, transfer_s=transfer)
            before, there = short_ttft(bench, tokens, local=False, transfer_s=transfer)
            holds &= here < there
            bare.append(before < here)
            rows.append(f"{tokens} tokens, {1e3 * transfer:.0f} ms: {1e3 * here:.0f} of {1e3 * there:.0f} ms")
    return Finding(
        "; ".join(rows),
        holds,
        "the first token counts when decode can go on from it, as in Dynamo, where the decode worker returns it; "
        f"counted at the prefill instance it is earlier there in {sum(bare)} of {len(bare)} cases",
    )


@claim(
    "D12",
    kind=PAPER,
    statement="against co-located vLLM: P90 TPOT 0.097 to 0.079 s, goodput up to 1.5, concurrency 72 to 112",
    acceptance="order and sign; goodput ratio 1.2-1.8",
)
def d12_colocated(bench: DopdBench) -> Finding:
    """2P + 2D against vLLM on four GPUs."""
    at = AT_CONCURRENCY["llama"]
    tpot = [bench.warm(name, at).tpot_p90 for name in ("vllm", "dopd")]
    most = {name: bench.concurrency(name) for name in ("vllm", "vllm_six", "dopd", "dopd_4_1")}
    best = {name: bench.best(name) for name in most}
    ratio, other = best["dopd"] / best["vllm"], best["dopd_4_1"] / best["vllm"]
    wanted, full = wanted_ratio(bench, float(bench.azure.input_tokens.mean()), float(bench.azure.output_tokens.mean()))
    return Finding(
        f"P90 TPOT {tpot[0]:.4f} to {tpot[1]:.4f} s at {at} in service; goodput {ratio:.2f}; concurrency "
        f"{most['vllm']} to {most['dopd']}",
        tpot[1] < tpot[0] and 1.2 <= ratio <= 1.8 and most["dopd"] > most["vllm"],
        f"{bench.stand_in}six GPUs against four; what decides is the split: by eq. (15) these lengths want "
        f"{wanted:.1f} prefill instances for each decode instance of {full:.0f} requests, so that 2P + 2D are full "
        f"at {best['dopd']:.1f} requests/s with {most['dopd']} in service. The same six GPUs as 4P + 1D: goodput "
        f"{other:.2f}, concurrency {most['dopd_4_1']}. And vLLM is faster here: at 72 in service its P90 TPOT is "
        f"{bench.warm('vllm', 72).tpot_p90:.3f} s, where the paper's reaches 0.08 s. On six GPUs, 3 x TP2, it reaches "
        f"a goodput of {best['vllm_six']:.1f} against {best['dopd_4_1']:.1f} requests/s of 4P + 1D",
    )


@claim(
    "D13",
    kind=PAPER,
    statement="OPT-30B against DistServe: P90 TTFT 7.10 to 2.31 s, goodput +27 %, concurrency 88 to 104",
    acceptance="order and sign",
)
def d13_distserve(bench: DopdBench) -> Finding:
    """OPT-30B on the same GPUs, against whole prompts in order of arrival, 2,048 tokens a pass."""
    at = AT_CONCURRENCY["opt"]
    names = ("distserve", "dopd_opt", "one_by_one")
    ttft = [bench.warm(name, at).ttft_p90 for name in names]
    most, best = [bench.concurrency(name) for name in names], [bench.best(name) for name in names]
    return Finding(
        f"P90 TTFT {ttft[0]:.2f} to {ttft[1]:.2f} s at {at} in service; goodput {best[1] / best[0] - 1:+.1%}; "
        f"concurrency {most[0]} to {most[1]}",
        ttft[1] < ttft[0] and best[1] > best[0] and most[1] > most[0],
        f"{bench.stand_in}1P + 1D (TP4) both, requests within 2,048 positions; on the same step times only the passes "
        "of prefill differ, and DistServe's of up to 2,048 tokens are fuller than DOPD's of up to the mean input. "
        f"Against one prompt a pass: {ttft[2]:.2f} to {ttft[1]:.2f} s, {best[1] / best[2] - 1:+.1%}, {most[2]} to "
        f"{most[1]}. The paper's gap holds the two engines, too",
    )


@claim(
    "D14",
    kind=PAPER,
    statement="under bursts SLO attainment is 99.4 %, against 87.3 % SLA-driven and 80.8 % load-driven",
    acceptance="strict order on a bursty trace",
)
def d14_bursts(bench: DopdBench) -> Finding:
    """Attainment over hours of bursts."""
    hours = {name: bench.attainments(name) for name in PLANNERS}
    means = {name: float(found.mean()) for name, found in hours.items()}
    strict = (hours["DOPD"] > hours["SLA-driven"]) & (hours["SLA-driven"] > hours["load-driven"])
    dopd, sla, load = (means[name] for name in ("DOPD", "SLA-driven", "load-driven"))
    others = ", ".join(f"{name} {means[name]:.1%}" for name in list(PLANNERS)[3:])
    clip = ", ".join(f"{name} {bench.attainments(name, 1)[0]:.1%}" for name in ("DOPD", "SLA-driven", "load-driven"))
    return Finding(
        f"DOPD {dopd:.1%}, SLA-driven {sla:.1%}, load-driven {load:.1%}",
        dopd > sla > load,
        f"stand-in: MMPP with the published c_v of per-minute input and means for BurstGPT, bursts of 300 s; mean of "
        f"{len(bench.hours)} hours of a service four times the clip's, at whose own rate 1P + 1D are enough ({clip}); "
        f"strict in {int(strict.sum())} of the hours. Also {others}",
    )


@claim(
    "D15",
    kind=PAPER,
    statement="P/D choice is worth up to 3.2 in throughput, TTFT to 1/15, P90 TPOT -22.8 %",
    acceptance="order of magnitude: throughput 1.6-6.4, TTFT below 1/5, TPOT lower",
)
def d15_splits(bench: DopdBench) -> Finding:
    """The best against the worst split of eight GPUs."""
    rates = {split: steady_rate(bench.saturated(*split)) for split in SPLITS}
    most, least = max(rates.values()), min(rates.values())
    high, low = ([bench.open_loop(*split, OPEN_LOAD * rate) for split in SPLITS] for rate in (most, least))
    ttft = [each.ttft_p50_s for each in high]
    tpot = [each.tpot_p90_s for each in low]
    change = min(tpot) / max(tpot) - 1
    return Finding(
        f"throughput {most / least:.2f}, median TTFT 1/{max(ttft) / min(ttft):.0f}, P90 TPOT {change:+.1%}",
        1.6 <= most / least <= 6.4 and max(ttft) > 5 * min(ttft) and change < 0,
        "; ".join(f"{p}P + {d}D {rate:.1f} requests/s" for (p, d), rate in rates.items())
        + f"; TTFT at {OPEN_LOAD:g} of the highest throughput, TPOT at {OPEN_LOAD:g} of the lowest",
    )
