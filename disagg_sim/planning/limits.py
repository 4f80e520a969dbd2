"""Values that all parts of a plan share: limits of latency with the share of requests that keeps them, and the work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from disagg_sim.choices import HEADROOM
from disagg_sim.errors import InputError, above_zero, quoted
from disagg_sim.units import BARE, asked_quantity
from disagg_sim.workload.lengths import Lengths

#: Percentiles that a limit may name, those that a simulation reports.
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LIMIT = re.compile(
    r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*[a-zA-Z\u00b5\u03bc]*?)\s*(?:[@:, ]\s*([pP][0-9]+))?\s*"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A latency that a share of all requests keeps."""

    seconds: float  # inclusive [s]
    share: float = 0.9  # of the requests [1]
    default: bool = field(default=False, compare=False, repr=False)  # whether nobody asked for it

    @property
    def percentile(self) -> str:
        """Its share as the field says it: ``p90``."""
        return f"p{self.share * 100:g}"


#: Largest load at which queues of prompts are planned: the rate over that of full passes (chosen: a pass may be 18 %
#: slower than forecast before its queue grows without end; the accuracy page has loads of published pools). [1]
MOST_LOAD = 0.85
#: Limits of a plan that names none.
TTFT, TPOT = Limit(2.0, default=True), Limit(0.05, default=True)
#: A limit that every latency keeps.
NO_LIMIT = Limit(1e9)


def limit_of(text: object, name: str) -> Limit:
    """Read a limit of latency.

    Takes ``text`` (a number [s], ``"500 ms"``, ``"2 s@p99"``, or a ``Limit``). The result is in seconds [s].

    >>> limit_of("500ms@p99", "ttft"), limit_of(0.05, "tpot")
    (Limit(seconds=0.5, share=0.99), Limit(seconds=0.05, share=0.9))
    >>> limit_of("30", "tpot")
    Traceback (most recent call last):
    disagg_sim.errors.InputError: tpot 30 has no unit, and nobody means 30s; say 30ms or 30s
    """
    if isinstance(text, Limit):
        return text
    found = _LIMIT.fullmatch(str(text).removesuffix(".0"))
    share = (found.group(2) or "p90").lower() if found else ""
    what = name.strip("-").removesuffix("_s")
    number = asked_quantity(found.group(1), what if what in BARE else "seconds", name) if found else 0.0
    if share not in SHARES or not number > 0:
        raise InputError(
            f"{name} {quoted(text)} is no limit of latency; allowed: seconds above 0 or '500 ms', and @p50, @p90 or "
            "@p99 behind it (p90 where none is said), such as '2 s@p99'"
        )
    return Limit(above_zero(name, number, "s"), SHARES[share])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a plan has to serve."""

    lengths: Lengths
    ttft: Limit
    tpot: Limit
    dispersion: float = 1.0  # variance of the requests of a short window over their mean; 1 = Poisson [1]
    surge: float = 1.0  # rate that the share of the limits does not see exceeded, over the mean rate [1]
    hold_steps: tuple[int, ...] | None = ()  # waits of prompts to try beside none; None = those worth trying [1]
    headroom: float = HEADROOM  # share of the rate that a pool could serve beside it [1]
    most_load: float = MOST_LOAD  # of queues of prompts, in the surges that count [1]

    @property
    def spare(self) -> float:
        """Rate that pools are sized for over the rate that is asked for, without surges. [1]"""
        return 1.0 + self.headroom

    def sized(self, rate: float) -> float:
        """Rate that pools are sized for: with headroom, in the surges that count. [request/s]"""
        return rate * self.spare * self.surge

    @property
    def share(self) -> float:
        """Share of what full passes could do that a rate without surges may take. [1]"""
        return min(1.0 / self.spare, self.most_load)

    def overloads(self, load: float) -> bool:
        """Whether a queue of prompts has more than the planned load [1] at the rate that pools are sized for."""
        return load >= 1.0 or load > self.most_load * self.spare
