"""Make synthetic traces: an arrival process at a rate, with lengths from distributions or tables.

>>> trace = synthetic_trace(rate=2.0, requests=1000, lengths=(512, 64), seed=1)
>>> len(trace), int(trace.input_tokens[0]), trace.notes
(1000, 512, ())
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.errors import InputError, above_zero, quoted, whole_number
from disagg_sim.facts.traffic import BetaShare, ConstantShare, Reuse, TrafficCase
from disagg_sim.workload.arrivals import ArrivalProcess, Poisson, arrivals, named_rng
from disagg_sim.workload.distributions import Constant, LengthDistribution, LogNormal, length_distribution
from disagg_sim.workload.prefixes import whole_blocks
from disagg_sim.workload.request_columns import Tokens, read_only
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """Observed (input, output) pairs; drawn with replacement, so that their correlation is kept."""

    input_tokens: Tokens  # (rows,) [token]
    output_tokens: Tokens  # (rows,) [token]

    def __post_init__(self) -> None:
        """``InputError`` unless the columns pair up and hold lengths from 1."""
        object.__setattr__(self, "input_tokens", read_only(self.input_tokens, np.int64))
        object.__setattr__(self, "output_tokens", read_only(self.output_tokens, np.int64))
        if self.input_tokens.ndim != 1 or self.input_tokens.shape != self.output_tokens.shape:
            raise InputError(
                f"lengths of shapes {self.input_tokens.shape} and {self.output_tokens.shape} are not pairs"
            )
        if not self.input_tokens.size or min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise InputError("a table of lengths needs rows, each of 1 token or more")


Lengths = LengthTable | Trace | TrafficCase | tuple[int | LengthDistribution, int | LengthDistribution]


def log_normal(mean: float, cv: float) -> LogNormal:
    r"""Make the log-normal distribution of a mean and a coefficient of variation.

    .. math:: \sigma^2 = \ln(1 + c_v^2), \qquad median = mean / \sqrt{1 + c_v^2}

    Parameters
    ----------
    mean
        Expected length, above 0. [token]
    cv
        Standard deviation over mean; 0 makes all lengths equal. [1]

    Returns
    -------
    LogNormal
        With ``median`` [token] and ``sigma`` of the logarithm [1].

    Raises
    ------
    InputError
        A mean that is not above 0, or a cv that is negative or not finite.

    Examples
    --------
    >>> made = log_normal(200, cv=1.0)  # the median is 200/sqrt(2)
    >>> f"{made.mean:.1f}", f"{made.median:.1f}"
    ('200.0', '141.4')
    """
    spread = 1 + float(cv) ** 2
    if not (cv >= 0 and math.isfinite(spread)):
        raise InputError(f"cv of lengths {cv} is out of range; allowed: 0 and above, finite")
    return LogNormal(median=above_zero("mean length", mean) / math.sqrt(spread), sigma=math.sqrt(math.log(spread)))


def synthetic_trace(
    *,
    rate: float,
    lengths: Lengths,
    requests: int | None = None,
    duration: float | None = None,
    arrivals_as: ArrivalProcess = Poisson(),  # noqa: B008 - frozen, no state
    seed: int = 0,
    name: str = "synthetic",
) -> Trace:
    """Draw a trace of a stationary arrival process with independent lengths.

    Parameters
    ----------
    rate
        Mean rate. [request/s]
    lengths
        ``(input, output)``, each a number or a distribution of ``workload.distributions``; a case of a traffic
        (``load_traffic(name).cases[0]``), whose distributions they are; or a ``LengthTable`` or ``Trace`` whose pairs
        are drawn with replacement. [token]
    requests, duration
        One of them: how many requests [1], or up to which time [s].
    arrivals_as
        ``Poisson()``, ``Gamma(cv)``, ``Weibull(shape)`` or ``Mmpp(...)`` of ``workload.arrivals``.
    seed
        Arrivals, inputs and outputs are three streams of it: another length distribution moves no arrival.
    name
        Name of the trace.

    Returns
    -------
    Trace
        Arrivals ascend from the first drawn gap on [s]; lengths are whole and at least 1. [token]

    Raises
    ------
    InputError
        Not exactly one of requests and duration, a value out of range, or a duration without a request.

    Examples
    --------
    >>> trace = synthetic_trace(rate=2.0, lengths=(512, 64), requests=1000, seed=1)
    >>> longer = synthetic_trace(rate=2.0, lengths=(4096, 64), requests=1000, seed=1)
    >>> len(trace), int(trace.input_tokens.max()), float(abs(trace.arrival - longer.arrival).max())
    (1000, 512, 0.0)
    """
    if (requests is None) == (duration is None):
        raise InputError("a synthetic trace needs requests or duration, one of them")
    rate = above_zero("rate", rate, "requests/s")
    if requests is not None:
        times = arrivals(arrivals_as, named_rng(seed, "arrivals"), rate, requests=whole_number("requests", requests))
    else:
        times = arrivals(arrivals_as, named_rng(seed, "arrivals"), rate, duration=above_zero("duration", duration, "s"))
        if not times.size:
            raise InputError(f"no request arrives in {duration:g} s at {rate:g} requests/s with seed {seed}")
    inputs, outputs = _draw(lengths, seed, times.size)
    return Trace(arrival=times, input_tokens=inputs, output_tokens=outputs, name=name)


def drawn_pasts(prompts: Floats, reuse: Reuse, rng: np.random.Generator) -> Floats:
    """Draw the cached past of each prompt. [token]

    Parameters
    ----------
    prompts
        Lengths. [token]
    reuse
        Distribution of the cached share, and blocks of the cache.
    rng
        Where shares are not the same for all.

    Returns
    -------
    ndarray
        In whole blocks, at least a token less than the prompt. [token]

    Examples
    --------
    >>> rng, half = np.random.default_rng(1), Reuse(share=ConstantShare(share=0.5))
    >>> drawn_pasts(np.array([100.0, 64.0]), half, rng).tolist()
    [48.0, 32.0]
    """
    law = reuse.share
    if isinstance(law, ConstantShare):
        shares: Floats = np.full(prompts.size, law.share)
    elif isinstance(law, BetaShare):
        shares = rng.beta(law.alpha, law.beta, prompts.size)
    else:
        shares = np.interp(rng.random(prompts.size), law.probabilities, law.shares)
    return whole_blocks(np.minimum(shares * prompts, prompts - 1.0), reuse.block_tokens)


def _draw(lengths: Lengths, seed: int, count: int) -> tuple[Tokens, Tokens]:
    if isinstance(lengths, LengthTable | Trace):
        rows = named_rng(seed, "lengths").integers(lengths.input_tokens.size, size=count)
        return lengths.input_tokens[rows], lengths.output_tokens[rows]
    if isinstance(lengths, TrafficCase):
        lengths = (length_distribution(lengths.isl), length_distribution(lengths.osl))
    if not isinstance(lengths, tuple | list) or len(lengths) != 2:
        raise InputError(
            f"lengths {quoted(lengths)} are not a pair (input, output), case of a traffic, table of lengths or trace; "
            "of a traffic by name: load_traffic(name).cases[0]"
        )
    first, second = (_law(each, kind) for each, kind in zip(lengths, ("input", "output"), strict=True))
    return first.sample(named_rng(seed, "input_tokens"), count), second.sample(named_rng(seed, "output_tokens"), count)


def _law(length: int | LengthDistribution, kind: str) -> LengthDistribution:
    if isinstance(length, int | float):
        return Constant(tokens=whole_number(f"{kind} length", length))
    return length
