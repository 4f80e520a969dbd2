"""Draw the synthetic traces of a scenario: requests by themselves, or sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg_sim.facts import load
from disagg_sim.workload.arrivals import ArrivalProcess
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.synthetic import session_trace, synthetic_stream, synthetic_trace
from disagg_sim.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Arrivals of a process at a rate, with independent lengths."""

    lengths: str | tuple[int, int]  # name of a shipped traffic, or constant (ISL, OSL) [token]
    rate: float  # mean [request/s]
    requests: int | None  # how many [request], or
    duration: float | None  # how long [s]
    process: ArrivalProcess

    def draw(self, seed: int, name: str, window: int) -> Trace | TraceStream:
        """The trace of one seed; of a ``window`` above 0 [request] so many of its requests at a time."""
        lengths: Any = self.lengths
        if isinstance(lengths, str):
            lengths = load.load_traffic(lengths).cases[0]
        drawn: dict[str, Any] = {**_asked(self), "lengths": lengths, "requests": self.requests}
        drawn |= {"seed": seed, "name": name}
        return synthetic_stream(**drawn, window=window) if window else synthetic_trace(**drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSessions:
    """Sessions that begin by a process at a rate."""

    lengths: str  # name of a shipped traffic with sessions
    rate: float  # mean rate at which they begin [session/s]
    sessions: int | None  # how many [session], or
    duration: float | None  # for how long [s]
    process: ArrivalProcess

    def draw(self, seed: int, name: str) -> Trace:
        """The trace of one seed."""
        law = load.load_traffic(self.lengths)
        return session_trace(law, sessions=self.sessions, seed=seed, name=name, **_asked(self))


def _asked(drawn: Synthetic | SyntheticSessions) -> dict[str, Any]:
    return {"rate": drawn.rate, "duration": drawn.duration, "arrivals_as": drawn.process}
