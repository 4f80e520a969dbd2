r"""Make the joint distribution of input and output length, reduced to the moments that steady serving needs.

Constant lengths are a distribution of one point. Prefill of a prompt depends on its own length, so it needs the
distribution of the input length. A decode step depends on the requests in flight, among which long ones are more
frequent: a request with O output tokens gets its first token from prefill and decodes for O - 1 steps. At a random step
the pair (I, O) of a request in flight has the *length-biased* probability

.. math:: p_{run}(I, O) = \frac{(O - 1)\, p(I, O)}{E[O] - 1}

and its age is uniform over the O - 1 steps, so its cache has I + 1 ... I + O - 1 tokens. With the age U uniform on
(0, O), as for constant lengths, its cache C = I + U has

.. math::
    E[C] = E_{run}[I + O/2], \qquad E[C^2] = E_{run}[I^2 + I O + O^2/3].

Constant lengths give mean I + O/2 and variance O^2/12. By Little's law B requests in flight, each for
(E[O] - 1) * TTL on average, complete at the rate B/(TTL*(E[O] - 1)).
Source: physics page, section 8 (Length distributions).

A cache may hold the start of a prompt (``techniques.prefix.requests``). Prefill then computes the rest and sends
decode the part of the cache that decode lacks; the cache of a request in flight counts whole.

Past 400 lines: the distribution and its constructors share private functions.
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
from disagg_sim.choices import EVEN_RANKS, RANDOM, RANK_IMBALANCES
from disagg_sim.domain import ByValue
from disagg_sim.errors import InputError, nearest, quoted, whole_number
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import HBM, ConstantLength, ConstantShare, Reuse, TrafficCase
from disagg_sim.notebook import Shown
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.residents import CachedTokens, RankLoad, decode_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.techniques.prefix.requests import CachedPrefixes, cached_share, prefixes_of
from disagg_sim.techniques.ranks.physics import PieceLoads, RankLoads, RestLoads
from disagg_sim.techniques.ranks.physics_sums import RequestLaw, request_law
from disagg_sim.workload.distributions import (
    NODES,
    LengthDistribution,
    PromptParts,
    Prompts,
    length_distribution,
    nodes_of,
)
from disagg_sim.workload.trace import Trace

#: A distribution is represented by quantiles at normal scores within this many standard deviations,
SCORE_LIMIT = 6.0
#: this many of them. [1]
SCORES = 2049


@dataclass(frozen=True, eq=False, kw_only=True)
class Lengths(ByValue, Shown):
    """Joint distribution of (input, output) length, reduced to moments; made by ``lengths``.

    Further properties of requests, such as a cached prefix, are fields here and act through the methods.
    """

    isl: Floats  # (points,) ascending input lengths [token]
    isl_weight: Floats  # (points,) their probabilities, sum 1 [1]
    mean_osl: float  # [token]
    median_osl: float  # [token]
    resident: CachedTokens  # cache of a request in flight, in decode
    requests: RequestLaw  # joint distribution of input and output length, in fewer points
    cached: CachedPrefixes | None = None  # cached part of prompts in prefill; None = nothing
    rank_imbalance: str = ""  # routing to DP ranks, of ``RANK_ROUTINGS``; "" = ranks count as equally full

    @property
    def constant(self) -> bool:
        """Whether all prompts have one length and one cached part, so that one pass gives the time of all."""
        return self.isl.size == 1 and (self.cached is None or self.cached.constant)

    @property
    def few(self) -> bool:
        """Whether a few prompts represent all, for any chunk size."""
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
        """Mean cache of a request in flight, for the time of a decode step. [token]"""
        context: float = self.resident.mean
        return context

    @cached_property
    def rank_loads(self) -> RankLoads | None:
        """Imbalance of the DP ranks of an instance; None where ranks count as equal, or are."""
        if not self.rank_imbalance or (self.requests.even and self.rank_imbalance != RANDOM):
            return None
        return RankLoads(self.requests, self.rank_imbalance)

    def on_ranks(self, batch: Any, ranks: Any) -> RankLoad:
        """Find the load of the DP ranks that a decode step waits for, of ``batch`` requests [request].

        >>> chat = lengths("log_normal_4096_512", rank_imbalance="least_load")
        >>> load = chat.on_ranks(512.0, 8.0)
        >>> f"{load.context / chat.context:.2f}", load.batch is None
        ('1.22', True)
        """
        return RankLoad(self.context) if self.rank_loads is None else self.rank_loads.decode(batch, ranks, self.context)

    def prompts_on_ranks(self, again: tuple[str, ...] = ()) -> RankLoads | RestLoads | None:
        """Find the imbalance of prompts over the DP ranks of a pass; None where prompts are alike, or ranks equal.

        The longest of eight prompts is three times the mean:

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
        """Imbalance of the cached tokens of piggybacked chunks; None as in ``prompts_on_ranks``."""
        if self.prompts_on_ranks() is None:
            return None
        nodes = self.prompt_nodes()
        return PieceLoads(nodes.new, nodes.past, nodes.weight)

    @cached_property
    def _rest_loads(self) -> dict[tuple[str, ...], RestLoads]:
        """Results of ``prompts_on_ranks`` by its argument."""
        return {}

    @property
    def gaps(self) -> float:
        """Expected output tokens of decode, all but the first: ``E[OSL] - 1``. [token]"""
        return self.mean_osl - 1

    @cached_property
    def prompt(self) -> CachedTokens:
        """Cache of a prompt in prefill, its full length from the start of the pass. [token]"""
        whole = CachedTokens(mean=self.mean_isl, deviation=self.isl_deviation, most=float(self.isl[-1]))
        if self.cached is None:
            return whole
        new, weight = self.cached.new, self.cached.weight
        deviation = math.sqrt(float(weight @ (new - self.mean_new) ** 2))
        return replace(whole, computed=CachedTokens(mean=self.mean_new, deviation=deviation, most=float(new.max())))

    @property
    def long_prompt(self) -> tuple[float, float]:
        """Length and cached tokens of the prompt that delays decodes most, at the 99th percentile. [token]"""
        return (self.mean_isl, self.mean_isl - self.mean_new) if self.constant else self.prompt_quantile(0.99)

    @cached_property
    def longest_timed(self) -> float:
        """Most new tokens of a timed prompt; searches try smaller chunks only. [token]"""
        return float(self.prompt_nodes().new.max())

    def request_rate(self, batch: Any, ttl: Any) -> Any:
        """Compute the rate at which ``batch`` requests in flight complete at a latency ``ttl`` [s]. [request/s]

        ``B/(TTL*(E[OSL] - 1))``: the first token comes from prefill.

        >>> lengths(1000, 101).request_rate(20, 0.01)
        20.0
        """
        return batch / (ttl * self.gaps)

    def mean_over_prompts(self, of: Callable[[float], float]) -> float:
        """Average a function of the tokens sent to decode [token], such as the bytes of their cache."""
        tokens, weight = self.isl, self.isl_weight
        if self.cached is not None and self.cached.reuse.in_decode:
            tokens, weight = nodes_of(self.cached.sent, self.cached.weight)
        return float(weight @ np.array([of(each) for each in tokens.tolist()]))

    def prompt_nodes(self, step: float = 0.0) -> Prompts:
        """Return prompts with cached parts, and weights that integrate over the joint distribution. [token], [1]

        >>> nodes = lengths(65_536, 1024, cached=0.9).prompt_nodes()
        >>> nodes.new.tolist(), nodes.past.tolist()
        ([6560.0], [58976.0])
        """
        if step not in self._nodes:
            if self.cached is not None:
                self._nodes[step] = self.cached.nodes(step)
            else:
                isl, weight = self.isl_nodes(step)
                self._nodes[step] = Prompts(isl, np.zeros_like(isl), weight, (HBM,) * isl.size)
        return self._nodes[step]

    @cached_property
    def _nodes(self) -> dict[float, Prompts]:
        """What ``prompt_nodes`` found, by its steps: a search asks for each of its points."""
        return {}

    @cached_property
    def prompt_parts(self) -> PromptParts | None:
        """Parts of all prompts, for quantiles of times that grow with the length; None where few lengths are all.

        >>> parts = lengths("log_normal_4096_512").prompt_parts
        >>> parts.isl[[3, 7, 10]].round().tolist()  # the median, 90 and 99 %
        [4096.0, 14497.0, 40500.0]
        """
        if self.cached is not None or self.isl.size <= NODES:
            return None
        return PromptParts.of(self.isl, self.isl_weight, self.isl_nodes()[0])

    def prompt_quantile(self, p: float) -> tuple[float, float]:
        """Length and cached tokens of the prompt at the quantile ``p`` of new tokens. [token]"""
        isl = self.isl_quantile(p)
        return (isl, 0.0) if self.cached is None else self.cached.quantile(p)

    def at_checkpoints(self, at: Setup) -> Lengths:
        """Return the same requests with cached prefixes that the layers of a model let prompts take up again.

        Examples
        --------
        >>> from disagg_sim.physics.setup import setup
        >>> models, reused = ("llama_3_1_70b", "qwen3_next_80b_a3b"), lengths(65_536, 1024, cached=0.9)
        >>> [reused.at_checkpoints(setup(name, "h200_sxm", "fp8")).mean_past for name in models]
        [58976.0, 58688.0]
        """
        tokens = checkpoint_tokens(at.model, at.precision)
        if self.cached is None or tokens == 1:
            return self
        return replace(self, cached=replace(self.cached, past=np.floor(self.cached.past / tokens) * tokens))

    def isl_quantile(self, p: float) -> float:
        """Quantile ``p`` of the input length. [token]"""
        if not 0.0 < p < 1.0:
            raise InputError(f"quantile {p!r} is out of range; allowed: above 0 and below 1")
        return float(np.interp(p, np.cumsum(self.isl_weight) - self.isl_weight / 2, self.isl))

    def at_medians(self) -> Lengths:
        """Return constant lengths at the powers of two nearest the medians, at least two outputs.

        References: Mitra et al., arXiv 2506.05508, appendix C.
        """
        isl, osl = nearest_power_of_two(self.isl_quantile(0.5)), nearest_power_of_two(self.median_osl)
        return self.at(isl, max(osl, 2))

    def at_means(self) -> Lengths:
        """Return constant lengths at the means, rounded to whole tokens."""
        return self.at(round(self.mean_isl), round(self.mean_osl))

    def at(self, isl: float, osl: float) -> Lengths:
        """Return constant lengths with the same mean cached share. [token]"""
        plain = replace(lengths_at(isl, osl), rank_imbalance=self.rank_imbalance)
        if self.cached is None:
            return plain
        share = ConstantShare(share=1.0 - self.mean_new / self.mean_isl)
        return with_cached(plain, replace(self.cached.reuse, share=share))

    def isl_nodes(self, step: float = 0.0) -> tuple[Floats, Floats]:
        """Return ascending input lengths and weights that integrate over the distribution; both (nodes,). [token], [1]

        ``step`` 0, for smooth functions: Gauss quadrature over ln(ISL) with ``NODES`` points. Otherwise the function
        may jump or bend at multiples of ``step`` (``distributions.nodes_of``). Constant lengths have one node.
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
        Input and output length of every request, at least 1: their empirical joint distribution. [token]
    isl : str or TrafficCase
        A shipped traffic of one case, or a case of ``load_traffic(name).cases``: independent input and output.
    isl : Trace
        The empirical joint distribution of its requests.
    cached : float or Reuse, optional
        Share of every prompt that prefill finds in a cache, or a distribution of that share with further details of
        the cache; by default the share of the traffic, if any. [1]
    cached : array, shape (requests,)
        With lengths of every request, or a trace: cached tokens of each, fewer than its input. [token]
    rank_imbalance : str
        Routing to DP ranks, as in ``uneven``.

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
    """Read the cached share of prompts."""
    if isinstance(cached, Reuse):
        return cached
    if isinstance(cached, bool) or not isinstance(cached, int | float) or not 0.0 <= cached <= 1.0:
        raise InputError(f"cached {quoted(cached)} is no share of prompts; allowed: from 0 to 1, or a Reuse")
    return Reuse(share=ConstantShare(share=float(cached)))


def with_cached(plain: Lengths, reuse: Reuse) -> Lengths:
    """Add a cached share of the prompts."""
    return replace(plain, cached=None if reuse.off else cached_share(plain.isl, plain.isl_weight, reuse))


def uneven(plain: Lengths, rank_imbalance: str) -> Lengths:
    """Route requests to DP ranks by ``rank_imbalance``, which makes the ranks unequal.

    ``least_load`` (the rank with the fewest requests, as vLLM), ``round_robin`` (as SGLang), ``random``, or ``even``:
    all ranks count as equally full.
    """
    if rank_imbalance not in RANK_IMBALANCES:
        hint = nearest(rank_imbalance, RANK_IMBALANCES)
        known = ", ".join(RANK_IMBALANCES)
        raise InputError(f"rank_imbalance {quoted(rank_imbalance)} is unknown{hint}; allowed: {known}")
    return replace(plain, rank_imbalance="" if rank_imbalance == EVEN_RANKS else rank_imbalance)


def constant_lengths(isl: int, osl: int) -> Lengths:
    """Make constant lengths. [token]"""
    return lengths_at(whole_number("isl", isl), whole_number("osl", osl, 2, ": one output token is prefill only"))


def lengths_at(isl: float, osl: float) -> Lengths:
    """Make constant lengths that need not be whole, such as means; a decode step has ``isl + osl/2`` cached tokens."""
    return Lengths(
        isl=np.array([float(isl)]),
        isl_weight=np.ones(1),
        mean_osl=float(osl),
        median_osl=float(osl),
        resident=decode_residents(isl, osl),
        requests=request_law(np.array([float(isl)]), np.array([float(osl)])),
    )


def independent_lengths(isl: LengthDistribution, osl: LengthDistribution) -> Lengths:
    """Make independent input and output lengths; lengths below one token count as one."""
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
    """Make the empirical joint distribution of lengths and cached tokens; arrays of shape (requests,). [token]"""
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
    """Round a length to the power of two with the nearest logarithm, at least 1. [token]"""
    return 1 << max(round(math.log2(tokens)), 0)


def _check_steps(mean_osl: float) -> None:
    if not mean_osl >= 2:
        raise InputError(f"mean osl {mean_osl:g} is out of range; allowed: 2 tokens or more (one is prefill only)")


def _carrier(law: LengthDistribution) -> tuple[Floats, Floats]:
    """Represent a distribution by ascending lengths and probabilities: its quantiles at even normal scores."""
    if isinstance(law, ConstantLength):
        return np.array([float(law.tokens)]), np.ones(1)
    score, normal = np.linspace(-SCORE_LIMIT, SCORE_LIMIT, SCORES), NormalDist()
    weight = np.exp(-(score**2) / 2)
    lengths = np.array([max(law.quantile(normal.cdf(z)), 1.0) for z in score.tolist()])
    return lengths, weight / weight.sum()
