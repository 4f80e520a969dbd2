"""Say what fails in a run: GPUs with their instances, nodes, links; when, for how long, and what becomes of requests.

Rates and times have no default, because they depend on the site. Published ones: 419 unexpected interruptions in 54
days on 16,384 H100, one in 50,677 GPU-hours (Llama 3, arXiv 2407.21783, table 5); 6.50 and 2.34 failures in 1,000 node
days of 8 A100 (RSC-1 and RSC-2, arXiv 2410.21680); an instance starts in 2 to 8 minutes, weights, compilation and
graphs together (llm-d autoscaler, issue 1071), 671 GB of weights take 40 to 80 s from another GPU and 25 minutes from
NVMe (modelexpress, issue 135).

A request whose instance has failed is lost, as in an engine by itself and in Dynamo by default; or the front end gives
it to another, which computes the prompt with the tokens that the user has already got, and goes on behind these:
``migration_limit``, named as in Dynamo (docs.nvidia.com/dynamo, "Request Migration").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, check_kinds, nearest
from disagg_sim.simulation.options import LONGEST_S, MOST, Option, check_options, option

#: What can fail: a GPU, and with it the instance on it; an instance; all instances of a node; the link of an instance.
KINDS = ("gpu", "instance", "node", "link")
#: What says how long it lasts where an event does not.
LASTS = {"gpu": "restart_s", "instance": "restart_s", "node": "restart_s", "link": "link_down_s"}
#: Kinds that fail at random -> their mean time between failures.
RANDOM = {"gpu": "gpu_mtbf_s", "node": "node_mtbf_s", "link": "link_mtbf_s"}
#: Least mean time between failures: GPUs that fail more often serve nothing, and a run of them hardly ends. [s]
LEAST_MTBF_S = 1.0
#: Values of an event, as a file writes them: the number stands under its kind.
OF_EVENT = {
    "at_s": Option(default=0.0, meaning="time of the failure", unit="s", low=0.0, high=LONGEST_S),
    **{kind: Option(default=0, meaning=f"number of the {kind}", low=0, high=MOST) for kind in KINDS},
    "lasts_s": Option(default=0.0, meaning="until it serves again", unit="s", low=0.0, infinite=True),
    "share": Option(default=0.0, meaning="of its bandwidth that a link keeps", low=0.0, high=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """One failure at a given time."""

    at_s: float  # [s]
    kind: str  # of ``KINDS``
    number: int  # of the GPU, node, or instance; a link has the number of its instance
    lasts_s: float = 0.0  # until it serves again; 0: as ``Failures`` says, inf: for ever [s]
    share: float | None = None  # of its bandwidth that a link keeps; None: as ``Failures`` says [1]

    def __post_init__(self) -> None:
        """``InputError`` for values out of range."""
        if self.kind not in KINDS:
            raise InputError(f"failure of a {self.kind!r}{nearest(self.kind, KINDS)}; allowed: {', '.join(KINDS)}")
        values = {"at_s": self.at_s, self.kind: self.number, "lasts_s": self.lasts_s, "share": self.share or 0.0}
        for name, value in values.items():
            if fault := OF_EVENT[name].fault(value):
                raise InputError(f"{name} {fault}")
        if self.share is not None and self.kind != "link":
            raise InputError(f"share {self.share} of a failed {self.kind}; allowed: of a link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What fails in a run: events at given times, and random ones with the seed of the run.

    Each GPU, node and link fails independently, at exponential times; the moments do not depend on the policy. No
    instance starts on a GPU that has failed, held or not, until it is back.
    """

    events: tuple[FailureEvent, ...] = ()
    restart_s: float = option(
        0.0,
        "time from a failure until its instances serve again; infinity: they never do; 0: each event says it",
        unit="s",
        low=0.0,
        infinite=True,
    )
    gpu_mtbf_s: float = option(
        math.inf, "mean time between failures of one GPU", unit="s", low=LEAST_MTBF_S, infinite=True
    )
    node_mtbf_s: float = option(
        math.inf, "mean time between failures of one node", unit="s", low=LEAST_MTBF_S, infinite=True
    )
    link_mtbf_s: float = option(
        math.inf,
        "mean time between failures of the links of one GPU, and of its instance",
        unit="s",
        low=LEAST_MTBF_S,
        infinite=True,
    )
    link_down_s: float = option(
        0.0, "time for which a link fails; 0: each event says it", unit="s", low=0.0, infinite=True
    )
    link_share: float = option(0.0, "share of its bandwidth that a failed link keeps", low=0.0, high=1.0)
    migration_limit: int = option(
        0, "how often a request may begin again on another instance; 0: it is lost with its own", low=0, high=MOST
    )

    def __post_init__(self) -> None:
        """``InputError`` for values out of range, and for a time that nothing says."""
        check_options(self)
        check_kinds(self)
        for kind, name in LASTS.items():
            if not getattr(self, name) and self._needs(kind):
                raise InputError(
                    f"{name} is missing: how long a failed {kind} is out of service has no default; allowed: above 0 "
                    f"s, or infinity"
                )

    def _needs(self, kind: str) -> bool:
        """Whether the time of a kind has to be said here."""
        open_end = any(event.kind == kind and not event.lasts_s for event in self.events)
        return open_end or (kind in RANDOM and getattr(self, RANDOM[kind]) < math.inf)

    def lasts(self, event: FailureEvent) -> float:
        """How long a failure lasts. [s]"""
        return event.lasts_s or float(getattr(self, LASTS[event.kind]))


class Failure(NamedTuple):
    """What one failure did."""

    time_s: float  # [s]
    kind: str  # of ``KINDS``
    number: int  # of the GPU, node or instance
    instances: tuple[int, ...]  # that it took out of service, or whose link; none where nothing was there
    until_s: float  # when they serve again; inf: never [s]
    lost: int  # requests that ended [request]
    migrated: int  # requests that went to another instance [request]


class GpuOutage(NamedTuple):
    """GPUs that failed together, on which no instance starts until they are back."""

    gpus: Ints
    instances: int  # that there were when they failed: later ones do not start there [1]
    until_s: float  # inf: for ever [s]


def gpus_of_instances(
    sizes: Sequence[int],
    start_s: Floats,
    stop_s: Floats,
    *,
    node_of: Ints,
    fits: Sequence[NDArray[np.bool_]] = (),
    dead: Sequence[GpuOutage] = (),
) -> list[Ints]:
    """Say which GPUs each instance of a run holds or held, ascending.

    Each takes the first node that has room for all of it, or, where it is larger than a node or none has room, the
    first free GPUs; none takes dead ones.
    """
    free = np.ones(node_of.size, dtype=bool)
    held: list[Ints] = []
    leaving = [int(each) for each in np.argsort(stop_s) if not math.isnan(stop_s[each])]
    for instance, size in enumerate(sizes):
        while leaving and leaving[0] < instance and stop_s[leaving[0]] <= start_s[instance]:
            free[held[leaving.pop(0)]] = True
        own = free & fits[instance] if fits else free.copy()
        for lost in dead:
            if instance >= lost.instances and start_s[instance] < lost.until_s:
                own[lost.gpus] = False
        room = np.bincount(node_of[own], minlength=int(node_of[-1]) + 1) >= size
        found = np.flatnonzero(own & (node_of == int(room.argmax()))) if room.any() else np.flatnonzero(own)
        held.append(found[:size])
        free[held[-1]] = False
    return held
