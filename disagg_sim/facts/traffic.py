"""Traffic: pairs of input and output lengths, constant or distributed, and sessions of requests.

Only the parameters live here; ``workload.distributions`` gives them mean, quantiles and samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator

from disagg_sim.errors import check_kinds
from disagg_sim.facts.schema import NOT_IN_FILE, Line, NotEmpty, OneKind, Range, Written
from disagg_sim.notebook import Shown

_Tokens = Annotated[float, Range(1.0, 10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLength:
    """Every request has the same length."""

    tokens: Annotated[int, Range(1, 10**9)]  # [token]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLength:
    """The logarithm of the length is normal."""

    median: _Tokens  # exp(mu) [token]
    sigma: Annotated[float, Range(0.0, 10.0)]  # standard deviation of the logarithm [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoLength:
    """Power-law tail between two bounds: density proportional to x^(-alpha-1)."""

    minimum: _Tokens  # [token]
    maximum: _Tokens  # [token]
    alpha: Annotated[float, Range(0.01, 100.0)]  # tail index [1]

    def __post_init__(self) -> None:
        """``ValueError`` unless the bounds ascend."""
        if self.minimum >= self.maximum:
            raise ValueError(f"minimum {self.minimum:g} is not below maximum {self.maximum:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalLength:
    """Quantile table of a data set, linear between its points."""

    probabilities: tuple[Annotated[float, Range(0.0, 1.0)], ...]  # ascending, from 0 to 1 [1]
    tokens: tuple[_Tokens, ...]  # quantile of each probability [token]

    def __post_init__(self) -> None:
        """``ValueError`` unless it is a table of quantiles."""
        _require_quantiles(self.probabilities, self.tokens, "tokens")


def _require_quantiles(p: tuple[float, ...], values: tuple[float, ...], noun: str) -> None:
    if len(p) != len(values) or len(p) < 2:
        raise ValueError(f"{len(p)} probabilities and {len(values)} {noun}; needs the same number, at least 2")
    if p[0] != 0.0 or p[-1] != 1.0 or any(a >= b for a, b in pairwise(p)):
        raise ValueError("probabilities must rise strictly from 0 to 1")
    if any(a > b for a, b in pairwise(values)):
        raise ValueError(f"{noun} must not fall")


LengthSpec = ConstantLength | LogNormalLength | ParetoLength | EmpiricalLength
_KINDS = {"constant": ConstantLength, "log_normal": LogNormalLength, "pareto": ParetoLength}
_KINDS |= {"empirical": EmpiricalLength}
_constant = BeforeValidator(lambda value: value if isinstance(value, dict) else {"kind": "constant", "tokens": value})
#: ``{kind: pareto, minimum: ...}``; a plain number is a constant length.
_Length = Annotated[LengthSpec, OneKind(_KINDS), _constant]


_Share = Annotated[float, Range(0.0, 1.0)]
#: The tier of pasts that are on the GPUs already.
HBM = "hbm"
#: ``dram``, or ``{hbm: 0.5, dram: 0.5}``.
TierShares = Annotated[
    tuple[tuple[str, float], ...],
    Written(
        Annotated[dict[str, _Share], BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value)],
        lambda shares: tuple(sorted(shares.items())),
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantShare:
    """Caches hold the same share of every prompt."""

    share: _Share  # [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaShare:
    """The cached share of a prompt follows a Beta distribution, of mean alpha/(alpha + beta)."""

    alpha: Annotated[float, Range(0.01, 1000.0)]  # [1]
    beta: Annotated[float, Range(0.01, 1000.0)]  # [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalShare:
    """Quantile table of cached shares, linear between its points."""

    probabilities: tuple[_Share, ...]  # ascending, from 0 to 1 [1]
    shares: tuple[_Share, ...]  # quantile of each probability [1]

    def __post_init__(self) -> None:
        """``ValueError`` unless it is a table of quantiles."""
        _require_quantiles(self.probabilities, self.shares, "shares")


ShareSpec = ConstantShare | BetaShare | EmpiricalShare
_SHARE_KINDS = {"constant": ConstantShare, "beta": BetaShare, "empirical": EmpiricalShare}
_constant_share = BeforeValidator(
    lambda value: value if isinstance(value, dict) else {"kind": "constant", "share": value}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Which part of prompts is found in a prefix cache."""

    share: Annotated[ShareSpec, OneKind(_SHARE_KINDS), _constant_share]  # of a prompt that prefill finds cached
    block_tokens: Annotated[int, Range(1, 10**6)] = 16  # of the cache: only whole blocks are found [token]
    in_decode: _Share = 0.0  # share of the cached past that decode holds already, so that it is not sent [1]
    tiers: TierShares = ()  # (tier, share of the prompts whose past lies in it); none = all lie in HBM [1]

    def __post_init__(self) -> None:
        """``ValueError`` unless every past lies in one tier, and ``InputError`` for a value of another kind."""
        check_kinds(self)
        total = sum(share for _, share in self.tiers)
        if self.tiers and abs(total - 1.0) > 1e-9:
            raise ValueError(f"shares of tiers add up to {total:g}; allowed: 1 ({HBM} is where a past needs no load)")

    @property
    def below(self) -> tuple[str, ...]:
        """Tiers below HBM in which pasts lie."""
        return tuple(name for name, share in self.tiers if share > 0 and name != HBM)

    @property
    def off(self) -> bool:
        """Whether nothing is found."""
        return self.share == ConstantShare(share=0.0)


_cached = BeforeValidator(lambda value: {"share": value} if not isinstance(value, dict) or "kind" in value else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCase:
    """Input and output length of the requests of one case, and what of the prompts is cached."""

    isl: _Length
    osl: _Length
    cached: Annotated[Reuse | None, _cached] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalTime:
    """Quantile table of times, linear between its points."""

    probabilities: tuple[Annotated[float, Range(0.0, 1.0)], ...]  # ascending, from 0 to 1 [1]
    seconds: tuple[Annotated[float, Range(0.0, 1e9, "s")], ...]  # quantile of each probability [s]

    def __post_init__(self) -> None:
        """``ValueError`` unless it is a table of quantiles."""
        _require_quantiles(self.probabilities, self.seconds, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Requests that follow each other, the next prompt with the last one in front."""

    turns: _Length  # requests of a session [1]
    first: _Length  # its first prompt [token]
    shared_tokens: Annotated[int, Range(0, 10**9)] = 0  # start of the first prompt that all sessions share [token]
    growth: _Length  # from a prompt to the next of its session: answer, and what is added [token]
    think_s: EmpiricalTime  # from the end of a turn to the next: people read, tools run [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec(Shown):
    """A family of traffic cases."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    cases: Annotated[tuple[TrafficCase, ...], NotEmpty]
    source: str
    session: SessionSpec | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(ISL, OSL) of the cases whose lengths are constant. [token]"""
        return tuple(
            (case.isl.tokens, case.osl.tokens)
            for case in self.cases
            if isinstance(case.isl, ConstantLength) and isinstance(case.osl, ConstantLength)
        )
