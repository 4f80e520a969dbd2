"""Read what a sweep counts beside steps and passes, all of it off unless said.

Failures and spares, links, prices of tokens, energy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import pandas as pd

from disagg_sim.certainty.energy import with_energy
from disagg_sim.certainty.rows import Origin
from disagg_sim.certainty.token_prices import with_token_prices
from disagg_sim.choices import FAILURES
from disagg_sim.facts import load
from disagg_sim.facts.schema import Axis, OneOf, Range, Strict, Unless
from disagg_sim.serving.costs import JOULE
from disagg_sim.serving.points import Column
from disagg_sim.sweep.kv_links import LINK_COLUMNS, NO_LINK, KvWire, LinkAxis
from disagg_sim.techniques.availability.law_columns import MOST_GPUS, spares_columns

#: Kinds of columns: of ``token_prices.PRICE_COLUMNS`` and of ``energy.ENERGY_COLUMNS``.
KINDS = (TOKEN_PRICES, ENERGY) = ("token_prices", "energy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumns:
    """What the rows of a frontier say beside their own columns."""

    columns: tuple[str, ...] = ()  # of ``KINDS``
    utilisation: float = 1.0  # share of the reserved hours that are used, of prices of tokens [1]

    def added(self, front: pd.DataFrame, prices: Mapping[str, float], origin: Origin) -> pd.DataFrame:
        """The frontier of a case with these columns at its end; prices of a GPU by system. [USD/h]"""
        if TOKEN_PRICES in self.columns:
            front = with_token_prices(front, prices, utilisation=self.utilisation, origin=origin)
        return with_energy(front, origin=origin) if ENERGY in self.columns else front

    def faults(self, per: str) -> Iterator[str]:
        """What the keys say that does not go together."""
        if self.utilisation < 1.0 and TOKEN_PRICES not in self.columns:
            yield f"utilisation: acts with 'columns: {TOKEN_PRICES}' only"
        if ENERGY in self.columns and per == JOULE:
            yield f"columns: {ENERGY!r} is what 'per: {JOULE}' has already"


#: Nothing.
OWN_COLUMNS = ExtraColumns()


#: Least and largest share of time at full capacity that is asked for. [1]
LEAST_SHARE, MOST_SHARE = 1e-3, 0.999_999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What a case counts beside steps and passes."""

    availability: float | None = None  # share of time at full capacity, for which spares are added; 0 = none [1]
    failures: str = FAILURES  # failure rates behind it
    kv_link: KvWire | None = None  # what the hand-over of a cache takes; None = rows do not say

    @property
    def columns_of_spares(self) -> bool:
        """Whether rows say their spares: in all cases of a sweep that has some."""
        return self.availability is not None

    @property
    def texts(self) -> dict[str, str]:
        """Text of every axis, by axis."""
        rates = f"_{self.failures}" if self.failures != FAILURES else ""
        return {
            "availability": f"availability{self.availability:.12g}{rates}" if self.availability else "no_spares",
            "kv_link": str(self.kv_link or NO_LINK),
        }

    def columns(self, throughput: str) -> tuple[Column, ...]:
        """Columns of points beside those of the modes and of costs."""
        links = () if self.kv_link is None else LINK_COLUMNS
        return (*links, *(spares_columns(throughput) if self.columns_of_spares else ()))

    @property
    def specs(self) -> dict[str, Any]:
        """Specs that the case depends on, by ``kind/name``."""
        return {f"failures/{self.failures}": load.load_failures(self.failures)} if self.availability else {}


#: All off.
NOTHING = ServingOptions()


class ServedKeys(Strict):
    """Keys of a sweep's file that say what it counts beside steps and passes, and what its frontiers tell."""

    availability: Axis[Annotated[float, Range(LEAST_SHARE, MOST_SHARE), Unless("none", 0.0)]] = (0.0,)
    failures: Axis[Annotated[str, load.spec_name("failures")]] = (FAILURES,)
    kv_link: LinkAxis = (NO_LINK,)
    columns: Axis[Annotated[str, OneOf(KINDS)]] = ()
    utilisation: Annotated[float, Range(1e-3, 1.0)] = 1.0

    @property
    def served(self) -> tuple[ServingOptions, ...]:
        """Every combination of what is counted; without a target failures have nothing to act on."""
        shares: tuple[float | None, ...] = self.availability if any(self.availability) else (None,)
        links: tuple[KvWire | None, ...] = self.kv_link if any(each.counts for each in self.kv_link) else (None,)
        found = [
            ServingOptions(availability=share, failures=name if share else FAILURES, kv_link=link)
            for share, name, link in product(shares, self.failures, links)
        ]
        return tuple(dict.fromkeys(found))

    @property
    def extra_columns(self) -> ExtraColumns:
        """What frontiers tell beside their own columns."""
        return ExtraColumns(columns=self.columns, utilisation=self.utilisation)

    def faults(self, per: str, gpu_cap: int) -> Iterator[str]:
        """What the keys say that does not go together, and with other keys."""
        if not any(self.availability) and self.failures != (FAILURES,):
            yield "failures: act with 'availability' only"
        if any(self.availability) and gpu_cap > MOST_GPUS:
            yield f"availability: counts spares up to 'limits.gpu_cap: {MOST_GPUS}'; it is {gpu_cap}"
        yield from self.extra_columns.faults(per)
