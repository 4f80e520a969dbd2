r"""Add spare instances to points, for a stated availability, by the law of ``techniques.availability.law``.

A point says how many instances of each pool serve together. Deployments side by side share spares, so a point stands
for as many of them as the cap on GPUs allows, k, a site of that size:

.. math:: \frac{k\,X\,O}{k\,G + \sum_s c_s\,G_s}, \qquad k = \lfloor cap/G \rfloor

with the cheapest spares :math:`c_s` of each pool with which all pools of the site have what the load needs for the
share of time that is asked for. The cap limits the GPUs that serve; spares come on top. Where throughput is
counted over what GPUs draw, a spare one draws what a GPU draws that waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.choices import FAILURES
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError, check_kinds
from disagg_sim.facts.failures import FailureSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_failures, load_system
from disagg_sim.physics.power import power_of
from disagg_sim.serving.costs import DRAWN_WATTS, JOULE, PER_DRAWN_JOULE, Per, check_per, costs_of_gpus, throughput_of
from disagg_sim.serving.points import THROUGHPUT, WITH_SPARES, Column
from disagg_sim.techniques.availability.law import MOST_SPARES, NEVER, Blast, blast_of, check_target

#: Most GPUs that serve in a site whose spares are counted: shares of time are kept for each pair of counts. [1]
MOST_GPUS = 4096


def spares_columns(throughput: str) -> tuple[Column, ...]:
    """Columns that a table has beside ``points.COLUMNS`` where an availability was asked for.

    The frontier is taken in the last of them.
    """
    unit = {THROUGHPUT: "token/s", "tokens_per_usd": "token/USD"}.get(throughput, "token/J")
    return (
        Column("availability_target", "float64", "1", "share of time at full capacity asked for; 0 = no spares"),
        Column("copies", "int64", "1", "deployments like this one that the cap on GPUs allows, with spares in common"),
        Column("prefill_spares", "int64", "1", "spare prefill instances of all copies"),
        Column("decode_spares", "int64", "1", "spare decode or co-located instances of all copies"),
        Column("gpus_with_spares", "int64", "1", "GPUs of all copies and spares"),
        Column("availability", "float64", "1", "share of time in which every pool has what the load needs"),
        Column(throughput + WITH_SPARES, "float64", unit, f"{throughput} with spares among the GPUs"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRules:
    """A stated availability, how often parts fail, and what spares cost."""

    target: float  # share of time at full capacity, below 1; 0 = no spares [1]
    failing: FailureSpec = field(default_factory=partial(load_failures, FAILURES))
    gpu_cap: int = 576  # most GPUs that serve [1]
    per: Per = "gpu"  # what throughput is counted over, as in ``with_cost``; or what GPUs draw, "joule"

    def __post_init__(self) -> None:
        """``InputError`` for a target or a cap out of range."""
        check_kinds(self)
        if self.target:
            check_target(self.target)
        if not 1 <= self.gpu_cap <= MOST_GPUS:
            raise InputError(f"gpu_cap: {self.gpu_cap} with an availability; allowed: 1 to {MOST_GPUS:,}")
        if self.per != JOULE:
            check_per(self.per)

    def costs(self, systems: Sequence[SystemSpec]) -> dict[str, float]:
        """Cost of a spare GPU of each system: [1], [USD/h], or [W] at the TDP or of one that waits."""
        if self.per == JOULE:
            return {system.name: power_of(system).idle for system in systems}
        return costs_of_gpus(systems, self.per)


def with_spares(
    points: pd.DataFrame, wanted: SpareRules, systems: Mapping[str, SystemSpec] | None = None
) -> pd.DataFrame:
    """Add to points the spares that an availability takes, and their throughput with these.

    Parameters
    ----------
    points : DataFrame
        A table of points of any mode (``points.COLUMNS``), with the columns of its cost, or of its energy.
    wanted : SpareRules
        Availability, failures, and what spares cost.
    systems : mapping, optional
        System by name: its NVLink domain counts. By default the shipped ones.

    Returns
    -------
    DataFrame
        A copy with ``spares_columns`` at the end.

    Raises
    ------
    InputError
        An availability out of reach.

    Examples
    --------
    One instance of eight GPUs fails every 264 days and serves again within 10 minutes; a spare gives six nines:

    >>> import disagg_sim as ds
    >>> at, options = ds.setup("llama_3_1_70b", "h100_sxm", "fp8"), ds.Colocation(batch=(8,), prefill_batch=(1,))
    >>> points = ds.colocated(at, ds.Sharding(tp_attn=8, tp_ffn=8), ds.lengths(1024, 256), options=options)
    >>> row = with_spares(points, SpareRules(target=0.999999, gpu_cap=8)).iloc[0]
    >>> int(row["decode_spares"]), int(row["gpus_with_spares"])
    (1, 16)
    """
    names = ("prefill_gpus", "prefill_instances", "decode_gpus", "decode_instances")
    pools = np.stack([points[name].to_numpy(dtype=np.int64) for name in names], axis=1)
    pools[points["mode"].astype(str).to_numpy() != ServingMode.DISAGGREGATED, :2] = 0
    copies = np.maximum(wanted.gpu_cap // points["total_gpus"].to_numpy(dtype=np.int64), 1)
    pools[:, [1, 3]] *= copies[:, None]
    found = np.zeros((len(points), 3))
    sides = [points[name].astype(str).to_numpy(dtype=object) for name in ("prefill_system", "system")]
    systems = systems or {name: load_system(name) for side in sides for name in set(side)}
    for sender, taker in sorted(set(zip(*sides, strict=True))):
        rows = np.flatnonzero((sides[0] == sender) & (sides[1] == taker))
        distinct, place = np.unique(pools[rows], axis=0, return_inverse=True)
        found[rows] = _spares(distinct, wanted, (systems[sender], systems[taker]))[place.reshape(-1)]
    prefill, decode, share = found.T
    joule = wanted.per == JOULE
    throughput, costs = PER_DRAWN_JOULE if joule else throughput_of(wanted.per), wanted.costs([*systems.values()])
    cost, spared = np.zeros(len(points)), np.zeros(len(points))
    for side, (names_of_side, spares) in enumerate(zip(sides, (prefill, decode), strict=True)):
        each = pools[:, 2 * side] * np.array([costs[name] for name in names_of_side])
        cost, spared = cost + each * pools[:, 2 * side + 1], spared + each * spares
    if joule:
        cost = copies * points[DRAWN_WATTS].to_numpy(dtype=float)
    gpus = pools[:, 0] * (pools[:, 1] + prefill) + pools[:, 2] * (pools[:, 3] + decode)
    values: dict[str, Any] = {
        "availability_target": wanted.target,
        "copies": copies,
        "prefill_spares": prefill.astype(np.int64),
        "decode_spares": decode.astype(np.int64),
        "gpus_with_spares": gpus.astype(np.int64),
        "availability": share,
        throughput + WITH_SPARES: points[throughput].to_numpy(dtype=float) * (cost / (cost + spared)),
    }
    return points.assign(**values)


def _spares(pools: Ints, wanted: SpareRules, systems: tuple[SystemSpec, SystemSpec]) -> Floats:
    """Spares of prefill and of decode, and availability, of distinct (G_p, N_p, G_d, N_d); shape (rows, 3)."""
    found = np.tile([0.0, 0.0, 1.0], (len(pools), 1))
    if not wanted.target:
        return found
    price = wanted.costs(systems)
    total = pools[:, 0] * pools[:, 1] + pools[:, 2] * pools[:, 3]
    far = [(pools[:, 0] > 0) & (total > system.nvlink_domain) for system in systems]
    distinct, kind = np.unique(np.stack([pools[:, 0], pools[:, 2], *far], axis=1), axis=0, return_inverse=True)
    for number, sizes in enumerate(distinct.tolist()):
        some = np.flatnonzero(kind.reshape(-1) == number)
        needs = [
            _Pool(
                blast=blast_of(wanted.failing, system, sizes[side], links=bool(sizes[side + 2])),
                instances=pools[some, 2 * side + 1],
                cost=price[system.name] * sizes[side],
            )
            for side, system in enumerate(systems)
            if sizes[side]
        ]
        counts, found[some, 2] = _fewest(needs, wanted.target)
        found[some, 2 - len(needs) : 2] = counts
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """A pool of several deployments."""

    blast: Blast
    instances: Ints  # that the load of each needs, (deployments,) [1]
    cost: float  # of an instance [any]

    def up(self, spares: Ints) -> Floats:
        """Share of time in which as many serve as are needed, (deployments,). [1]"""
        largest = int((self.instances + spares).max())
        table = _at_least(self.blast, 2 ** largest.bit_length())
        found: Floats = table[self.instances + spares, self.instances]
        return found

    def fewest(self, share: Floats) -> Ints:
        """Fewest spares for a share of the time, above ``MOST_SPARES`` where it is out of reach, (deployments,). [1]"""
        low = np.zeros(self.instances.shape, dtype=np.int64)
        high = np.zeros_like(low)
        while (short := (self.up(high) < share) & (high <= MOST_SPARES)).any():
            low, high = np.where(short, high + 1, low), np.where(short, 2 * high + 1, high)
        while (open_ := low < high).any():
            middle = (low + high) // 2
            short = self.up(middle) < share
            low, high = np.where(open_ & short, middle + 1, low), np.where(open_ & ~short, middle, high)
        return high


@lru_cache(maxsize=64)
def _at_least(blast: Blast, largest: int) -> Floats:
    """Share of time in which at least n of m instances serve, (m, n); shape (largest + 1, largest + 1). [1]"""
    table = np.zeros((largest + 1, largest + 1))
    table[0, 0] = 1.0
    for count in range(1, largest + 1):
        table[count, : count + 1] = blast.serving(count)[::-1].cumsum()[::-1]
    table.setflags(write=False)
    return table


def _fewest(pools: Sequence[_Pool], target: float) -> tuple[Ints, Floats]:
    """Find the cheapest spares of one pool or of two, as ``availability.spares_for``, of many deployments at once.

    Counts of shape (deployments, pools), and the share of time in which all have what the load needs, (deployments,).
    """
    first, *others = pools
    least = first.fewest(np.full(first.instances.shape, target))
    counts = least[:, None]
    if others:
        (other,) = others
        best = np.full(least.shape, np.inf)
        counts = np.stack([least, np.full_like(least, MOST_SPARES + 1)], axis=1)
        for more in range(MOST_SPARES + 1):  # more of the first leave less to do for the other
            spares = least + more
            share = first.up(np.minimum(spares, MOST_SPARES))
            enough = share > target
            needed = np.where(enough, other.fewest(np.where(enough, target / share, 0.0)), MOST_SPARES + 1)
            spent = np.where(needed <= MOST_SPARES, spares * first.cost + needed * other.cost, np.inf)
            better = spent < best
            best = np.where(better, spent, best)
            counts = np.where(better[:, None], np.stack([spares, needed], axis=1), counts)
            if (((spares + 1) * first.cost >= best) | (1.0 - share < NEVER)).all():
                break
    if (counts > MOST_SPARES).any():
        raise InputError(f"availability {target:g} is out of reach with {MOST_SPARES:,} spare instances of a pool")
    share = np.ones(least.shape)
    for pool, spares in zip(pools, counts.T, strict=True):
        share = share * pool.up(spares)
    return counts, np.minimum(share, 1.0)
