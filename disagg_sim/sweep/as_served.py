"""Read what of serving a sweep counts beside steps and passes: failures and spares. All of it is off unless said."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from disagg_sim.facts import load
from disagg_sim.facts.schema import Axis, Range, Unless
from disagg_sim.serving.availability import FAILURES
from disagg_sim.serving.costs import Per
from disagg_sim.serving.points import Column
from disagg_sim.serving.spares import Wanted, spares_columns

#: Least and largest share of time at full capacity that is asked for. [1]
LEAST_SHARE, MOST_SHARE = 1e-3, 0.999_999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class AsServed:
    """What a case counts beside steps and passes."""

    availability: float | None = None  # share of time at full capacity, for which spares are added; 0 = none [1]
    failures: str = FAILURES  # failure rates behind it

    @property
    def columns_of_spares(self) -> bool:
        """Whether rows say their spares: in all cases of a sweep that has some."""
        return self.availability is not None

    @property
    def texts(self) -> dict[str, str]:
        """Text of every axis, by axis."""
        return {
            "availability": f"availability{self.availability:.12g}" if self.availability else "no_spares",
            "failures": self.failures,
        }

    def columns(self, throughput: str) -> tuple[Column, ...]:
        """Columns of points beside those of the modes and of costs."""
        return spares_columns(throughput) if self.columns_of_spares else ()

    @property
    def specs(self) -> dict[str, Any]:
        """Specs that the case depends on, by ``kind/name``."""
        return {f"failures/{self.failures}": load.load_failures(self.failures)} if self.availability else {}

    def wanted(self, gpu_cap: int, per: Per) -> Wanted | None:
        """What spares are added for; None = rows say none."""
        if self.availability is None:
            return None
        failing = load.load_failures(self.failures)
        return Wanted(target=self.availability, failing=failing, gpu_cap=gpu_cap, per=per)


#: All off.
NOTHING = AsServed()
#: ``[none, 0.999]``.
AvailabilityKeys = Axis[Annotated[float, Range(LEAST_SHARE, MOST_SHARE), Unless("none", 0.0)]]
FailureKeys = Axis[Annotated[str, load.spec_name("failures")]]


def combined(availability: tuple[float, ...], failures: tuple[str, ...]) -> tuple[AsServed, ...]:
    """Every combination of what is counted; without a target all are off, and failures have nothing to act on."""
    shares: tuple[float | None, ...] = availability if any(availability) else (None,)
    found = [
        AsServed(availability=share, failures=name if share else FAILURES) for share, name in product(shares, failures)
    ]
    return tuple(dict.fromkeys(found))


def faults(served: tuple[AsServed, ...], failures: tuple[str, ...], per: str) -> list[str]:
    """What the keys say that does not go together."""
    if not any(each.columns_of_spares for each in served):
        return [] if failures == (FAILURES,) else ["failures: act with 'availability' only"]
    return ["availability: spares are counted per gpu, usd or watt; per is 'joule'"] if per == "joule" else []
