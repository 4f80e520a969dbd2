"""What requests look like: pairs of input and output lengths, constant or distributed.

Only the parameters live here; ``workload.distributions`` gives them mean, quantiles and samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.notebook import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLength:
    """Every request has the same length."""

    tokens: int  # [token]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLength:
    """The logarithm of the length is normal."""

    median: float  # exp(mu) [token]
    sigma: float  # standard deviation of the logarithm [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoLength:
    """Power-law tail between two bounds: density proportional to x^(-alpha-1)."""

    minimum: float  # [token]
    maximum: float  # [token]
    alpha: float  # tail index [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalLength:
    """Quantile table of a data set, linear between its points."""

    probabilities: tuple[float, ...]  # ascending, from 0 to 1 [1]
    tokens: tuple[float, ...]  # quantile of each probability [token]


LengthSpec = ConstantLength | LogNormalLength | ParetoLength | EmpiricalLength


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCase:
    """Input and output length of the requests of one case."""

    isl: LengthSpec
    osl: LengthSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec(Shown):
    """A family of traffic cases."""

    name: str
    title: str
    cases: tuple[TrafficCase, ...]
    source: str

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(ISL, OSL) of the cases whose lengths are constant. [token]"""
        return tuple(
            (case.isl.tokens, case.osl.tokens)
            for case in self.cases
            if isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength)
        )
