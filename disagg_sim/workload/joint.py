r"""Joint law of input and output length, reduced to what steady serving depends on.

A prompt's pass depends on its own length, so prefill needs the law of the input length itself. A
decode step depends on the requests that are found running, and those are not a fair draw. A request
with O output tokens gets its first token from prefill and stays for O - 1 steps, so that among the
requests in flight at a random step the pair (I, O) has the *length-biased* probability

.. math:: p_{run}(I, O) = \frac{(O - 1)\, p(I, O)}{E[O] - 1}

and its age is uniform over the O - 1 steps, at any of which it holds I + 1 ... I + O - 1 tokens. With
the age U uniform on (0, O), as for constant lengths, its cache C = I + U has

.. math::
    E[C] = E_{run}[I + O/2], \qquad E[C^2] = E_{run}[I^2 + I O + O^2/3].

Constant lengths give mean I + O/2 and variance O^2/12. Little's law closes the loop: B requests in
flight that each stay (E[O] - 1) * TTL on average complete at the rate B/(TTL*(E[O] - 1)).
Source: physics page, section 8 (Length distributions), which writes E[O*(I + O/2)]/E[O], the same for
long outputs; the weight O - 1 is the one that agrees with the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.workload.lengths import LengthDistribution, length_distribution

Floats = NDArray[np.float64]

#: A law is carried by its quantiles at normal scores within this many standard deviations ...
SCORE_LIMIT = 6.0
#: ... at this many places.
SCORES = 2049
#: Gauss points of a law: a smooth prefill pass integrates to 4e-4 over every shipped traffic, one with tiles to 2e-3,
#: as each point stands somewhere on the stair of its last tile.
NODES = 8
#: Gauss points of each of four strata under stairs: chunked passes integrate to 0.5 %, where four points left 0.7 %.
STAIR_NODES = 5
#: Less than this share of its mean, the spread of a law is rounding. [1]
NO_SPREAD = 1e-9


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JointLengths:
    """What prefill and decode in steady state need of a joint law of (input, output) length."""

    isl: Floats  # (points,) ascending input lengths that carry the law [token]
    isl_weight: Floats  # (points,) their probabilities, sum 1 [1]
    mean_osl: float  # [token]
    context: float  # mean cache of a request in flight [token]
    context_deviation: float  # its standard deviation [token]
    longest: float  # input and output of the longest request [token]

    @property
    def mean_isl(self) -> float:
        """Expected input length. [token]"""
        return float(self.isl_weight @ self.isl)

    @property
    def isl_deviation(self) -> float:
        """Standard deviation of the input length. [token]"""
        return math.sqrt(float(self.isl_weight @ (self.isl - self.mean_isl) ** 2))

    def isl_quantile(self, p: float) -> float:
        """Input length that a share ``p`` of the requests does not exceed. [token]"""
        if not 0.0 < p < 1.0:
            raise InputError(f"quantile {p!r} is out of range; allowed: above 0 and below 1")
        return float(np.interp(p, np.cumsum(self.isl_weight) - self.isl_weight / 2, self.isl))

    def isl_nodes(self) -> tuple[Floats, Floats]:
        """Input lengths, ascending, and weights that integrate a smooth function over the law; (nodes,). [token], [1]

        Gauss quadrature of the law of ln(ISL) with ``NODES`` points: exact for polynomials of degree
        2*NODES - 1 in it. One node where the length is constant.
        """
        return _gauss(self.isl, self.isl_weight, NODES)

    def stair_nodes(self, step: float) -> tuple[Floats, Floats]:
        """As ``isl_nodes``, for a function with stairs: it jumps or bends at the multiples of ``step``. [token], [1]

        Up to 3*step each stair is a stratum of its own with ``STAIR_NODES`` Gauss points. Beyond, where
        the law spreads over many stairs, a point stands for its whole stair: it is shared between the
        two nearest mid-stair lengths, which keeps the mean and gives a stair its mean height.
        """
        lengths, weights = [], []
        for low, high in pairwise((0.0, step, 2 * step, 3 * step, math.inf)):
            inside = (self.isl > low) & (self.isl <= high)
            share = float(self.isl_weight[inside].sum())
            if not share > 0:
                continue
            some, part = self.isl[inside], self.isl_weight[inside] / share
            nodes, weight = _gauss(some, part, STAIR_NODES)
            if math.isinf(high) and float(part @ (some - part @ some) ** 2) > step**2:
                below = np.floor(nodes / step - 0.5) + 0.5  # mid-stair length, in steps
                above = nodes / step - below
                nodes = np.concatenate([below, below + 1]) * step
                weight = np.concatenate([weight * (1 - above), weight * above])
            lengths.append(nodes)
            weights.append(weight * share)
        nodes, place = np.unique(np.concatenate(lengths), return_inverse=True)
        return nodes, np.bincount(place, np.concatenate(weights)).astype(np.float64)


def independent_lengths(isl: LengthDistribution, osl: LengthDistribution) -> JointLengths:
    """Input and output length drawn independently; lengths below one token count as one."""
    inputs, weight = _carrier(isl)
    outputs, _ = _carrier(osl)
    mean_osl = float(weight @ outputs)
    _check_steps(mean_osl)
    steps = weight * (outputs - 1) / (mean_osl - 1)  # length-biased
    first, second = float(steps @ outputs), float(steps @ outputs**2)
    mean_isl = float(weight @ inputs)
    variance = float(weight @ (inputs - mean_isl) ** 2) + second / 3 - first**2 / 4
    return JointLengths(
        isl=inputs,
        isl_weight=weight,
        mean_osl=mean_osl,
        context=mean_isl + first / 2,
        context_deviation=math.sqrt(variance),
        longest=float(inputs[-1] + outputs[-1]),
    )


def observed_lengths(isl: NDArray[np.int64] | Floats, osl: NDArray[np.int64] | Floats) -> JointLengths:
    """The empirical joint law of requests, such as those of a trace; correlation is kept.

    Parameters
    ----------
    isl, osl : arrays, shape (requests,)
        Input and output length of every request, at least 1. [token]

    Raises
    ------
    InputError
        Arrays of other shapes, lengths below 1, or a mean output below 2 tokens.
    """
    inputs, outputs = np.asarray(isl, dtype=np.float64), np.asarray(osl, dtype=np.float64)
    if inputs.ndim != 1 or inputs.shape != outputs.shape or not inputs.size:
        raise InputError(f"isl of shape {inputs.shape} and osl of shape {outputs.shape} are no list of requests")
    if not (inputs.min() >= 1 and outputs.min() >= 1):
        raise InputError(f"lengths of {min(inputs.min(), outputs.min()):g} tokens are out of range; allowed: from 1")
    mean_osl = float(outputs.mean())
    _check_steps(mean_osl)
    steps = (outputs - 1) / np.sum(outputs - 1)  # length-biased
    context = float(steps @ (inputs + outputs / 2))
    variance = float(steps @ ((inputs + outputs / 2 - context) ** 2 + outputs**2 / 12))
    values, counts = np.unique(inputs, return_counts=True)
    return JointLengths(
        isl=values,
        isl_weight=counts / inputs.size,
        mean_osl=mean_osl,
        context=context,
        context_deviation=math.sqrt(variance),
        longest=float(np.max(inputs + outputs)),
    )


def joint_lengths(traffic: str | TrafficCase) -> JointLengths:
    """The law of a traffic case, or of a shipped traffic by its name where that has one case; lengths in [token].

    Parameters
    ----------
    traffic
        A case of ``load_traffic(name).cases``, or the name.

    Raises
    ------
    InputError, UnknownNameError
        A traffic of several cases, a mean output below 2 tokens, an unknown name.

    Examples
    --------
    >>> law = joint_lengths("log_normal_4096_512")
    >>> round(law.mean_isl), round(law.mean_osl), round(law.context)
    (6653, 740, 7428)
    """
    if isinstance(traffic, str):
        cases = load_traffic(traffic).cases
        if len(cases) != 1:
            raise InputError(f"traffic {traffic} has {len(cases)} cases; allowed: a traffic of one case")
        traffic = cases[0]
    return independent_lengths(length_distribution(traffic.isl), length_distribution(traffic.osl))


def _check_steps(mean_osl: float) -> None:
    if not mean_osl >= 2:
        raise InputError(f"mean osl {mean_osl:g} is out of range; allowed: 2 tokens or more (one is prefill only)")


def _carrier(law: LengthDistribution) -> tuple[Floats, Floats]:
    """Ascending lengths and probabilities that carry a law: its quantiles at evenly spaced normal scores."""
    score, normal = np.linspace(-SCORE_LIMIT, SCORE_LIMIT, SCORES), NormalDist()
    weight = np.exp(-(score**2) / 2)
    lengths = np.array([max(law.quantile(normal.cdf(z)), 1.0) for z in score.tolist()])
    return lengths, weight / weight.sum()


def _gauss(lengths: Floats, weight: Floats, count: int) -> tuple[Floats, Floats]:
    """Gauss quadrature of a discrete law in the logarithm of the length (Stieltjes procedure, Golub and Welsch).

    The recurrence of orthonormal polynomials stops early where fewer points carry the law.
    """
    log = np.log(lengths)
    centre = float(weight @ log)
    spread = math.sqrt(float(weight @ (log - centre) ** 2))
    if spread <= NO_SPREAD:
        return lengths[:1], np.ones(1)  # as it is: a tile more or less may hang on its last digit
    x = (log - centre) / spread
    diagonal, side = [], []
    previous, current, norm = np.zeros_like(x), np.ones_like(x), 0.0
    for _ in range(count):
        diagonal.append(float(weight @ (x * current**2)))
        following = (x - diagonal[-1]) * current - norm * previous
        norm = math.sqrt(float(weight @ following**2))
        if norm <= NO_SPREAD:
            break
        side.append(norm)
        previous, current = current, following / norm
    jacobi = np.diag(diagonal) + np.diag(side[: len(diagonal) - 1], 1) + np.diag(side[: len(diagonal) - 1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return np.exp(centre + spread * nodes), vectors[0] ** 2
