"""Make synthetic traces: an arrival process at a rate, with lengths from distributions or tables; sessions of turns.

>>> trace = synthetic_trace(rate=2.0, requests=1000, lengths=(512, 64), seed=1)
>>> len(trace), int(trace.input_tokens[0]), trace.notes
(1000, 512, ())

Sessions have turns with a growing context, think and tool time between them, and blocks that turns share:

>>> from disagg_sim.facts.load import load_traffic
>>> trace = session_trace(load_traffic("coding_agent"), rate=0.1, sessions=50, seed=1)
>>> int((trace.sessions.previous() < 0).sum()), trace.prefix.block_tokens
(50, 512)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.errors import InputError, above_zero, quoted, whole_number
from disagg_sim.facts.traffic import BetaShare, ConstantShare, Reuse, SessionSpec, TrafficCase, TrafficSpec
from disagg_sim.memory import require_memory
from disagg_sim.workload.arrivals import ArrivalProcess, Poisson, arrivals, arrivals_in_pieces, named_rng
from disagg_sim.workload.distributions import Constant, LengthDistribution, LogNormal, length_distribution, whole_blocks
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions, Tokens, read_only
from disagg_sim.workload.stream import Piece, TraceStream
from disagg_sim.workload.trace import MOST_REQUESTS, Trace, too_many


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
        ``Poisson()``, ``Gamma(cv)`` or ``Mmpp(...)`` of ``workload.arrivals``.
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
    end = _end_of("requests", requests, duration)
    times = arrivals(arrivals_as, named_rng(seed, "arrivals"), above_zero("rate", rate, "requests/s"), **end)
    if not times.size:
        raise InputError(f"no request arrives in {duration:g} s at {rate:g} requests/s with seed {seed}")
    inputs, outputs = _drawer(lengths, seed)(times.size)
    return Trace(arrival=times, input_tokens=inputs, output_tokens=outputs, name=name)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Drawn:
    """Requests that are drawn as they are needed."""

    rate: float  # [request/s]
    lengths: Lengths
    end: Mapping[str, Any]  # requests [request] or duration [s], by name
    process: ArrivalProcess
    seed: int

    def pieces(self, most: int) -> Iterator[Piece]:
        """See ``stream.RequestSource``."""
        draw = _drawer(self.lengths, self.seed)
        rng = named_rng(self.seed, "arrivals")
        for times in arrivals_in_pieces(self.process, rng, self.rate, **self.end, most=most):
            yield Piece(times, *draw(times.size))


def synthetic_stream(
    *,
    rate: float,
    lengths: Lengths,
    requests: int | None = None,
    duration: float | None = None,
    arrivals_as: ArrivalProcess = Poisson(),  # noqa: B008 - frozen, no state
    seed: int = 0,
    name: str = "synthetic",
    window: int,
) -> TraceStream:
    """Draw the requests of ``synthetic_trace`` as they are needed, so that they are never held together.

    Parameters
    ----------
    rate, lengths, requests, duration, arrivals_as, seed, name
        As of ``synthetic_trace``; there may be more requests than a trace may have.
    window
        Requests that are held at a time; no number depends on it. [request]

    Returns
    -------
    TraceStream
        For ``simulate`` with ``records`` ``stream`` or ``none``.

    Raises
    ------
    InputError
        As ``synthetic_trace``, or a window below 1; where a time without requests shows only when they are drawn, then.

    Examples
    --------
    >>> drawn = {"rate": 2.0, "lengths": (512, 64), "requests": 1000, "seed": 1}
    >>> stream, trace = synthetic_stream(**drawn, window=300), synthetic_trace(**drawn)
    >>> [len(window) for window in stream.windows()], bool((stream.whole().arrival == trace.arrival).all())
    ([300, 300, 300, 100], True)
    """
    end = _end_of("requests", requests, duration)
    drawn = _Drawn(
        rate=above_zero("rate", rate, "requests/s"), lengths=lengths, end=end, process=arrivals_as, seed=seed
    )
    _drawer(lengths, seed)
    return TraceStream(name=name, window=window, source=drawn)


def _end_of(what: str, count: int | None, duration: float | None) -> dict[str, Any]:
    """When arrivals of requests, or sessions, end, as ``arrivals`` takes it."""
    if (count is None) == (duration is None):
        raise InputError(f"a synthetic trace needs {what} or duration, one of them")
    if count is not None:
        return {"requests": whole_number(what, count)}
    return {"duration": above_zero("duration", duration, "s")}


def drawn_pasts(prompts: Floats, reuse: Reuse, rng: np.random.Generator) -> Floats:
    """Draw the cached past of each prompt. [token]"""
    law = reuse.share
    if isinstance(law, ConstantShare):
        shares: Floats = np.full(prompts.size, law.share)
    elif isinstance(law, BetaShare):
        shares = rng.beta(law.alpha, law.beta, prompts.size)
    else:
        shares = np.interp(rng.random(prompts.size), law.probabilities, law.shares)
    return whole_blocks(np.minimum(shares * prompts, prompts - 1.0), reuse.block_tokens)


def _drawer(lengths: Lengths, seed: int) -> Callable[[int], tuple[Tokens, Tokens]]:
    """Draws the next so many pairs of lengths; in how many calls makes no difference."""
    if isinstance(lengths, LengthTable | Trace):
        rng, table = named_rng(seed, "lengths"), lengths

        def pairs(count: int) -> tuple[Tokens, Tokens]:
            rows = rng.integers(table.input_tokens.size, size=count)
            return table.input_tokens[rows], table.output_tokens[rows]

        return pairs
    if isinstance(lengths, TrafficCase):
        lengths = (length_distribution(lengths.isl), length_distribution(lengths.osl))
    if not isinstance(lengths, tuple | list) or len(lengths) != 2:
        raise InputError(
            f"lengths {quoted(lengths)} are not a pair (input, output), case of a traffic, table of lengths or trace; "
            "of a traffic by name: load_traffic(name).cases[0]"
        )
    first, second = (_law(each, kind) for each, kind in zip(lengths, ("input", "output"), strict=True))
    streams = named_rng(seed, "input_tokens"), named_rng(seed, "output_tokens")
    return lambda count: (first.sample(streams[0], count), second.sample(streams[1], count))


def _law(length: int | LengthDistribution, kind: str) -> LengthDistribution:
    if isinstance(length, int | float):
        return Constant(tokens=whole_number(f"{kind} length", length))
    return length


#: Tokens of a block of the prompts, as in Mooncake's traces. [token]
BLOCK_TOKENS = 512
#: Memory that takes a block of a prompt as it is drawn, at its peak. [B]
BLOCK_BYTES = 64.0


def session_trace(
    traffic: TrafficSpec,
    *,
    rate: float,
    sessions: int | None,
    duration: float | None = None,
    arrivals_as: ArrivalProcess = Poisson(),  # noqa: B008 - frozen, no state
    seed: int = 0,
    name: str = "sessions",
) -> Trace:
    """Draw sessions of a traffic, so many, or all that begin up to a time [s].

    A session begins with a prompt of ``session.first`` tokens, of which all sessions share ``session.shared_tokens``
    (system prompt and tools). Each later prompt is the one before and ``session.growth`` tokens: the answer, as far as
    it stays in the context, and what a person or a tool adds. All are drawn independently; answers are those of the
    first case.
    """
    law = traffic.session
    if law is None:
        raise InputError(f"traffic {traffic.name} has no sessions; allowed: one with the key 'session'")
    end, rate = _end_of("sessions", sessions, duration), above_zero("rate", rate, "sessions/s")
    begin = arrivals(arrivals_as, named_rng(seed, "arrivals"), rate, **end)
    if not begin.size:
        raise InputError(f"no session begins in {duration:g} s at {rate:g} sessions/s with seed {seed}")
    turns = length_distribution(law.turns).sample(named_rng(seed, "turns"), begin.size)
    if (count := float(turns.sum(dtype=float))) > MOST_REQUESTS:
        raise InputError(too_many(f"turns of {begin.size:,} sessions", count))
    ends = np.cumsum(turns)
    session, first = np.repeat(np.arange(begin.size), turns), np.zeros(ends[-1], dtype=bool)
    first[ends - turns] = True
    drawn = named_rng(seed, "think_s").random(first.size)
    think = np.interp(drawn, law.think_s.probabilities, law.think_s.seconds)
    think[first] = 0.0
    inputs = _prompts(law, first, seed)
    require_memory(f"a trace of {begin.size:,} sessions", BLOCK_BYTES * float(inputs.sum(dtype=float)) / BLOCK_TOKENS)
    outputs = length_distribution(traffic.cases[0].osl).sample(named_rng(seed, "output_tokens"), first.size)
    waited = np.cumsum(think)
    arrival = np.repeat(begin - waited[ends - turns], turns) + waited
    order = np.argsort(arrival, kind="stable")
    return Trace(
        arrival=arrival[order],
        input_tokens=inputs[order],
        output_tokens=outputs[order],
        prefix=_blocks(inputs, session, law.shared_tokens).take(order),
        sessions=Sessions(session=session[order], think_s=think[order]),
        name=name,
    )


def _prompts(law: SessionSpec, first: Mask, seed: int) -> Ints:
    """Length of every prompt, by session and turn. [token]"""
    grown = length_distribution(law.growth).sample(named_rng(seed, "growth"), first.size)
    grown[first] = length_distribution(law.first).sample(named_rng(seed, "first"), int(first.sum()))
    total = np.cumsum(grown)
    before = np.where(first, total - grown, 0)
    return total - np.maximum.accumulate(before)


def _blocks(inputs: Ints, session: Ints, shared_tokens: int) -> PrefixBlocks:
    """Whole blocks of each prompt: those of the shared start from 0 on, then those of its session."""
    counts = inputs // BLOCK_TOKENS
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    ids = np.repeat(session + 1, counts) * (int(counts.max(initial=0)) + 1) + place
    return PrefixBlocks(
        offsets=offsets, ids=np.where(place < shared_tokens // BLOCK_TOKENS, place, ids), block_tokens=BLOCK_TOKENS
    )
