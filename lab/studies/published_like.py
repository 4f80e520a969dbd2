"""Make stand-ins for traces of which only statistics are published; their notes say so.

>>> len(burstgpt_standin(seed=0)), mini_reasoning_standin(rate=2.0, requests=100).notes
(6009, ('stand-in: published means, assumed spread',))
"""

from __future__ import annotations

from dataclasses import replace

from disagg_sim.errors import InputError, whole_number
from disagg_sim.workload.arrivals import arrivals, fit_mmpp, named_rng
from disagg_sim.workload.statistics import per_minute
from disagg_sim.workload.synthetic import log_normal, synthetic_trace
from disagg_sim.workload.trace import Trace

#: Requests [1], duration [s] and c_v of the input tokens of a minute [1] of a clip of BurstGPT: Wu et al., "Arrow".
BURSTGPT_REQUESTS, BURSTGPT_S, BURSTGPT_CV = 6009, 3600.0, 1.11
#: Mean input and output: the 733.9 tokens a request of the daily totals of BurstGPT_1 (61 days, 1,429,737 requests),
#: shared 65.3 : 34.7 as in its first 400 rows without the failed ones. [token]
BURSTGPT_INPUT, BURSTGPT_OUTPUT = 479.3, 254.6
#: Their coefficients of variation in those rows. [1]
BURSTGPT_INPUT_CV, BURSTGPT_OUTPUT_CV = 1.013, 1.029
#: Share of the time that is burst [1] and mean length of a burst [s], both assumed: the c_v fixes neither. After one
#: minute the tokens of a minute have an autocorrelation of 0.47 and 0.67 in the two busiest hours of week 1, with
#: about 6 requests a minute; bursts of 300 s have 0.85, and 0.4 to 0.6 under the noise of so few requests.
BURSTGPT_BURST_SHARE, BURSTGPT_BURST_S = 0.2, 300.0
#: Largest distance of a drawn hour's c_v from ``BURSTGPT_CV``. [1]
BURSTGPT_CV_ERROR = 0.02
#: Most hours that are drawn to find one: few requests, or very many, seldom or never have that c_v. [1]
BURSTGPT_DRAWS = 1000
#: Means of input and output of Mini Reasoning: Ruan et al., "DynaServe", table 1. [token]
MINI_REASONING_INPUT, MINI_REASONING_OUTPUT = 219, 1467
#: Their coefficients of variation: assumed, of the order of BurstGPT's. [1]
MINI_REASONING_CV = 1.0


def burstgpt_standin(seed: int = 0, requests: int = BURSTGPT_REQUESTS) -> Trace:
    """One hour like the BurstGPT clip: 6,009 requests, c_v 1.11 of the input tokens of a minute, published means.

    An hour holds two or three bursts, so that its c_v is far from its expectation more often than not. Runs of 6,009
    requests are drawn from the MMPP and stretched to the hour, until one has the published c_v within
    ``BURSTGPT_CV_ERROR``. Lengths are log-normal and independent of each other and of the arrivals. More ``requests``
    are the same bursts on a larger service.
    """
    whole_number("requests", requests, 2)
    rate, bursts = requests / BURSTGPT_S, {"burst_share": BURSTGPT_BURST_SHARE, "burst_s": BURSTGPT_BURST_S}
    process = fit_mmpp(BURSTGPT_CV, rate=rate, length_cv=BURSTGPT_INPUT_CV, **bursts)
    inputs, outputs = log_normal(BURSTGPT_INPUT, BURSTGPT_INPUT_CV), log_normal(BURSTGPT_OUTPUT, BURSTGPT_OUTPUT_CV)
    rng = {name: named_rng(seed, f"burstgpt/{name}") for name in ("arrivals", "input_tokens", "output_tokens")}
    for _ in range(BURSTGPT_DRAWS):
        times = arrivals(process, rng["arrivals"], rate, requests=requests)
        times *= BURSTGPT_S * (1 - 1 / requests) / times[-1]
        lengths = inputs.sample(rng["input_tokens"], times.size)
        minutes = per_minute(times, lengths)
        if abs(minutes.std() / minutes.mean() - BURSTGPT_CV) <= BURSTGPT_CV_ERROR:
            return Trace(
                arrival=times,
                input_tokens=lengths,
                output_tokens=outputs.sample(rng["output_tokens"], times.size),
                name="burstgpt_standin",
                notes=("stand-in: MMPP fitted to the published c_v and means",),
            )
    raise InputError(
        f"none of {BURSTGPT_DRAWS} hours of {requests} requests has a c_v of {BURSTGPT_CV} within {BURSTGPT_CV_ERROR}; "
        f"allowed: about {BURSTGPT_REQUESTS} requests"
    )


def mini_reasoning_standin(*, rate: float, requests: int) -> Trace:
    """Poisson arrivals with the means of Mini Reasoning; lengths log-normal, independent."""
    lengths = log_normal(MINI_REASONING_INPUT, MINI_REASONING_CV), log_normal(MINI_REASONING_OUTPUT, MINI_REASONING_CV)
    trace = synthetic_trace(rate=rate, requests=requests, lengths=lengths, name="mini_reasoning_standin")
    return replace(trace, notes=("stand-in: published means, assumed spread",))
