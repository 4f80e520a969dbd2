"""Find the best deployment for a budget or a demand: pools may mix configurations, by integer program."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError, above_zero, as_float, quoted, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.search.grid import PhaseGrid
from disagg_sim.serving.candidates import best_per_size, check_same_case, kv_rate_per_gpu, least, mapping_order
from disagg_sim.serving.integer_program import Choices, Filling, least_cost, most_rate

NAN = float("nan")
GPUS = (1.0, 1.0)  # prices that count GPUs [1]
#: Least gain for which pools mix configurations by default. Each configuration is a service of its own to deploy, watch
#: and route to, and a step time is known to some percent only (docs/fidelity.md). [1]
MIXING_GAIN = 0.05
#: Most GPUs that are planned for; the solver keeps counts to a relative 1e-6 and finds no end far above. [1]
MOST_GPUS = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPlan(Shown):
    """A deployment with the solver's account of it, or the limit that forbids one."""

    status: str  # "optimal", "feasible" (time limit reached), "unsolved" (time limit, no answer) or "infeasible"
    message: str  # one line
    deployment: Deployment | None = None
    request_rate: float = 0.0  # matched: of the slower pool [request/s]
    tokens_per_s_per_gpu: float = 0.0  # output tokens over ALL GPUs [token/s]
    total_gpus: int = 0  # [1]
    cost: float = NAN  # NaN without prices [USD/h]
    gap: float = NAN  # relative distance of objective and bound; NaN where the solver does not say [1]
    bound: float = NAN  # proven limit of the objective: [request/s], GPUs [1] or [USD/h]
    binds: str = ""  # infeasible: "memory", "ftl", "ttl", "kv_link", "gpu_budget" or "required_rate"
    nearest: float = NAN  # infeasible: the value of that limit that would do, in its unit
    mixing_gain: float = NAN  # of mixed pools over one configuration a pool; NaN where not compared [1]

    @property
    def mixes(self) -> bool:
        """Whether a pool has more than one configuration."""
        pools = (self.deployment.prefill, self.deployment.decode) if self.deployment is not None else ()
        return any(len(pool.members) > 1 for pool in pools)


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
        above_zero("time_limit", self.time_limit, "s")
        if self.kv_link_limit is not None:
            above_zero("kv_link_limit", self.kv_link_limit)
        if not 0 <= as_float(self.mixing_gain) < np.inf:
            raise InputError(f"mixing_gain {quoted(self.mixing_gain)} is out of range; allowed: from 0, finite")
        if self.max_configurations_per_pool is not None:
            whole_number("max_configurations_per_pool", self.max_configurations_per_pool)


USUAL = MatchOptions()


def match_rates(
    prefill: PhaseGrid,
    decode: PhaseGrid,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    gpu_budget: int | None = None,
    required_rate: float | None = None,
    usd_per_gpu_hour: tuple[float, float] | None = None,
    options: MatchOptions = USUAL,
) -> MatchPlan:
    """Choose instances of both pools, over all configurations at once.

    With ``gpu_budget`` alone: the highest request rate, then the fewest GPUs. With ``required_rate``:
    the fewest GPUs, or the lowest cost where prices are given, within the budget if there is one. A pool has one
    configuration unless mixing several gains more than ``options.mixing_gain``, or no plan is feasible without it.

    Parameters
    ----------
    prefill, decode : PhaseGrid
        Scored points of one case; the two pools may run on different systems (``Instance.system``).
    ftl_limit, ttl_limit : float
        Largest latencies of a configuration, inclusive. [s]
    gpu_budget : int, optional
        Most GPUs of both pools together, up to 10,000,000. [1]
    required_rate : float, optional
        Rate that both pools must reach, to a relative 1e-9. [request/s]
    usd_per_gpu_hour : pair of float, optional
        Prices of a prefill and of a decode GPU; ``serving.costs.usd_per_gpu_hour`` knows the market's. [USD/h]
    options : MatchOptions
        Mixing of configurations, limit of the KV link, time of the solver.

    Returns
    -------
    MatchPlan
        Infeasible limits are an answer (``status``, ``binds``, ``nearest``), not an error.

    Raises
    ------
    InputError
        Values out of range, grids of different cases, neither a budget nor a rate.

    Examples
    --------
    A prefill instance takes 56 requests/s and a decode instance 68, one GPU each. Of 7 GPUs four prefill, and decode
    sets the rate, 3 x 68:

    >>> import disagg_sim as ds
    >>> at, lengths = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal"), ds.lengths(2048, 256)
    >>> prefill = ds.prefill_grid(at, ds.Mapping(), lengths, batch=[1])
    >>> plan = match_rates(prefill, ds.decode_grid(at, ds.Mapping(), lengths, batch=[64]), gpu_budget=7)
    >>> plan.status, f"{plan.request_rate:.0f} requests/s", plan.total_gpus
    ('optimal', '203 requests/s', 7)
    """
    _check(prefill, decode)
    prices = usd_per_gpu_hour or (NAN, NAN)
    above_zero("ftl_limit", ftl_limit, "s")
    numbers: dict[str, object] = {"ttl_limit": ttl_limit, "required_rate": required_rate}
    if usd_per_gpu_hour is not None:
        if np.shape(usd_per_gpu_hour) != (2,):
            raise InputError(f"usd_per_gpu_hour {quoted(usd_per_gpu_hour)} is no pair of prices")
        numbers |= zip(("prefill price", "decode price"), usd_per_gpu_hour, strict=True)
    for name, number in numbers.items():
        if number is not None:
            above_zero(name, number)
    if gpu_budget is not None:
        whole_number("gpu_budget", gpu_budget, most=MOST_GPUS)
    within = _one_domain(prefill, decode, gpu_budget)
    link = options.kv_link_limit
    sides = (_Side(prefill, ftl_limit, link, within), _Side(decode, ttl_limit, link, within))
    for side in sides:
        if side.rows.size == 0:
            return side.refusal()
    if gpu_budget is None and required_rate is None:
        raise InputError("give gpu_budget (to maximise the request rate) or required_rate (to minimise GPUs or cost)")
    deadline = time.monotonic() + options.time_limit

    def solved(kinds: int | None) -> MatchPlan:
        search = _Search(sides, prices, gpu_budget, kinds, deadline)
        return search.most(gpu_budget or 0) if required_rate is None else search.cheapest(required_rate)

    if options.max_configurations_per_pool is not None or options.mixing_gain == 0:
        return solved(options.max_configurations_per_pool)
    return _preferred(solved(1), solved(None), options.mixing_gain, of_rate=required_rate is None)


def _one_domain(prefill: PhaseGrid, decode: PhaseGrid, gpu_budget: int | None) -> bool:
    """Whether both pools fit one NVLink domain."""
    system = prefill.setup.system
    return system == decode.setup.system and (gpu_budget or MOST_GPUS) <= system.nvlink_domain


def _served_rates(grid: PhaseGrid, within_domain: bool) -> NDArray[np.float64]:
    """Request rates of instances that the links of their GPUs can feed; (rows, batches) [request/s]."""
    link = own_link_bandwidth(grid.setup.system, grid.setup.profile, within_domain=within_domain)
    fed = link * grid.unique_gpus[:, None] / grid.kv_bytes_per_request
    rates: NDArray[np.float64] = np.minimum(grid.request_rate, fed)
    return rates


def _preferred(plain: MatchPlan, mixed: MatchPlan, least_gain: float, *, of_rate: bool) -> MatchPlan:
    """The plan of one configuration a pool, or the mixed one where it gains more than ``least_gain``."""
    if plain.deployment is None or mixed.deployment is None:
        return mixed if plain.deployment is None else plain  # mixing can do whatever one configuration can
    if of_rate:
        gain, goal = mixed.request_rate / plain.request_rate - 1, "rate"
    elif np.isnan(plain.cost):
        gain, goal = plain.total_gpus / mixed.total_gpus - 1, "rate per GPU"
    else:
        gain, goal = plain.cost / mixed.cost - 1, "rate per cost"
    gain = max(gain, 0.0)
    if mixed.mixes and gain > least_gain:
        text = f"{mixed.message}; mixed pools, {gain:.1%} more {goal} than one configuration a pool"
        return replace(mixed, message=text, mixing_gain=gain)
    more = f"; mixed pools would have {gain:.1%} more {goal}" if gain >= 0.001 else ""
    return replace(plain, message=plain.message + more, mixing_gain=gain)


class _Side:
    """Configurations that one pool may use: within the limits and not dominated.

    Take two configurations of G and H <= G GPUs and rates a and b with floor(G/H)*b >= a. In any pool,
    floor(G/H) instances of the second can take the place of one of the first: GPUs and cost do not rise,
    the rate does not fall, the number of distinct configurations does not grow, and the limits of latency
    and of the KV link, which hold for each configuration by itself, stay met. So the first can be left
    out and the optimum is untouched. With G = H this leaves one point per GPU count.
    """

    def __init__(
        self, grid: PhaseGrid, latency_limit: float | None, kv_link_limit: float | None, within_domain: bool
    ) -> None:
        self.grid = grid
        self.latency_limit = np.inf if latency_limit is None else latency_limit
        self.kv_link_limit = np.inf if kv_link_limit is None else kv_link_limit
        self.rates = _served_rates(grid, within_domain) if kv_link_limit is None else grid.request_rate
        self.in_time = grid.feasible & (grid.latency <= self.latency_limit)
        usable = self.in_time & (kv_rate_per_gpu(grid) <= self.kv_link_limit)
        rows, columns = np.nonzero(usable)
        gpus, rate = grid.gpus[rows], self.rates[rows, columns]
        best = best_per_size(gpus, rate, mapping_order(grid)[usable])
        instead = (gpus[best][:, None] // gpus[best]) * rate[best]  # (first, second)
        np.fill_diagonal(instead, -np.inf)
        keep = best[(instead < rate[best][:, None]).all(axis=1)]
        self.rows, self.columns = rows[keep], columns[keep]
        self.choices = Choices(gpus[keep], rate[keep])

    def refusal(self) -> MatchPlan:
        """The limit that leaves nothing, and the value of it that would leave something."""
        grid, phase, name = self.grid, self.grid.phase, "FTL" if self.grid.phase == "prefill" else "TTL"
        if not grid.feasible.any():
            lacking = least(grid.memory_bytes - grid.memory_limit, ~grid.feasible)
            text = f"no {phase} mapping fits in memory; the closest lacks {lacking:.4g} B per GPU"
            return MatchPlan(status="infeasible", message=text, binds="memory", nearest=grid.memory_limit + lacking)
        if not self.in_time.any():
            best = least(grid.latency, grid.feasible)
            text = (
                f"no {phase} configuration meets the {name} limit of {self.latency_limit:g} s; "
                f"the best {name} is {best:.4g} s"
            )
            return MatchPlan(status="infeasible", message=text, binds=name.lower(), nearest=best)
        best = least(kv_rate_per_gpu(grid), self.in_time)
        text = (
            f"no {phase} configuration stays below the KV-link limit of {self.kv_link_limit:g} B/s per GPU; "
            f"the least bandwidth needed is {best:.4g} B/s"
        )
        return MatchPlan(status="infeasible", message=text, binds="kv_link", nearest=best)

    def pool(self, counts: Ints) -> Pool:
        """The counts of ``choices`` as a pool."""
        return Pool(tuple((self._instance(int(i)), int(counts[i])) for i in np.flatnonzero(counts)))

    def _instance(self, choice: int) -> Instance:
        """One of ``choices``, at the rate that its links can feed."""
        row, column = int(self.rows[choice]), int(self.columns[choice])
        return replace(self.grid.instance(row, column), request_rate_per_s=float(self.choices.rate[choice]))


@dataclass(frozen=True, slots=True)
class _Search:
    """The two goals over the same choices."""

    sides: tuple[_Side, _Side]
    prices: tuple[float, float]  # NaN = none [USD/h]
    gpu_budget: int | None
    kinds: int | None
    deadline: float  # of the monotonic clock [s]

    def most(self, gpu_budget: int) -> MatchPlan:
        """Highest request rate within the budget, then fewest GPUs."""
        refused = self._too_small()
        if refused is not None:
            return refused
        first = self._most_rate(gpu_budget)
        plan = self._plan(first, goal="highest request rate")
        if plan.deployment is None:
            return plan
        second = self._least_cost(plan.request_rate, GPUS)
        fewer = self._plan(second, goal="highest request rate, then fewest GPUs")
        if fewer.deployment is None or fewer.total_gpus > plan.total_gpus:
            return plan
        proven = first.status == second.status == "optimal"
        return replace(fewer, status="optimal" if proven else "feasible", gap=first.gap, bound=first.bound)

    def cheapest(self, required_rate: float) -> MatchPlan:
        """Fewest GPUs, or lowest cost where there are prices, for a required rate.

        Each pool must reach the rate by itself and all its GPUs cost the same, so the cheapest plan has the
        fewest GPUs, too, whatever the two prices: where it breaks the budget, every plan does.
        """
        needed = sum(required_rate / side.choices.best_per_gpu for side in self.sides)
        if needed > MOST_GPUS:
            raise InputError(
                f"required_rate {required_rate:g} needs {needed:.3g} GPUs; allowed: what {MOST_GPUS:,} GPUs can serve"
            )
        refused = self._too_small()
        if refused is not None:
            return refused
        priced = not np.isnan(self.prices[0])
        goal = "lowest cost" if priced else "fewest GPUs"
        plan = self._plan(self._least_cost(required_rate, self.prices if priced else GPUS), goal=goal)
        if self.gpu_budget is None or plan.total_gpus <= self.gpu_budget:
            return plan
        if plan.status != "optimal":
            text = f"no deployment within {self.gpu_budget} GPUs was found within the time limit"
            return MatchPlan(status="unsolved", message=text, gap=plan.gap, bound=plan.bound)
        most = self._plan(self._most_rate(self.gpu_budget), goal="highest request rate")
        text = (
            f"{self.gpu_budget} GPUs do not reach {required_rate:g} requests/s; the most that fits is "
            f"{most.request_rate:.6g} requests/s, and the rate needs {plan.total_gpus} GPUs"
        )
        return MatchPlan(status="infeasible", message=text, binds="required_rate", nearest=most.request_rate)

    def _too_small(self) -> MatchPlan | None:
        smallest = sum(int(side.choices.gpus.min()) for side in self.sides)
        if self.gpu_budget is None or smallest <= self.gpu_budget:
            return None
        text = f"a budget of {self.gpu_budget} GPUs is too small; the smallest pair of instances needs {smallest} GPUs"
        return MatchPlan(status="infeasible", message=text, binds="gpu_budget", nearest=smallest)

    def _most_rate(self, gpu_budget: int) -> Filling:
        prefill, decode = (side.choices for side in self.sides)
        return most_rate(prefill, decode, gpu_budget=gpu_budget, kinds=self.kinds, time_limit=self._time_left())

    def _least_cost(self, required_rate: float, prices: tuple[float, float]) -> Filling:
        prefill, decode = (side.choices for side in self.sides)
        return least_cost(
            prefill, decode, required_rate=required_rate, prices=prices, kinds=self.kinds, time_limit=self._time_left()
        )

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _plan(self, filling: Filling, *, goal: str) -> MatchPlan:
        if filling.status == "unsolved":
            text = f"no deployment was found within the time limit while searching for the {goal}"
            return MatchPlan(status="unsolved", message=text, gap=filling.gap, bound=filling.bound)
        prefill, decode = (side.pool(n) for side, n in zip(self.sides, (filling.prefill, filling.decode), strict=True))
        rate, total = min(prefill.request_rate_per_s, decode.request_rate_per_s), prefill.gpus + decode.gpus
        where = [side.grid.setup.system.name for side in self.sides]
        split = f"{prefill.gpus} prefill and {decode.gpus} decode GPUs"
        if where[0] != where[1]:
            split = f"{prefill.gpus} prefill GPUs of {where[0]} and {decode.gpus} decode GPUs of {where[1]}"
        proof = "proven" if filling.status == "optimal" else "not proven, the time limit was reached"
        return MatchPlan(
            status=filling.status,
            message=f"{goal}: {rate:.6g} requests/s on {split} ({proof})",
            deployment=Deployment(prefill, decode),
            request_rate=rate,
            tokens_per_s_per_gpu=rate * self.sides[1].grid.lengths.mean_osl / total,
            total_gpus=total,
            cost=self.prices[0] * prefill.gpus + self.prices[1] * decode.gpus,
            gap=filling.gap,
            bound=filling.bound,
        )


def _check(prefill: PhaseGrid, decode: PhaseGrid) -> None:
    for grid, phase in ((prefill, "prefill"), (decode, "decode")):
        if grid.phase != phase:
            raise InputError(f"expected a {phase} grid, got a {grid.phase} grid")
    check_same_case(prefill, decode)
