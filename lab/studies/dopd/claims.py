"""Test the claims of DOPD on its equations, its table and step times: D1-D3, D6-D8, D11, D16.

Those about serving are in ``claims_runs``. D7, D8 and D16 hold by construction: a quadratic has its variance, Poisson
arrivals at one server wait as Pollaczek and Khinchine say, and the printed rule counts the decode instances twice.
"""

from __future__ import annotations

import numpy as np

from disagg_sim.physics.counts import prefill_work
from disagg_sim.physics.residents import decode_residents
from disagg_sim.simulation.policies.dopd.sizes import kingman_wait, matching_prefill
from disagg_sim.simulation.site import request_host
from disagg_sim.units import GB, MS, TERA
from disagg_sim.workload.synthetic import LengthTable, log_normal, synthetic_trace
from lab.studies.claims import Finding
from lab.studies.dopd import TEXT
from lab.studies.dopd.equations import Concurrency, decode_concurrency, prefill_decode_ratio
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


def table_one_prefill(tokens: float) -> float:
    """t_p of the paper's table I. [s]"""
    return PREFILL_FIT[0] + PREFILL_FIT[1] * tokens


def table_one_step(sequences: float, context: float) -> float:
    """t_d of the paper's table I. [s]"""
    return DECODE_FIT[0] + sequences * (DECODE_FIT[1] + DECODE_FIT[2] * context)


def concurrency(bench: DopdBench, isl: float, osl: float) -> Concurrency:
    """Eq. (13) for any lengths."""
    return decode_concurrency(bench.llama, tp=2, isl=isl, osl=osl, tpot_limit=SLO.tpot, utilisation=ENGINE_SHARE)


def concurrencies(bench: DopdBench) -> list[Concurrency]:
    """Eq. (13) for both of ``SHAPES``."""
    return [concurrency(bench, *shape) for shape in SHAPES]


def ratios(bench: DopdBench, *, own: bool) -> list[float]:
    """Eq. (15) for both of ``SHAPES``, with the step times simulated or with those of table I."""
    if own:
        return [required_ratio(bench, *shape)[0] for shape in SHAPES]
    return [
        prefill_decode_ratio(
            each.requests,
            prefill_time=table_one_prefill(isl),
            step_time=table_one_step(each.requests, decode_residents(isl, osl).mean),
            osl=osl,
        )
        for (isl, osl), each in zip(SHAPES, concurrencies(bench), strict=True)
    ]


def required_ratio(bench: DopdBench, isl: float, osl: float) -> tuple[float, float]:
    """Eq. (15) and (13) of any lengths with the step times simulated: ratio [1], concurrency [request]."""
    each = concurrency(bench, isl, osl).requests
    first = bench.table(1).pass_time(round(isl))[1]
    step = bench.table(2).step_time(round(each), decode_residents(isl, osl).mean)
    return prefill_decode_ratio(each, prefill_time=first, step_time=step, osl=osl), each


@TEXT.claim("D1")
def d1_concurrency(bench: DopdBench) -> Finding:
    """Eq. (13)."""
    found = [each.requests for each in concurrencies(bench)]
    near = all(abs(cc / printed - 1) <= 0.03 for cc, printed in zip(found, PRINTED_CONCURRENCY, strict=True))
    return Finding(
        f"{found[0]:.1f} and {found[1]:.1f}",
        near,
        "bf16 cache of 327,680 B a token, fp8 weights of 72.65 GB, 0.9 of 85.52 GB a GPU; the printed pair follows "
        "from no single memory figure: the two differ by 2.8 %",
    )


@TEXT.claim("D2")
def d2_memory(bench: DopdBench) -> Finding:
    """Which of the two limits binds."""
    found = concurrencies(bench)
    limits = [f"V_mem {each.memory_bytes / GB:.0f} GB, V_BW {each.bandwidth_bytes / GB:.0f} GB" for each in found]
    return Finding(", ".join(limits), all(each.memory_bound for each in found), "alpha 0.6 and a TPOT limit of 0.08 s")


@TEXT.claim("D3")
def d3_ratio(bench: DopdBench) -> Finding:
    """Eq. (15) against the printed ratios."""
    theirs, ours = ratios(bench, own=False), ratios(bench, own=True)
    return Finding(
        f"table I {theirs[0]:.2f} and {theirs[1]:.2f}; simulated {ours[0]:.2f} and {ours[1]:.2f}",
        _near(theirs, 0.08) and _near(ours, 0.2),
        "printed 4.58 and 3.18; t_p is well determined, t_d is not stated",
    )


def _near(found: list[float], share: float) -> bool:
    return all(abs(ratio / printed - 1) <= share for ratio, printed in zip(found, PRINTED_RATIO, strict=True))


@TEXT.claim("D6")
def d6_longer(bench: DopdBench) -> Finding:
    """The ratio as both lengths grow."""
    theirs, ours = ratios(bench, own=False), ratios(bench, own=True)
    return Finding(
        f"table I {theirs[0]:.2f} to {theirs[1]:.2f}, simulated {ours[0]:.2f} to {ours[1]:.2f}",
        theirs[1] < theirs[0] and ours[1] < ours[0],
        "the output doubles while the concurrency falls to a third: a decode instance asks for fewer prompts",
    )


@TEXT.claim("D7")
def d7_variance(bench: DopdBench) -> Finding:
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
    return Finding(
        f"excess {excess / TERA:.2f} TFLOP, b*Var within {off:.0e}",
        off < 1e-9 and excess > 0,
        f"lengths log-normal, mean {lengths.mean():.0f} tokens, c_v {lengths.std() / lengths.mean():.2f}",
    )


@TEXT.claim("D8")
def d8_kingman(bench: DopdBench) -> Finding:
    """Waits of a prefill queue of one server, one prompt a pass, mixed against equal lengths."""
    times = bench.table(1)
    worst, longer, rows = 0.0, [], []
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
            placed = found.arrival_s + request_host(bench.llama)
            waits.append(float(np.mean(found.prefill_start_s - placed)))
            expected = kingman_wait(np.diff(trace.arrival), services, servers=1)
            worst = max(worst, abs(waits[-1] / expected - 1))
            lengths = " and ".join(map(str, prompts))
            rows.append(f"rho {load:g}, {lengths} tokens: {waits[-1]:.3f} s of {expected:.3f} s")
        longer.append(waits[1] / waits[0])
    return Finding(
        f"within {worst:.1%}; mixed over equal {', '.join(f'{each:.2f}' for each in longer)}",
        worst <= 0.2 and min(longer) > 1,
        f"for Poisson arrivals at one server the formula is exact; {'; '.join(rows)}",
    )


@TEXT.claim("D11")
def d11_tensor_parallel(bench: DopdBench) -> Finding:
    """Speedup of prefill a GPU."""
    times = np.array([bench.table(tp).pass_time(1000)[0] for tp in DEGREES])
    shares = times[0] / times / np.array(DEGREES)
    return Finding(
        ", ".join(f"S({tp})/{tp} = {share:.2f}" for tp, share in zip(DEGREES[1:], shares[1:], strict=True)),
        bool((np.diff(shares) < 0).all()),
        "a prompt of 1,000 tokens; all-reduces and smaller matrices",
    )


@TEXT.claim("D16")
def d16_printed_rule(_bench: DopdBench) -> Finding:
    """n_p as printed over n_p by eq. (15), for the same requests in all."""
    found = {}
    for decode in (2, 3):
        rules = [
            matching_prefill(200.0 * decode, decode, prefill_s=0.166, step_s=0.054, outputs=150.0, rule=rule)
            for rule in ("printed", "mended")
        ]
        found[decode] = rules[0] / rules[1]
    return Finding(
        ", ".join(f"n_d {decode}: {ratio:.6g}" for decode, ratio in found.items()),
        all(abs(ratio - decode) < 1e-12 for decode, ratio in found.items()),
        "before rounding up; the ratio as printed holds the requests of all decode instances already",
    )
