"""Find the best deployment for a budget or a demand: pools may mix configurations, by integer program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.arrays import Ints
from disagg_sim.errors import InputError, above_zero, quoted, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.search.grid import PhaseGrid
from disagg_sim.serving.candidates import best_per_size, check_same_case, kv_rate_per_gpu, least, mapping_order
from disagg_sim.serving.filling import MOST_GPUS, NAN, USUAL, Filled, Goal, MatchOptions, fill_pools
from disagg_sim.serving.integer_program import Choices


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
    goal = Goal(gpu_budget=gpu_budget, required_rate=required_rate, prices=usd_per_gpu_hour)
    return _plan(sides, fill_pools([side.choices for side in sides], goal, options))


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
        self.choices = Choices(grid.phase, gpus[keep], rate[keep], grid.setup.system.name)

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


def _plan(sides: tuple[_Side, _Side], filled: Filled) -> MatchPlan:
    """The counts as a deployment."""
    rate, total, deployment = filled.request_rate, filled.total_gpus, None
    if filled.counts:
        deployment = Deployment(*(side.pool(counts) for side, counts in zip(sides, filled.counts, strict=True)))
    return MatchPlan(
        status=filled.status,
        message=filled.message,
        deployment=deployment,
        request_rate=rate,
        tokens_per_s_per_gpu=rate * sides[1].grid.lengths.mean_osl / total if total else 0.0,
        total_gpus=total,
        cost=filled.cost,
        gap=filled.gap,
        bound=filled.bound,
        binds=filled.binds,
        nearest=filled.nearest,
        mixing_gain=filled.mixing_gain,
    )


def _check(prefill: PhaseGrid, decode: PhaseGrid) -> None:
    for grid, phase in ((prefill, "prefill"), (decode, "decode")):
        if grid.phase != phase:
            raise InputError(f"expected a {phase} grid, got a {grid.phase} grid")
    check_same_case(prefill, decode)
