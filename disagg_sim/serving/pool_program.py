"""Fill pools for a budget or a demand: the goals of rate matching over any number of pools, by integer program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError, above_zero, as_float, check_kinds, quoted, whole_number
from disagg_sim.serving.integer_program import Choices, Filling, least_cost, most_rate

NAN = float("nan")
#: Least gain for which pools mix configurations by default. Each configuration is a service of its own to deploy, watch
#: and route to, and a step time is known to some percent only (docs/fidelity.md). [1]
MIXING_GAIN = 0.05
#: Most GPUs that are planned for; the solver keeps counts to a relative 1e-6 and finds no end far above. [1]
MOST_GPUS = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchOptions:
    """What a plan may be made of, and how long the solver may take."""

    max_configurations_per_pool: int | None = None  # most distinct ones, taken whatever they gain; 1 forbids mixing [1]
    #: Share by which mixed pools must raise the rate, or lower GPUs or cost, to be preferred; 0 takes every gain.
    #: Without effect where ``max_configurations_per_pool`` is given. [1]
    mixing_gain: float = MIXING_GAIN
    #: Largest KV egress and ingress of a GPU at full rate, inclusive: configurations above it are left out. By
    #: default an instance serves no more requests than its own links carry, which is also what a simulation moves:
    #: NVLink where the budget fits one domain, else the NIC, times the profile's efficiency. ``math.inf`` waives
    #: both. [B/s]
    kv_link_limit: float | None = None
    time_limit: float = 10.0  # of the solver, all steps together [s]

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range."""
        check_kinds(self)
        above_zero("time_limit", self.time_limit, "s")
        if self.kv_link_limit is not None:
            above_zero("kv_link_limit", self.kv_link_limit)
        if not 0 <= as_float(self.mixing_gain) < np.inf:
            raise InputError(f"mixing_gain {quoted(self.mixing_gain)} is out of range; allowed: from 0, finite")
        if self.max_configurations_per_pool is not None:
            whole_number("max_configurations_per_pool", self.max_configurations_per_pool)


USUAL = MatchOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the pools are filled for: the most requests within a budget, or the least GPUs or cost for a rate."""

    gpu_budget: int | None = None  # of all pools together [1]
    required_rate: float | None = None  # that every pool must reach [request/s]
    prices: Sequence[float | Floats] | None = None  # of a GPU of each pool, or of each of its choices; None = 1 [USD/h]

    def check(self) -> None:
        """``InputError`` unless there is a budget or a rate."""
        if self.gpu_budget is None and self.required_rate is None:
            raise InputError(
                "give gpu_budget (to maximise the request rate) or required_rate (to minimise GPUs or cost)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Counts of every choice of every pool with the solver's account of them, or the limit that forbids any."""

    status: str  # "optimal", "feasible" (time limit reached), "unsolved" (time limit, no answer) or "infeasible"
    message: str  # one line
    counts: tuple[Ints, ...] = ()  # of each pool, of the shape of its choices; () = no answer [1]
    gpus: tuple[int, ...] = ()  # of each pool [1]
    request_rate: float = 0.0  # of the slowest pool [request/s]
    cost: float = NAN  # NaN without prices [USD/h]
    gap: float = NAN  # relative distance of objective and bound; NaN where the solver does not say [1]
    bound: float = NAN  # proven limit of the objective: [request/s], GPUs [1] or [USD/h]
    binds: str = ""  # infeasible: "gpu_budget" or "required_rate"
    nearest: float = NAN  # infeasible: the value of that limit that would do, in its unit
    mixing_gain: float = NAN  # of mixed pools over one configuration a pool; NaN where not compared [1]

    @property
    def total_gpus(self) -> int:
        """GPUs of all pools. [1]"""
        return sum(self.gpus)


def fill_pools(pools: Sequence[Choices], goal: Goal, options: MatchOptions = USUAL) -> PoolCounts:
    """Choose how many instances of each choice every pool gets, so that all pools keep up with one request rate.

    With a budget alone: the highest request rate, then the fewest GPUs. With a required rate: the fewest GPUs, or the
    lowest cost where there are prices, within the budget if there is one. A pool has one configuration unless mixing
    several gains more than ``options.mixing_gain``, or no answer is feasible without it.
    """
    goal.check()
    deadline = time.monotonic() + options.time_limit

    def solved(kinds: int | None) -> PoolCounts:
        search = _Search(tuple(pools), goal, kinds, deadline)
        return search.most(goal.gpu_budget or 0) if goal.required_rate is None else search.cheapest(goal.required_rate)

    if options.max_configurations_per_pool is not None or options.mixing_gain == 0:
        return solved(options.max_configurations_per_pool)
    return _preferred(solved(1), solved(None), options.mixing_gain, of_rate=goal.required_rate is None)


def _preferred(plain: PoolCounts, mixed: PoolCounts, least_gain: float, *, of_rate: bool) -> PoolCounts:
    """The answer of one configuration a pool, or the mixed one where it gains more than ``least_gain``."""
    if not plain.counts or not mixed.counts:
        return plain if plain.counts else mixed  # mixing can do whatever one configuration can
    if of_rate:
        gain, what = mixed.request_rate / plain.request_rate - 1, "rate"
    elif np.isnan(plain.cost):
        gain, what = plain.total_gpus / mixed.total_gpus - 1, "rate per GPU"
    else:
        gain, what = plain.cost / mixed.cost - 1, "rate per cost"
    gain = max(gain, 0.0)
    if gain > least_gain:
        text = f"{mixed.message}; mixed pools, {gain:.1%} more {what} than one configuration a pool"
        return replace(mixed, message=text, mixing_gain=gain)
    more = f"; mixed pools would have {gain:.1%} more {what}" if gain >= 0.001 else ""
    return replace(plain, message=plain.message + more, mixing_gain=gain)


@dataclass(frozen=True, slots=True)
class _Search:
    """The two goals over the same choices."""

    pools: tuple[Choices, ...]
    goal: Goal
    kinds: int | None
    deadline: float  # of the monotonic clock [s]

    def most(self, gpu_budget: int) -> PoolCounts:
        """Highest request rate within the budget, then fewest GPUs."""
        refused = self._too_small()
        if refused is not None:
            return refused
        first = self._most_rate(gpu_budget)
        best = self._filled(first, goal="highest request rate")
        if not best.counts:
            return best
        second = self._least_cost(best.request_rate, None)
        fewer = self._filled(second, goal="highest request rate, then fewest GPUs")
        if not fewer.counts or fewer.total_gpus > best.total_gpus:
            return best
        proven = first.status == second.status == "optimal"
        return replace(fewer, status="optimal" if proven else "feasible", gap=first.gap, bound=first.bound)

    def cheapest(self, required_rate: float) -> PoolCounts:
        """Fewest GPUs, or lowest cost where there are prices, for a required rate.

        Each pool must reach the rate by itself. Where all its GPUs cost the same, the cheapest answer has the fewest
        GPUs, too, whatever the prices of the pools: where it breaks the budget, every answer does.
        """
        needed = sum(required_rate / pool.best_per_gpu for pool in self.pools)
        if needed > MOST_GPUS:
            raise InputError(
                f"required_rate {required_rate:g} needs {needed:.3g} GPUs; allowed: what {MOST_GPUS:,} GPUs can serve"
            )
        refused = self._too_small()
        if refused is not None:
            return refused
        prices, what = self.goal.prices, "fewest GPUs" if self.goal.prices is None else "lowest cost"
        found = self._filled(self._least_cost(required_rate, prices), goal=what)
        budget = self.goal.gpu_budget
        if budget is None or found.total_gpus <= budget:
            return found
        if prices is not None and any(np.ptp(price) > 0 for price in prices):
            fewest = self._filled(self._least_cost(required_rate, None), goal=what)
            if fewest.counts and fewest.total_gpus <= budget:
                return self._filled(self._least_cost(required_rate, prices, budget), goal=what)
        if found.status != "optimal":
            text = f"no deployment within {budget} GPUs was found within the time limit"
            return PoolCounts(status="unsolved", message=text, gap=found.gap, bound=found.bound)
        most = self._filled(self._most_rate(budget), goal="highest request rate")
        text = (
            f"{budget} GPUs do not reach {required_rate:g} requests/s; the most that fits is "
            f"{most.request_rate:.6g} requests/s, and the rate needs {found.total_gpus} GPUs"
        )
        return PoolCounts(status="infeasible", message=text, binds="required_rate", nearest=most.request_rate)

    def _too_small(self) -> PoolCounts | None:
        smallest, budget = sum(int(pool.gpus.min()) for pool in self.pools), self.goal.gpu_budget
        if budget is None or smallest <= budget:
            return None
        together = "pair of instances needs" if len(self.pools) == 2 else "instances of all pools need"
        text = f"a budget of {budget} GPUs is too small; the smallest {together} {smallest} GPUs"
        return PoolCounts(status="infeasible", message=text, binds="gpu_budget", nearest=smallest)

    def _most_rate(self, gpu_budget: int) -> Filling:
        return most_rate(self.pools, gpu_budget=gpu_budget, kinds=self.kinds, time_limit=self._time_left())

    def _least_cost(
        self, required_rate: float, prices: Sequence[float | Floats] | None, gpu_budget: int | None = None
    ) -> Filling:
        return least_cost(
            self.pools,
            required_rate=required_rate,
            prices=[1.0] * len(self.pools) if prices is None else prices,
            kinds=self.kinds,
            time_limit=self._time_left(),
            gpu_budget=gpu_budget,
        )

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _filled(self, filling: Filling, *, goal: str) -> PoolCounts:
        if filling.status == "unsolved":
            text = f"no deployment was found within the time limit while searching for the {goal}"
            return PoolCounts(status="unsolved", message=text, gap=filling.gap, bound=filling.bound)
        parts = tuple(zip(self.pools, filling.counts, strict=True))
        gpus = tuple(int((pool.gpus * counts).sum()) for pool, counts in parts)
        rate = min(sum(r * n for r, n in zip(p.rate.tolist(), c.tolist(), strict=True) if n) for p, c in parts)
        proof = "proven" if filling.status == "optimal" else "not proven, the time limit was reached"
        return PoolCounts(
            status=filling.status,
            message=f"{goal}: {rate:.6g} requests/s on {self._split(gpus)} ({proof})",
            counts=filling.counts,
            gpus=gpus,
            request_rate=rate,
            cost=self._cost(filling.counts, gpus),
            gap=filling.gap,
            bound=filling.bound,
        )

    def _split(self, gpus: tuple[int, ...]) -> str:
        """``4 prefill and 3 decode GPUs``, with their systems where these differ."""
        apart = len({pool.system for pool in self.pools}) > 1
        *first, last = (
            f"{count} {pool.name} GPUs of {pool.system}" if apart else f"{count} {pool.name}"
            for count, pool in zip(gpus, self.pools, strict=True)
        )
        return f"{', '.join(first)} and {last}{'' if apart else ' GPUs'}"

    def _cost(self, counts: tuple[Ints, ...], gpus: tuple[int, ...]) -> float:
        if self.goal.prices is None:
            return NAN
        return sum(
            float(price) * of_pool if np.ndim(price) == 0 else float((price * pool.gpus * number).sum())
            for price, of_pool, pool, number in zip(self.goal.prices, gpus, self.pools, counts, strict=True)
        )
