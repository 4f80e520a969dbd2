"""Test the claims of DOPD on its equations, its table and step times: D1-D3, D6-D8, D11, D16.

Eq. (11) to (15) are of figures on a data sheet; the policy has the same of the instances that serve
(``simulation.policies.dopd.sizes``). Claims about serving are in ``claims_runs``. D7, D8 and D16 hold by construction:
a quadratic has its variance, Poisson arrivals at one server wait as Pollaczek and Khinchine say, and the printed rule
counts the decode instances twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.memory import weight_bytes
from disagg_sim.physics.residents import decode_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.policies.dopd.sizes import BANDWIDTH_SHARE, LARGEST_GRAPH, kingman_wait, matching_prefill
from disagg_sim.units import GB, MS, TERA
from disagg_sim.workload.synthetic import LengthTable, log_normal, synthetic_trace
from lab.studies.claims import Told
from lab.studies.dopd import TEXT
from lab.studies.dopd.setup import BIMODAL, SHAPES, SLO, DopdBench, case_of, pools

#: What the paper prints for ``SHAPES``: concurrency of a decode instance of two GPUs, and prefill:decode ratio.
PRINTED_CONCURRENCY, PRINTED_RATIO = (235, 78), (4.58, 3.18)
#: Its M' is a tenth of a GPU: the engine fills 0.9, everything included.
ENGINE_SHARE = 0.9
#: Least squares of its table I: prefill of s tokens, and a decode step of n sequences of s tokens. [s]
PREFILL_FIT: tuple[float, float] = (19.7 * MS, 0.1463 * MS)
DECODE_FIT: tuple[float, float, float] = (18.0 * MS, 0.1208 * MS, 3.17e-5 * MS)
KINGMAN_LOADS = (0.7, 0.8, 0.9)  # share of the time that the server of D8 works [1]
MIXED_CV = 1.0  # of the lengths that D7 mixes [1]
SAMPLE = 256  # prompts of D7 [1]
DEGREES = (1, 2, 4, 8)  # of D11 [GPU]


class Concurrency(NamedTuple):
    """How many requests a decode instance holds, and what limits them."""

    requests: float  # cc, eq. (13), not rounded [request]
    memory_bytes: float  # V_mem [B]
    bandwidth_bytes: float  # V_BW [B]

    @property
    def memory_bound(self) -> bool:
        """Whether memory, not bandwidth, limits the concurrency."""
        return self.memory_bytes < self.bandwidth_bytes


def decode_concurrency(at: Setup, isl: float, osl: float, tpot_limit: float = SLO.tpot) -> Concurrency:
    """Eq. (11) to (13) of a decode instance of two GPUs, for any lengths [token], under a limit of TPOT [s]."""
    gpus = 2
    memory = ENGINE_SHARE * at.system.hbm_reported * gpus - weight_bytes(at.model, at.precision)
    bandwidth = tpot_limit * BANDWIDTH_SHARE * gpus * at.system.hbm_bandwidth
    held = decode_residents(isl, osl).mean * at.model.kv_bytes_per_token(at.precision)
    return Concurrency(min(memory, bandwidth) / held, memory, bandwidth)


def prefill_decode_ratio(concurrency: float, *, prefill_time: float, step_time: float, osl: float) -> float:
    """Prefill instances for each decode instance by eq. (14) and (15), not rounded, ``concurrency`` cut at
    ``LARGEST_GRAPH``. [1]
    """
    return min(concurrency, LARGEST_GRAPH) * prefill_time / (step_time * osl)


def concurrencies(bench: DopdBench) -> list[Concurrency]:
    """Eq. (13) for both of ``SHAPES``."""
    return [decode_concurrency(bench.llama, *shape) for shape in SHAPES]


def ratios(bench: DopdBench, *, own: bool) -> list[float]:
    """Eq. (15) for both of ``SHAPES``, with the step times simulated or with those of table I."""
    if own:
        return [required_ratio(bench, *shape)[0] for shape in SHAPES]
    return [
        prefill_decode_ratio(
            each.requests,
            prefill_time=PREFILL_FIT[0] + PREFILL_FIT[1] * isl,
            step_time=DECODE_FIT[0] + each.requests * (DECODE_FIT[1] + DECODE_FIT[2] * decode_residents(isl, osl).mean),
            osl=osl,
        )
        for (isl, osl), each in zip(SHAPES, concurrencies(bench), strict=True)
    ]


def required_ratio(bench: DopdBench, isl: float, osl: float) -> tuple[float, float]:
    """Eq. (15) and (13) of any lengths with the step times simulated: ratio [1], concurrency [request]."""
    each = decode_concurrency(bench.llama, isl, osl).requests
    first = bench.table(1).pass_time(round(isl))[1]
    step = bench.table(2).step_time(round(each), decode_residents(isl, osl).mean)
    return prefill_decode_ratio(each, prefill_time=first, step_time=step, osl=osl), each


@TEXT.claim("D1")
def d1_concurrency(bench: DopdBench) -> Told:
    """Eq. (13)."""
    found = [each.requests for each in concurrencies(bench)]
    near = all(abs(cc / printed - 1) <= 0.03 for cc, printed in zip(found, PRINTED_CONCURRENCY, strict=True))
    return f"{found[0]:.1f} and {found[1]:.1f}", near


@TEXT.claim("D2")
def d2_memory(bench: DopdBench) -> Told:
    """Which of the two limits binds."""
    found = concurrencies(bench)
    limits = [f"V_mem {each.memory_bytes / GB:.0f} GB, V_BW {each.bandwidth_bytes / GB:.0f} GB" for each in found]
    return ", ".join(limits), all(each.memory_bound for each in found)


@TEXT.claim("D3")
def d3_ratio(bench: DopdBench) -> Told:
    """Eq. (15) against the printed ratios."""
    theirs, ours = ratios(bench, own=False), ratios(bench, own=True)
    said = f"table I {theirs[0]:.2f} and {theirs[1]:.2f}; simulated {ours[0]:.2f} and {ours[1]:.2f}"
    return said, _near(theirs, 0.08) and _near(ours, 0.2)


def _near(found: list[float], share: float) -> bool:
    return all(abs(ratio / printed - 1) <= share for ratio, printed in zip(found, PRINTED_RATIO, strict=True))


@TEXT.claim("D6")
def d6_longer(bench: DopdBench) -> Told:
    """The ratio as both lengths grow."""
    theirs, ours = ratios(bench, own=False), ratios(bench, own=True)
    said = f"table I {theirs[0]:.2f} to {theirs[1]:.2f}, simulated {ours[0]:.2f} to {ours[1]:.2f}"
    return said, theirs[1] < theirs[0] and ours[1] < ours[0]


@TEXT.claim("D7")
def d7_variance(bench: DopdBench) -> Told:
    """Mean work of mixed lengths against the work of the mean length, FLOP of the model."""
    model, recipe = bench.llama.model, bench.llama.precision

    def work(length: int) -> float:
        return prefill_work(model, isl=length, precision=recipe).flops

    few = np.array([256, 512, 1024])
    _, _, square = np.linalg.solve(np.stack([few**0, few, few**2], axis=1), [work(each) for each in few.tolist()])
    lengths = log_normal(1024, MIXED_CV).sample(np.random.default_rng(0), SAMPLE)
    lengths[-1] += (-lengths.sum()) % SAMPLE  # so that the mean is a whole length
    excess = float(np.mean([work(each) for each in lengths.tolist()])) - work(int(lengths.mean()))
    off = abs(excess / (square * float(lengths.var())) - 1)
    return f"excess {excess / TERA:.2f} TFLOP, b*Var within {off:.0e}", off < 1e-9 and excess > 0


@TEXT.claim("D8")
def d8_kingman(bench: DopdBench) -> Told:
    """Waits of a prefill queue of one server, one prompt a pass, mixed against equal lengths."""
    times = bench.table(1)
    worst, longer = 0.0, []
    for load in KINGMAN_LOADS:
        waits = []
        for prompts in ((sum(BIMODAL) // 2,), BIMODAL):
            mean = float(np.mean([times.pass_time(each)[1] for each in prompts]))
            trace = synthetic_trace(
                rate=load / mean,
                requests=5_000 if bench.quick else 40_000,
                seed=3,
                lengths=LengthTable(np.array(prompts), np.ones(len(prompts), np.int64)),
            )
            services = np.array([times.pass_time(each)[1] for each in trace.input_tokens.tolist()])
            case = case_of(pools(1, 1), "disaggregated", prefill="whole", token_budget=1)
            found = bench.result(("kingman", load, prompts), trace, case).requests
            placed = found.arrival_s + bench.llama.request_host
            waits.append(float(np.mean(found.prefill_start_s - placed)))
            expected = kingman_wait(np.diff(trace.arrival), services, servers=1)
            worst = max(worst, abs(waits[-1] / expected - 1))
        longer.append(waits[1] / waits[0])
    return (
        f"within {worst:.1%}; mixed over equal {', '.join(f'{each:.2f}' for each in longer)}",
        worst <= 0.2 and min(longer) > 1,
    )


@TEXT.claim("D11")
def d11_tensor_parallel(bench: DopdBench) -> Told:
    """Speedup of the prefill of 1,000 tokens, a GPU."""
    times = np.array([bench.table(tp).pass_time(1000)[0] for tp in DEGREES])
    shares = times[0] / times / np.array(DEGREES)
    said = ", ".join(f"S({tp})/{tp} = {share:.2f}" for tp, share in zip(DEGREES[1:], shares[1:], strict=True))
    return said, bool((np.diff(shares) < 0).all())


@TEXT.claim("D16")
def d16_printed_rule(_bench: DopdBench) -> Told:
    """n_p as printed over n_p by eq. (15), for the same requests in all."""
    found = {}
    for decode in (2, 3):
        rules = [
            matching_prefill(200.0 * decode, decode, prefill_s=0.166, step_s=0.054, outputs=150.0, rule=rule)
            for rule in ("printed", "mended")
        ]
        found[decode] = rules[0] / rules[1]
    return (
        ", ".join(f"n_d {decode}: {ratio:.6g}" for decode, ratio in found.items()),
        all(abs(ratio - decode) < 1e-12 for decode, ratio in found.items()),
    )
