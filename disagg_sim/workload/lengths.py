r"""Lengths of requests: a joint distribution of input and output length, reduced to what steady serving needs.

Constant lengths are a distribution of one point. The pass of a prompt depends on its own length, so prefill needs the
distribution of the input length itself. A decode step depends on the requests in flight, and long requests are in
flight more often. A request with O output tokens gets its first token from prefill and stays for O - 1 steps, so among
the requests in flight at a random step the pair (I, O) has the *length-biased* probability

.. math:: p_{run}(I, O) = \frac{(O - 1)\, p(I, O)}{E[O] - 1}

and its age is uniform over the O - 1 steps, at any of which it holds I + 1 ... I + O - 1 tokens. With the age U uniform
on (0, O), as for constant lengths, its cache C = I + U has

.. math::
    E[C] = E_{run}[I + O/2], \qquad E[C^2] = E_{run}[I^2 + I O + O^2/3].

Constant lengths give mean I + O/2 and variance O^2/12. Little's law closes the loop: B requests in flight that each
stay (E[O] - 1) * TTL on average complete at the rate B/(TTL*(E[O] - 1)).
Source: physics page, section 8 (Length distributions).

Of a prompt a cache may hold the start (``workload.prefixes``): then prefill computes the rest, and decode is sent what
it does not hold itself. Residents and contexts are those of whole prompts.

Past 400 lines: the distribution and what makes it share their private forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats
from disagg_sim.choices import EVEN_RANKS, RANK_IMBALANCES
from disagg_sim.domain import ByValue
from disagg_sim.errors import InputError, nearest, quoted, whole_number
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import HBM, ConstantLength, ConstantShare, Reuse, TrafficCase
from disagg_sim.notebook import Shown
from disagg_sim.physics.rank_load import PieceLoads, RankLoad, RankLoads, RestLoads
from disagg_sim.physics.rank_sums import RANDOM, RequestLaw, request_law
from disagg_sim.physics.residents import CachedTokens, decode_residents
from disagg_sim.workload.distributions import LengthDistribution, length_distribution, nodes_of
from disagg_sim.workload.prefixes import CachedPrefixes, Prompts, cached_share, prefixes_of
from disagg_sim.workload.trace import Trace

#: A law is carried by its quantiles at normal scores within this many standard deviations ...
SCORE_LIMIT = 6.0
#: ... at this many places.
SCORES = 2049


@dataclass(frozen=True, eq=False, kw_only=True)
class Lengths(ByValue, Shown):
    """Joint distribution of (input, output) length, reduced to what steady serving needs; made by ``lengths``.

    Whatever a request may bring along (a reused prefix, say) is a field here and acts through the methods, so that no
    signature between here and the physics changes.
    """

    isl: Floats  # (points,) ascending input lengths that carry the law [token]
    isl_weight: Floats  # (points,) their probabilities, sum 1 [1]
    mean_osl: float  # [token]
    median_osl: float  # [token]
    resident: CachedTokens  # cache of a request in flight, in decode
    requests: RequestLaw  # joint distribution of input and output, of fewer points
    cached: CachedPrefixes | None = None  # what prefill finds of prompts; None = nothing
    rank_imbalance: str = ""  # how requests find their DP rank, of ``RANK_ROUTINGS``; "" = all ranks count as even

    @property
    def constant(self) -> bool:
        """Whether all inputs have one length, and one past, so that one pass gives the time of all."""
        return self.isl.size == 1 and (self.cached is None or self.cached.constant)

    @property
    def few(self) -> bool:
        """Whether few prompts stand for all, the same whatever the chunks."""
        return self.cached is not None and self.cached.few

    @property
    def mean_isl(self) -> float:
        """Expected input length. [token]"""
        return float(self.isl_weight @ self.isl)

    @property
    def mean_new(self) -> float:
        """Expected prompt tokens that prefill computes. [token]"""
        return self.mean_isl - self.mean_past

    @property
    def mean_past(self) -> float:
        """Expected prompt tokens that prefill finds in a cache. [token]"""
        return 0.0 if self.cached is None else self.cached.mean_past

    @property
    def isl_deviation(self) -> float:
        """Standard deviation of the input length. [token]"""
        return math.sqrt(float(self.isl_weight @ (self.isl - self.mean_isl) ** 2))

    @property
    def context(self) -> float:
        """Mean cache of a request in flight, at which a decode step is timed. [token]"""
        context: float = self.resident.mean
        return context

    @cached_property
    def rank_loads(self) -> RankLoads | None:
        """How unequal the DP ranks of an instance are; None where they count as even, or are."""
        if not self.rank_imbalance or (self.requests.even and self.rank_imbalance != RANDOM):
            return None
        return RankLoads(self.requests, self.rank_imbalance)

    def on_ranks(self, batch: Any, ranks: Any) -> RankLoad:
        """Find what the DP ranks hold that a decode step waits for.

        Parameters
        ----------
        batch : array_like
            Requests in flight of an instance. [request]
        ranks : array_like
            DP ranks of its attention. [1]

        Returns
        -------
        RankLoad
            Mean context, and an even share of the requests, unless ``rank_imbalance`` says how requests are routed.

        Examples
        --------
        >>> chat = lengths("log_normal_4096_512", rank_imbalance="least_load")
        >>> load = chat.on_ranks(512.0, 8.0)
        >>> f"{load.context / chat.context:.2f}", load.batch is None
        ('1.22', True)
        """
        return RankLoad(self.context) if self.rank_loads is None else self.rank_loads.decode(batch, ranks, self.context)

    def prompts_on_ranks(self, again: tuple[str, ...] = ()) -> RankLoads | RestLoads | None:
        """Find how unequal the prompts are that the DP ranks of a pass wait for.

        Parameters
        ----------
        again : tuple of str
            Tiers whose pasts are computed again in place of loaded.

        Returns
        -------
        RankLoads or RestLoads or None
            None where ranks count as even, or all prompts have one length and one past: then the prompts of a pass
            count as alike.

        Examples
        --------
        The longest of eight prompts has three mean lengths:

        >>> chat = lengths("log_normal_4096_512", rank_imbalance="least_load")
        >>> load = chat.prompts_on_ranks().prefill(8.0, 8.0)
        >>> f"{load.prompts * load.new / chat.mean_isl:.1f}"
        '3.0'
        """
        cached = self.cached
        if not self.rank_imbalance or (self.isl.size if cached is None else cached.isl.size) == 1:
            return None
        if cached is None or not cached.past.any():
            return self.rank_loads
        if again not in self._rest_loads:
            self._rest_loads[again] = RestLoads(*cached.computed(again))
        return self._rest_loads[again]

    @cached_property
    def pieces_on_ranks(self) -> PieceLoads | None:
        """How unequal the pasts of piggybacked pieces are; None where ranks count as even, or all prompts are alike."""
        if self.prompts_on_ranks() is None:
            return None
        nodes = self.prompt_nodes()
        return PieceLoads(nodes.new, nodes.past, nodes.weight)

    @cached_property
    def _rest_loads(self) -> dict[tuple[str, ...], RestLoads]:
        """Unequal ranks of passes behind cached pasts, by the tiers whose pasts are computed again."""
        return {}

    @property
    def gaps(self) -> float:
        """Expected output tokens after the first, which decode makes: ``E[OSL] - 1``. [token]"""
        return self.mean_osl - 1

    @cached_property
    def prompt(self) -> CachedTokens:
        """Cache of a prompt in prefill, counted whole from its start. [token]"""
        whole = CachedTokens(mean=self.mean_isl, deviation=self.isl_deviation, most=float(self.isl[-1]))
        if self.cached is None:
            return whole
        new, weight = self.cached.new, self.cached.weight
        deviation = math.sqrt(float(weight @ (new - self.mean_new) ** 2))
        return replace(whole, computed=CachedTokens(mean=self.mean_new, deviation=deviation, most=float(new.max())))

    @property
    def long_prompt(self) -> tuple[float, float]:
        """Prompt that makes the largest gap, and its past: all have it, or 99 of 100 are no longer. [token]"""
        return (self.mean_isl, self.mean_isl - self.mean_new) if self.constant else self.prompt_quantile(0.99)

    @cached_property
    def longest_timed(self) -> float:
        """Most new tokens of a prompt whose passes are timed; only chunks below them are tried. [token]"""
        return float(self.prompt_nodes().new.max())

    def request_rate(self, batch: Any, ttl: Any) -> Any:
        """Requests that ``batch`` requests in flight complete at a token-to-token latency. [request/s]

        Parameters
        ----------
        batch : array_like
            Requests in flight. [request]
        ttl : array_like
            Mean token-to-token latency. [s]

        Returns
        -------
        number or ndarray, shape of ``batch`` and ``ttl`` broadcast
            ``B/(TTL*(E[OSL] - 1))``: the first token comes from prefill.

        Examples
        --------
        >>> lengths(1000, 101).request_rate(20, 0.01)
        20.0
        """
        return batch / (ttl * self.gaps)

    def mean_over_prompts(self, of: Callable[[float], float]) -> float:
        """Expected value of a function of the tokens that decode is sent [token], such as the bytes of their cache."""
        tokens, weight = self.isl, self.isl_weight
        if self.cached is not None and self.cached.reuse.in_decode:
            tokens, weight = nodes_of(self.cached.sent, self.cached.weight)
        return float(weight @ np.array([of(each) for each in tokens.tolist()]))

    def prompt_nodes(self, step: float = 0.0) -> Prompts:
        """Prompts, with what is cached of them, and weights that integrate over the joint distribution.

        Parameters
        ----------
        step
            Width of the stairs of a function of the new tokens, as in ``isl_nodes``. [token]

        Returns
        -------
        Prompts
            Arrays of shape (nodes,). [token], [1]

        Examples
        --------
        >>> nodes = lengths(65_536, 1024, cached=0.9).prompt_nodes()
        >>> nodes.new.tolist(), nodes.past.tolist()
        ([6560.0], [58976.0])
        """
        if self.cached is not None:
            return self.cached.nodes(step)
        isl, weight = self.isl_nodes(step)
        return Prompts(isl, np.zeros_like(isl), weight, (HBM,) * isl.size)

    def prompt_quantile(self, p: float) -> tuple[float, float]:
        """Length and past of the prompt whose new tokens a share ``p`` of the requests does not exceed. [token]"""
        isl = self.isl_quantile(p)
        return (isl, 0.0) if self.cached is None else self.cached.quantile(p)

    def at_whole(self, tokens: int) -> Lengths:
        """The same requests where a cached prefix can be taken up at multiples of ``tokens`` alone."""
        if self.cached is None or tokens == 1:
            return self
        return replace(self, cached=self.cached.at_whole(tokens))

    def isl_quantile(self, p: float) -> float:
        """Input length that a share ``p`` of the requests does not exceed. [token]"""
        if not 0.0 < p < 1.0:
            raise InputError(f"quantile {p!r} is out of range; allowed: above 0 and below 1")
        return float(np.interp(p, np.cumsum(self.isl_weight) - self.isl_weight / 2, self.isl))

    def at_medians(self) -> Lengths:
        """Equivalent constant lengths: the power of two nearest the median of each, at least two outputs.

        References: Mitra et al., arXiv 2506.05508, appendix C.
        """
        isl, osl = nearest_power_of_two(self.isl_quantile(0.5)), nearest_power_of_two(self.median_osl)
        return self.at(isl, max(osl, 2))

    def at_means(self) -> Lengths:
        """Constant lengths at the means of the distribution, rounded to whole tokens."""
        return self.at(round(self.mean_isl), round(self.mean_osl))

    def at(self, isl: float, osl: float) -> Lengths:
        """Constant lengths of which caches hold the same share, on average. [token]"""
        plain = replace(lengths_at(isl, osl), rank_imbalance=self.rank_imbalance)
        if self.cached is None:
            return plain
        share = ConstantShare(share=1.0 - self.mean_new / self.mean_isl)
        return with_cached(plain, replace(self.cached.reuse, share=share))

    def isl_nodes(self, step: float = 0.0) -> tuple[Floats, Floats]:
        """Ascending input lengths and weights that integrate over the distribution; both (nodes,). [token], [1]

        Of a smooth function (``step`` 0) by Gauss quadrature of the law of ln(ISL) with ``NODES`` points: exact for
        polynomials of degree 2*NODES - 1 in it. One node where the length is constant. A function with stairs jumps or
        bends at the multiples of ``step`` (``distributions.nodes_of``).
        """
        return nodes_of(self.isl, self.isl_weight, step)


@overload
def lengths(
    isl: str | TrafficCase | Trace, *, cached: float | Reuse | ArrayLike | None = None, rank_imbalance: str = ...
) -> Lengths: ...
@overload
def lengths(
    isl: ArrayLike, osl: ArrayLike, *, cached: float | Reuse | ArrayLike | None = None, rank_imbalance: str = ...
) -> Lengths: ...
def lengths(isl: Any, osl: Any = None, *, cached: Any = None, rank_imbalance: str = EVEN_RANKS) -> Lengths:
    """Make the distribution of the lengths of requests, from numbers, a traffic or a trace.

    Parameters
    ----------
    isl, osl : int
        Constant input and output length, from 1 and from 2. [token]
    isl, osl : arrays, shape (requests,)
        Input and output length of every request, at least 1: their empirical joint law, correlation kept. [token]
    isl : str or TrafficCase
        The name of a shipped traffic of one case, or a case of ``load_traffic(name).cases``: input and output drawn
        independently from their laws.
    isl : Trace
        The empirical joint law of its requests.
    cached : float or Reuse, optional
        Share of every prompt that prefill finds in a cache, from 0 to 1, or a distribution of that share, independent
        of the length, with the blocks of the cache and what decode holds already. By default what the traffic says, or
        nothing. [1]
    cached : array, shape (requests,)
        Beside lengths of every request, or a trace: the tokens of each that are found, fewer than its input. [token]
    rank_imbalance : str
        How a request finds its DP rank, for how long ranks wait for each other: as in ``uneven``.

    Returns
    -------
    Lengths

    Raises
    ------
    InputError, UnknownNameError
        Lengths out of range, a mean output below 2 tokens, a traffic of several cases, an unknown name.

    Examples
    --------
    >>> lengths(16_384, 2_048).context
    17408.0
    >>> chat = lengths("log_normal_4096_512")
    >>> round(chat.mean_isl), round(chat.mean_osl), round(chat.context)
    (6653, 740, 7428)
    """
    return uneven(_lengths(isl, osl, cached), rank_imbalance)


def _lengths(isl: Any, osl: Any, cached: Any) -> Lengths:
    if np.ndim(cached):
        if isinstance(isl, Trace):
            isl, osl = isl.input_tokens, isl.output_tokens
        return observed_lengths(isl, osl, cached)
    if cached is not None:
        return with_cached(_lengths(isl, osl, None), reuse_of(cached))
    if osl is not None:
        return observed_lengths(isl, osl) if np.ndim(isl) or np.ndim(osl) else constant_lengths(isl, osl)
    if isinstance(isl, Trace):
        return observed_lengths(isl.input_tokens, isl.output_tokens)
    if isinstance(isl, str):
        cases = load_traffic(isl).cases
        if len(cases) != 1:
            raise InputError(f"traffic {isl} has {len(cases)} cases; allowed: a traffic of one case")
        isl = cases[0]
    if not isinstance(isl, TrafficCase):
        raise InputError(f"lengths {quoted(isl)}; allowed: input and output length, a traffic, a case of one, a trace")
    if isinstance(isl.isl, ConstantLength) and isinstance(isl.osl, ConstantLength):
        drawn = constant_lengths(isl.isl.tokens, isl.osl.tokens)
    else:
        drawn = independent_lengths(length_distribution(isl.isl), length_distribution(isl.osl))
    return drawn if isl.cached is None else with_cached(drawn, isl.cached)


def reuse_of(cached: object) -> Reuse:
    """Read what caches hold of prompts.

    >>> reuse_of(0.9).share
    ConstantShare(share=0.9)
    """
    if isinstance(cached, Reuse):
        return cached
    if isinstance(cached, bool) or not isinstance(cached, int | float) or not 0.0 <= cached <= 1.0:
        raise InputError(f"cached {quoted(cached)} is no share of prompts; allowed: from 0 to 1, or a Reuse")
    return Reuse(share=ConstantShare(share=float(cached)))


def with_cached(plain: Lengths, reuse: Reuse) -> Lengths:
    """Let caches hold a share of the prompts.

    Returns the same ones where the share is 0.

    >>> found = with_cached(lengths(16_384, 1024), reuse_of(0.5))
    >>> found.mean_isl, found.mean_new, found.context
    (16384.0, 8192.0, 16896.0)
    """
    return replace(plain, cached=None if reuse.off else cached_share(plain.isl, plain.isl_weight, reuse))


def uneven(plain: Lengths, rank_imbalance: str) -> Lengths:
    """Let DP ranks be as unequal as their requests make them.

    Takes ``rank_imbalance`` (how a request finds its DP rank: ``least_load`` (the rank with the fewest, as vLLM),
    ``round_robin`` (as SGLang), ``random``, or ``even``: all ranks count as equally full).

    >>> uneven(lengths(1024, 128), "random").rank_imbalance
    'random'
    """
    if rank_imbalance not in RANK_IMBALANCES:
        known = ", ".join(RANK_IMBALANCES)
        said = f"rank_imbalance {quoted(rank_imbalance)} is unknown{nearest(rank_imbalance, RANK_IMBALANCES)}"
        raise InputError(f"{said}; allowed: {known}")
    return replace(plain, rank_imbalance="" if rank_imbalance == EVEN_RANKS else rank_imbalance)


def constant_lengths(isl: int, osl: int) -> Lengths:
    """The distribution of one point. [token]"""
    return lengths_at(whole_number("isl", isl), whole_number("osl", osl, 2, ": one output token is prefill only"))


def lengths_at(isl: float, osl: float) -> Lengths:
    """Make the distribution of one point that need not be whole, such as the means of another one.

    Returns constant lengths; a decode step is timed at a cache of ``isl + osl/2`` [token].

    >>> lengths_at(1000.5, 101).context, lengths_at(1000.5, 101).gaps
    (1051.0, 100.0)
    """
    return Lengths(
        isl=np.array([float(isl)]),
        isl_weight=np.ones(1),
        mean_osl=float(osl),
        median_osl=float(osl),
        resident=decode_residents(isl, osl),
        requests=request_law(np.array([float(isl)]), np.array([float(osl)])),
    )


def independent_lengths(isl: LengthDistribution, osl: LengthDistribution) -> Lengths:
    """Input and output length drawn independently; lengths below one token count as one."""
    inputs, weight = _carrier(isl)
    outputs, share = _carrier(osl)
    mean_osl = float(share @ outputs)
    _check_steps(mean_osl)
    steps = share * (outputs - 1) / (mean_osl - 1)  # length-biased
    first, second = float(steps @ outputs), float(steps @ outputs**2)
    mean_isl = float(weight @ inputs)
    variance = float(weight @ (inputs - mean_isl) ** 2) + second / 3 - first**2 / 4
    return Lengths(
        isl=inputs,
        isl_weight=weight,
        mean_osl=mean_osl,
        median_osl=max(osl.quantile(0.5), 1.0),
        resident=CachedTokens(
            mean=mean_isl + first / 2, deviation=math.sqrt(variance), most=float(inputs[-1] + outputs[-1])
        ),
        requests=RequestLaw(isl=inputs, isl_weight=weight, osl=outputs, osl_weight=share),
    )


def observed_lengths(isl: ArrayLike, osl: ArrayLike, past: ArrayLike | None = None) -> Lengths:
    """The empirical joint distribution of requests of these lengths and pasts; arrays of shape (requests,). [token]"""
    inputs, outputs = np.asarray(isl, dtype=np.float64), np.asarray(osl, dtype=np.float64)
    if inputs.ndim != 1 or inputs.shape != outputs.shape or not inputs.size:
        raise InputError(f"isl of shape {inputs.shape} and osl of shape {outputs.shape} are not a list of requests")
    if not (inputs.min() >= 1 and outputs.min() >= 1):
        raise InputError(f"lengths of {min(inputs.min(), outputs.min()):g} tokens are out of range; allowed: from 1")
    mean_osl = float(outputs.mean())
    _check_steps(mean_osl)
    steps = (outputs - 1) / np.sum(outputs - 1)  # length-biased
    context = float(steps @ (inputs + outputs / 2))
    variance = float(steps @ ((inputs + outputs / 2 - context) ** 2 + outputs**2 / 12))
    values, counts = np.unique(inputs, return_counts=True)
    return Lengths(
        isl=values,
        isl_weight=counts / inputs.size,
        mean_osl=mean_osl,
        median_osl=float(np.median(outputs)),
        resident=CachedTokens(mean=context, deviation=math.sqrt(variance), most=float(np.max(inputs + outputs))),
        requests=request_law(inputs, outputs),
        cached=None if past is None else prefixes_of(inputs, past),
    )


def nearest_power_of_two(tokens: float) -> int:
    """Round a length to the power of two whose logarithm is nearest.

    The result is at least 1 [token].

    >>> nearest_power_of_two(1020), nearest_power_of_two(129)
    (1024, 128)
    """
    return 1 << max(round(math.log2(tokens)), 0)


def _check_steps(mean_osl: float) -> None:
    if not mean_osl >= 2:
        raise InputError(f"mean osl {mean_osl:g} is out of range; allowed: 2 tokens or more (one is prefill only)")


def _carrier(law: LengthDistribution) -> tuple[Floats, Floats]:
    """Ascending lengths and probabilities that represent a distribution: its quantiles at even normal scores."""
    if isinstance(law, ConstantLength):
        return np.array([float(law.tokens)]), np.ones(1)
    score, normal = np.linspace(-SCORE_LIMIT, SCORE_LIMIT, SCORES), NormalDist()
    weight = np.exp(-(score**2) / 2)
    lengths = np.array([max(law.quantile(normal.cdf(z)), 1.0) for z in score.tolist()])
    return lengths, weight / weight.sum()
