"""Find the best deployment for a budget or a demand: pools may mix configurations, by integer program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg_sim.errors import InputError, above_zero, quoted, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.search.deployment import Deployment, Pool
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import check_same_case
from disagg_sim.serving.pool_options import GridSide
from disagg_sim.serving.pool_program import MOST_GPUS, NAN, USUAL, Goal, MatchOptions, PoolCounts, fill_pools


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
    >>> prefill = ds.prefill_grid(at, ds.Sharding(), lengths, batch=[1])
    >>> plan = match_rates(prefill, ds.decode_grid(at, ds.Sharding(), lengths, batch=[64]), gpu_budget=7)
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
    sides = (GridSide(prefill, ftl_limit, link, within), GridSide(decode, ttl_limit, link, within))
    for side in sides:
        if side.choices.gpus.size == 0:
            return _plan(sides, side.refusal())
    goal = Goal(gpu_budget=gpu_budget, required_rate=required_rate, prices=usd_per_gpu_hour)
    return _plan(sides, fill_pools([side.choices for side in sides], goal, options))


def _one_domain(prefill: PhaseGrid, decode: PhaseGrid, gpu_budget: int | None) -> bool:
    """Whether both pools fit one NVLink domain."""
    system = prefill.setup.system
    return system == decode.setup.system and (gpu_budget or MOST_GPUS) <= system.nvlink_domain


def _plan(sides: tuple[GridSide, GridSide], filled: PoolCounts) -> MatchPlan:
    """The counts as a deployment."""
    rate, total, deployment = filled.request_rate, filled.total_gpus, None
    if filled.counts:
        parts = zip(sides, filled.counts, strict=True)
        deployment = Deployment(*(Pool(tuple(side.members(counts))) for side, counts in parts))
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
