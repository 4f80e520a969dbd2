"""Find the best pools for a budget or a demand: pools may mix configurations, by integer program.

Prefill and decode, encoding of images, and decode split over attention and feed-forward GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.choices import POOLS
from disagg_sim.errors import InputError, above_zero, whole_number
from disagg_sim.notebook import Shown
from disagg_sim.search.deployment import Deployment, Instance, Pool
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import check_same_case
from disagg_sim.serving.costs import Per, costs_of_gpus
from disagg_sim.serving.integer_program import Choices
from disagg_sim.serving.pool_options import EncodeSide, GridSide, SplitSide
from disagg_sim.serving.pool_program import MOST_GPUS, NAN, USUAL, Goal, MatchOptions, PoolCounts, fill_pools
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.split.search import SplitGrid, SplitInstance, setups_of

#: What a request passes: the pools of one of them do the same work.
ROLES = ("encode", "prefill", "decode")

Candidates = EncodeStep | PhaseGrid | SplitGrid
Member = EncodeStep | Instance | SplitInstance
_Side = EncodeSide | GridSide | SplitSide


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPlan(Shown):
    """Pools with the solver's account of them, or the limit that forbids any."""

    status: str  # "optimal", "feasible" (time limit reached), "unsolved" (time limit, no answer) or "infeasible"
    message: str  # one line
    members: tuple[tuple[Member, int], ...]  # configurations and their instances
    request_rate: float  # of the slowest pool [request/s]
    tokens_per_s_per_gpu: float  # output tokens over ALL GPUs [token/s]
    cost: float  # of all GPUs, in the unit of ``per``; NaN where GPUs are counted
    gap: float  # relative distance of objective and bound; NaN where the solver does not say [1]
    bound: float  # proven limit of the objective: [request/s], GPUs [1] or cost
    binds: str  # infeasible: "memory", "ftl", "ttl", "kv_link", "gpu_budget" or "required_rate"
    nearest: float  # infeasible: the value of that limit that would do, in its unit
    mixing_gain: float  # of mixed pools over one configuration a pool; NaN where not compared [1]
    ftl_s: float  # first-token latency, encoding included, no queue; of the slowest configuration [s]
    ttl_s: float  # token-to-token latency of the slowest configuration [s]

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of each pool that has any, by name, in the order of ``POOLS``. [1]"""
        found = dict.fromkeys(POOLS, 0)
        for member, count in self.members:
            for name, gpus in _gpus_of(member).items():
                found[name] += gpus * count
        return {name: gpus for name, gpus in found.items() if gpus}

    @property
    def total_gpus(self) -> int:
        """GPUs of all pools. [1]"""
        return sum(self.gpus.values())

    @property
    def mixes(self) -> bool:
        """Whether a pool has more than one configuration."""
        roles = [member.phase if isinstance(member, Instance) else type(member) for member, _ in self.members]
        return len(roles) > len(set(roles))

    @property
    def deployment(self) -> Deployment | None:
        """Instances of prefill and decode, to be simulated; None where there are none, or further pools."""
        phases: dict[str, list[tuple[Instance, int]]] = {"prefill": [], "decode": []}
        for member, count in self.members:
            if not isinstance(member, Instance):
                return None
            phases[member.phase].append((member, count))
        return Deployment(*(Pool(tuple(found)) for found in phases.values())) if self.members else None


def plan_pools(
    candidates: Sequence[Candidates],
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    gpu_budget: int | None = None,
    required_rate: float | None = None,
    per: Per = "gpu",
    options: MatchOptions = USUAL,
) -> PoolsPlan:
    """Choose instances of every pool that a request passes, over all configurations at once.

    With ``gpu_budget`` alone: the highest request rate, then the fewest GPUs. With ``required_rate``: the fewest GPUs,
    or the lowest cost, within the budget if there is one. A pool has one configuration unless mixing several gains more
    than ``options.mixing_gain``, or no plan is feasible without it. Pools encode, prefill and decode; instances of
    decode may be whole or split over attention and feed-forward GPUs. Candidates for the same work compete, such as
    grids of several systems.

    Parameters
    ----------
    candidates : sequence of EncodeStep, PhaseGrid and SplitGrid
        At least a prefill grid, and a decode or a split grid, of one model and one length of prompts.
    ftl_limit : float
        Largest first-token latency of a configuration, encoding and the way of the embeddings included. [s]
    ttl_limit : float, optional
        Largest token-to-token latency, inclusive. [s]
    gpu_budget : int, optional
        Most GPUs of all pools together, up to 10,000,000. [1]
    required_rate : float, optional
        Rate that every pool must reach, to a relative 1e-9. [request/s]
    per : {"gpu", "usd", "watt"} or mapping
        What is least for a required rate: GPUs, their price or their TDP; a mapping gives prices by system. [USD/h]
    options : MatchOptions
        Mixing of configurations, limit of the KV link, time of the solver.

    Returns
    -------
    PoolsPlan
        Infeasible limits are an answer (``status``, ``binds``, ``nearest``), not an error.

    Raises
    ------
    InputError
        Values out of range, a pool that is missing, candidates of different cases, neither a budget nor a rate.

    Examples
    --------
    A prefill instance takes 56 requests/s and a decode instance 68, one GPU each. Of 7 GPUs four prefill, and decode
    sets the rate, 3 x 68:

    >>> import disagg_sim as ds
    >>> at, lengths = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal"), ds.lengths(2048, 256)
    >>> prefill = ds.prefill_grid(at, ds.Sharding(), lengths, batch=[1])
    >>> plan = ds.plan_pools([prefill, ds.decode_grid(at, ds.Sharding(), lengths, batch=[64])], gpu_budget=7)
    >>> plan.status, f"{plan.request_rate:.0f} requests/s", plan.gpus
    ('optimal', '203 requests/s', {'prefill': 4, 'decode': 3})

    Requests with two images of 1120 x 1120 pixels; one GPU encodes for twelve that prefill:

    >>> at, lengths = ds.setup("kimi_k2_5", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal"), ds.lengths(8192, 512)
    >>> wide = ds.Sharding(dp_attn=8, ep=8)
    >>> pools = [
    ...     ds.encode_step(at, images=2, height=1120, width=1120),
    ...     ds.prefill_grid(at, wide, lengths),
    ...     ds.split_grid(at, lengths, max_gpus=32),
    ... ]
    >>> plan = ds.plan_pools(pools, ttl_limit=0.03, gpu_budget=72)
    >>> plan.gpus
    {'encode': 4, 'prefill': 48, 'attention': 8, 'ffn': 8}
    """
    above_zero("ftl_limit", ftl_limit, "s")
    for name, number in (("ttl_limit", ttl_limit), ("required_rate", required_rate)):
        if number is not None:
            above_zero(name, number)
    if gpu_budget is not None:
        whole_number("gpu_budget", gpu_budget, most=MOST_GPUS)
    by_role = _by_role(candidates)
    added = max((step.latency for step in by_role["encode"]), default=0.0)
    systems = [at.system for each in candidates for at in setups_of(each)]
    alike = all(system == systems[0] for system in systems)
    near = alike and (gpu_budget or MOST_GPUS) <= systems[0].nvlink_domain  # all pools in one NVLink domain
    link = options.kv_link_limit
    limits = {"prefill": ftl_limit - added, "decode": ttl_limit}
    sides: dict[str, list[_Side]] = {
        role: [_side(each, limits.get(role), link, near) for each in found] for role, found in by_role.items() if found
    }
    for found in sides.values():
        if not any(side.choices.gpus.size for side in found):
            return _plan(sides, found[0].refusal(), candidates, added)
    costs = None if per == "gpu" else costs_of_gpus(list({system.name: system for system in systems}.values()), per)
    prices = None if costs is None else [_prices(found, costs) for found in sides.values()]
    pools = [_choices(role, found) for role, found in sides.items()]
    goal = Goal(gpu_budget=gpu_budget, required_rate=required_rate, prices=prices)
    return _plan(sides, fill_pools(pools, goal, options), candidates, added)


def _by_role(candidates: Sequence[Candidates]) -> dict[str, list[Any]]:
    """The candidates by what they do; ``InputError`` unless together they serve a request of one case."""
    found: dict[str, list[Any]] = {role: [] for role in ROLES}
    for each in candidates:
        role = "encode" if isinstance(each, EncodeStep) else each.phase if isinstance(each, PhaseGrid) else "decode"
        found[role].append(each)
    for role, what in (("prefill", "a prefill grid"), ("decode", "a decode grid or a split grid")):
        if not found[role]:
            raise InputError(f"no {role} pool; give {what} among the candidates")
    for prefill in found["prefill"]:
        for decode in found["decode"]:
            check_same_case(prefill, decode)
    first = found["prefill"][0]
    for step in found["encode"]:
        if step.setup.model.name != first.setup.model.name:
            raise InputError(f"encode and prefill differ in model: {step.setup.model.name}, {first.setup.model.name}")
        if step.tokens > first.lengths.mean_isl:
            raise InputError(
                f"the images of a request are {step.tokens} tokens, more than its prompt of "
                f"{first.lengths.mean_isl:.0f}; the prompt length counts them"
            )
    return found


def _side(each: Candidates, limit: float | None, link: float | None, near: bool) -> _Side:
    if isinstance(each, EncodeStep):
        return EncodeSide(each)
    return GridSide(each, limit, link, near) if isinstance(each, PhaseGrid) else SplitSide(each, limit, link, near)


def _choices(role: str, sides: Sequence[_Side]) -> Choices:
    """The choices of all sides of a role as those of one pool."""
    if len(sides) == 1:
        return sides[0].choices
    gpus, rate = (np.concatenate([getattr(side.choices, name) for side in sides]) for name in ("gpus", "rate"))
    systems = dict.fromkeys(side.choices.system for side in sides)
    return Choices(role, gpus, rate, " and ".join(systems))


def _prices(sides: Sequence[_Side], costs: dict[str, float]) -> float | Floats:
    """Price of a GPU of a pool: one number where all its choices are of one system, else the mean of each choice."""
    found: list[Floats] = []
    for side in sides:
        one = side.step if isinstance(side, EncodeSide) else side.grid
        price = np.full(side.choices.gpus.size, costs[one.setup.system.name])
        if isinstance(side, SplitSide):
            ffn = side.grid.ffn_gpus[side.rows]
            price += (costs[side.grid.ffn_setup.system.name] - price) * ffn / side.choices.gpus
        found.append(price)
    prices = np.concatenate(found)
    return float(prices[0]) if np.ptp(prices) == 0 else prices


def _gpus_of(member: Member) -> dict[str, int]:
    """GPUs of an instance by pool. [1]"""
    if isinstance(member, EncodeStep):
        return {"encode": 1}
    if isinstance(member, Instance):
        return {member.phase: int(member.mapping.gpus)}
    return {"attention": int(member.attention.gpus), "ffn": int(member.ffn.gpus)}


def _plan(
    sides: dict[str, list[_Side]], filled: PoolCounts, candidates: Sequence[Candidates], added: float
) -> PoolsPlan:
    """The counts as instances."""
    members: list[tuple[Member, int]] = []
    for found, counts in zip(sides.values(), filled.counts, strict=False):
        ends = [0, *accumulate(side.choices.gpus.size for side in found)]
        for side, (start, stop) in zip(found, pairwise(ends), strict=True):
            members += side.members(counts[start:stop])
    osl = next(each.lengths.mean_osl for each in candidates if not isinstance(each, EncodeStep))
    total = filled.total_gpus

    def slowest(phase: str) -> float:
        times = [m.latency_s for m, _ in members if not isinstance(m, EncodeStep)]
        kinds = [m.phase if isinstance(m, Instance) else "decode" for m, _ in members if not isinstance(m, EncodeStep)]
        return max((time for time, kind in zip(times, kinds, strict=True) if kind == phase), default=NAN)

    return PoolsPlan(
        status=filled.status,
        message=filled.message,
        members=tuple(members),
        request_rate=filled.request_rate,
        tokens_per_s_per_gpu=filled.request_rate * osl / total if total else 0.0,
        cost=filled.cost,
        gap=filled.gap,
        bound=filled.bound,
        binds=filled.binds,
        nearest=filled.nearest,
        mixing_gain=filled.mixing_gain,
        ftl_s=slowest("prefill") + added,
        ttl_s=slowest("decode"),
    )
