"""Resize a prefill pool and a decode pool within a budget of GPUs; forecast their load, window by window.

A forecast is one step ahead: the last value, or ARIMA.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import check_word
from disagg_sim.extras import extra
from disagg_sim.simulation.instance_variants import require_one_system
from disagg_sim.simulation.options import option
from disagg_sim.simulation.policies.loads import Choice, least_decode, least_prefill
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Role, Start, Stop, Wish

PREFILL, DECODE = Role.PREFILL, Role.DECODE
#: AR, difference and MA orders. [1]
ORDER = (2, 0, 1)
#: Windows that a model is fitted to, and those without which there is none: until then the last value. [1]
HISTORY, LEAST = 64, 8
#: Relative error above which a forecast is bad, and bad ones in a row after which the model is fitted anew. [1]
BAD, PATIENCE = 0.3, 2


class Sizes(NamedTuple):
    """Instances of the two pools. [1]"""

    prefill: int
    decode: int

    @property
    def words(self) -> str:
        """For reasons."""
        return f"{self.prefill}P + {self.decode}D"


def within(wanted: Sizes, gpus: Sizes, budget: int, least: int = 1) -> Sizes:
    """The sizes wanted, or both cut in proportion until they fit a budget of GPUs, each at least ``least``.

    What rounding down leaves of the budget goes to the pool that was cut more.
    """
    size = [max(count, least) for count in wanted]
    wanted = Sizes(*size)
    need = size[0] * gpus[0] + size[1] * gpus[1]
    if need <= budget:
        return wanted
    size = [max(least, count * budget // need) for count in size]
    for pool, other in ((0, 1), (1, 0)):  # where the least of one is more than its share
        size[pool] = min(size[pool], max(least, (budget - size[other] * gpus[other]) // gpus[pool]))
    left = budget - size[0] * gpus[0] - size[1] * gpus[1]
    for pool in sorted((0, 1), key=lambda pool: size[pool] / wanted[pool]):
        while gpus[pool] <= left and size[pool] < wanted[pool]:
            size[pool] += 1
            left -= gpus[pool]
    return Sizes(*size)


class Pools:
    """Moves the two pools towards the sizes that a planner wants; each is on one system; ``idlest`` stops first."""

    def __init__(self, site: Site, *, drain: bool = True, idlest: Choice = least_prefill) -> None:
        parts = {part: tuple(each.mapping for each in site.deployment.part(part)) for part in ("prefill", "decode")}
        for part, own in parts.items():
            require_one_system(f"deployment {site.deployment.name!r}: {part}, which the policy sizes,", own)
        self.mappings: tuple[Sharding, Sharding] = parts["prefill"][0], parts["decode"][0]
        self.gpus = Sizes(*(mapping.gpus for mapping in self.mappings))
        self._systems = tuple(site.setup_of(mapping).system.name for mapping in self.mappings)
        self._drain = drain
        self._idlest: tuple[Choice, Choice] = idlest, least_decode

    def there(self, view: ClusterView) -> Sizes:
        """Instances that serve or start."""
        return Sizes(
            int(view.prefill.size) + len(view.starting(PREFILL)), int(view.decode.size) + len(view.starting(DECODE))
        )

    def starting(self, view: ClusterView) -> bool:
        """Whether an instance is on its way up."""
        return bool(view.starting(PREFILL) or view.starting(DECODE))

    def within(self, view: ClusterView, wanted: Sizes, least: int = 1) -> Sizes:
        """The sizes wanted, or both cut until they fit the GPUs; pools on unlike systems each have their own."""
        budgets = [view.gpus_for(mapping) for mapping in self.mappings]
        if self._systems[0] == self._systems[1]:
            return within(wanted, self.gpus, budgets[0], least)
        pairs = zip(wanted, budgets, self.gpus, strict=True)
        return Sizes(*(max(min(count, budget // gpus), least) for count, budget, gpus in pairs))

    def steps(self, view: ClusterView, wanted: Sizes, reason: str) -> list[Wish]:
        """Start instances while GPUs are free; stop starting ones first, then the idlest serving ones."""
        there, systems = self.there(view), self._systems
        free = {system: view.free_gpus_for(own) for system, own in zip(systems, self.mappings, strict=True)}
        stops: list[Wish] = []
        starts: list[Wish] = []
        sides = zip((PREFILL, DECODE), self.mappings, systems, there, wanted, strict=True)
        for role, mapping, system, have, want in sides:
            grow = min(want - have, free[system] // mapping.gpus)
            if grow > 0:
                starts += [Start(mapping, role, reason)] * grow
                free[system] -= grow * mapping.gpus
            if want < have:
                stops += self._stops(view, role, have - want, reason)
        return stops + starts

    def _stops(self, view: ClusterView, role: Role, count: int, reason: str) -> list[Wish]:
        chosen = view.starting(role)[::-1][:count]
        ready = view.prefill if role is PREFILL else view.decode
        idlest = self._idlest[role]
        while len(chosen) < count and ready.size > 1:
            instance = idlest(view, ready)
            chosen.append(instance)
            ready = ready[ready != instance]
        return [Stop(int(instance), reason, self._drain) for instance in chosen]


class Forecast(Protocol):
    """Learns a series of positive numbers one by one; windows without an observation are left out."""

    def observe(self, value: float) -> None:
        """The next value of the series."""

    def next(self) -> float:
        """What the value after that is expected to be; NaN before the first."""


class LastValue:
    """The last value again."""

    def __init__(self) -> None:
        self._last = math.nan

    def observe(self, value: float) -> None:
        """See ``Forecast``."""
        self._last = value if math.isfinite(value) else self._last

    def next(self) -> float:
        """See ``Forecast``."""
        return self._last


class Arma(NamedTuple):
    """x_t - mean = sum_i ar_i (x_{t-i} - mean) + e_t + sum_j ma_j e_{t-j}."""

    mean: float
    ar: tuple[float, ...]
    ma: tuple[float, ...]

    def forecast(self, series: list[float]) -> float:
        """Expectation of the value after ``series``; innovations before it and of its first values are 0."""
        gone = [value - self.mean for value in series]
        errors: list[float] = []
        for t in range(len(gone) + 1):
            past = sum(ar * gone[t - 1 - i] for i, ar in enumerate(self.ar) if t - 1 - i >= 0)
            past += sum(ma * errors[t - 1 - j] for j, ma in enumerate(self.ma) if t - 1 - j >= 0)
            if t < len(gone):
                errors.append(gone[t] - past if t >= len(self.ar) else 0.0)
        return self.mean + past


class Arima:
    """ARIMA of order ``ORDER`` by Hannan and Rissanen's regressions, fitted once and again only after bad forecasts.

    The last value stands in before the model has ``LEAST`` points, where the fit is not stationary and invertible,
    and where a forecast is not a positive number.
    """

    def __init__(self) -> None:
        self._series: deque[float] = deque(maxlen=HISTORY)
        self._model: Arma | None = None
        self._expected = math.nan
        self._bad = 0  # forecasts in a row
        self._due = True
        self.fits = 0  # so far [1]

    def observe(self, value: float) -> None:
        """See ``Forecast``."""
        if not math.isfinite(value):
            return
        self._series.append(value)
        self._bad = self._bad + 1 if abs(value - self._expected) > BAD * abs(value) else 0
        self._due = self._due or self._bad >= PATIENCE
        if self._due and len(self._series) >= LEAST:
            self._model = arma(list(self._series))
            self.fits += 1
            self._due, self._bad = False, 0
        last = self._series[-1]
        found = math.nan if self._model is None else self._model.forecast(list(self._series))
        self._expected = found if math.isfinite(found) and found > 0 else last

    def next(self) -> float:
        """See ``Forecast``."""
        return self._expected


#: Forecasts by name.
FORECASTS: dict[str, Callable[[], Forecast]] = {"constant": LastValue, "arima": Arima}


def forecast_option() -> str:
    """The option of policies that forecast their load."""
    return option("arima", "of load and lengths: an ARIMA model, or the last window", choices=tuple(FORECASTS))


def forecast_named(name: str) -> Forecast:
    """A fresh one; ``InputError`` for an unknown name."""
    check_word("forecast", name, FORECASTS)
    return FORECASTS[name]()


def arma(series: list[float]) -> Arma | None:
    """The ARMA part of ``ORDER`` of a series; None where no stationary and invertible one is found.

    Source: E. J. Hannan and J. Rissanen, "Recursive estimation of mixed autoregressive-moving average order",
    Biometrika 69 (1982), as in statsmodels.
    """
    with extra("simulate"):
        from statsmodels.tsa.arima.estimators.hannan_rissanen import hannan_rissanen

    values = np.array(series)
    spread = values.std()
    if not spread > 0:
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of singular regressions: the result is judged below
        try:
            found, _ = hannan_rissanen(
                (values - values.mean()) / spread, ar_order=ORDER[0], ma_order=ORDER[2], demean=False
            )
            sound = np.isfinite(found.params).all() and found.is_stationary and found.is_invertible
        except (ValueError, np.linalg.LinAlgError, FloatingPointError):
            return None
    if not sound:
        return None
    return Arma(float(values.mean()), tuple(found.ar_params.tolist()), tuple(found.ma_params.tolist()))
