"""Fill pools that every request passes by integer programs, modelled in PuLP, solved by HiGHS or CBC.

With counts :math:`n_{si}` of the configurations of pool s (G GPUs, rate r, cost c of a GPU each), prefill and decode or
any number of pools:

.. math::
    \\max X \\;\\text{or}\\; \\min \\sum_{s,i} n_{si} G_{si} c_{si} \\quad\\text{s.t.}\\quad
    \\sum_i n_{si} r_{si} \\ge X \\;\\text{for each } s,\\; \\sum_{s,i} n_{si} G_{si} \\le budget

and, where the number of distinct configurations of a pool is limited, binaries :math:`y` with
:math:`n_i \\le u_i y_i` and :math:`\\sum y_i \\le k`.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints

#: A required rate in the solver's unit: its feasibility tolerance of 1e-6 then is a relative 1e-9. [1]
FINE = 1000.0


@dataclass(frozen=True, eq=False, slots=True)
class Choices:
    """Configurations that a pool may use; arrays of shape (choices,)."""

    name: str  # of the pool
    gpus: Ints  # of one instance [1]
    rate: Floats  # of one instance at full rate [request/s]
    system: str = ""  # that it runs on, as messages name it

    @property
    def best_per_gpu(self) -> float:
        """Highest request rate per GPU. [request/s]"""
        return float((self.rate / self.gpus).max())


@dataclass(frozen=True, eq=False, slots=True)
class Filling:
    """How many instances of each choice, and how sure the solver is of it."""

    status: str  # "optimal", "feasible" (stopped by the time limit) or "unsolved" (stopped before any answer)
    counts: tuple[Ints, ...]  # of each pool, shape of its choices [1]
    gap: float  # relative distance of objective and bound; NaN where the solver does not say [1]
    bound: float  # proven limit of the objective, in its unit; NaN where the solver does not say


def most_rate(pools: Sequence[Choices], *, gpu_budget: int, kinds: int | None, time_limit: float) -> Filling:
    """Pools of the highest matched request rate within a GPU budget; ``bound`` in [request/s]."""
    best = reduce(lambda p, r: p * r / (p + r), (pool.best_per_gpu for pool in pools))
    scale = gpu_budget * best  # real-valued counts reach no more, so X/scale stays within [0, 1]
    limits = tuple(np.minimum(gpu_budget // pool.gpus, exchange_limits(pool, kinds)) for pool in pools)
    program = _Program(pools, scale=scale, most=1.0, limits=limits, sense="max")
    program.objective([(program.rate, 1.0)])
    program.at_most_gpus(gpu_budget)
    program.at_most_kinds(kinds)
    return program.solve(time_limit, unit=scale)


def least_cost(
    pools: Sequence[Choices],
    *,
    required_rate: float,
    prices: Sequence[float | Floats],
    kinds: int | None,
    time_limit: float,
    gpu_budget: int | None = None,
) -> Filling:
    """Cheapest pools that all reach a request rate; ``bound`` in the unit of the prices."""
    limits = tuple(
        np.minimum(np.ceil(required_rate / pool.rate).astype(np.int64), exchange_limits(pool, kinds, price))
        for pool, price in zip(pools, prices, strict=True)
    )
    program = _Program(pools, scale=required_rate / FINE, most=FINE, limits=limits, sense="min")
    program.objective(program.gpu_terms(prices))
    program.rate.lowBound = FINE
    if gpu_budget is not None:
        program.at_most_gpus(gpu_budget)
    program.at_most_kinds(kinds)
    return program.solve(time_limit, unit=1.0)


def exchange_limits(side: Choices, kinds: int | None, price: float | Floats = 1.0) -> Ints:
    """How many instances of each choice a best pool needs at most; shape (choices,). [1]

    Where a choice of G GPUs has a better (or the same, and stands earlier) rate per GPU than one of H,
    lcm(G, H)/G instances of it can take the place of lcm(G, H)/H = G/gcd(G, H) instances of the other: the
    GPUs stay and the rate does not fall. Such exchanges come to an end, so some best pool allows none and
    has at most G/gcd(G, H) - 1 instances of the other. They may add a kind, so there is no such limit where
    ``kinds`` limits the distinct configurations of a pool, nor where a ``price`` differs from choice to choice.
    """
    unlimited = np.iinfo(np.int64).max
    if kinds is not None or np.ptp(price) > 0:
        return np.full(side.gpus.size, unlimited)
    place = np.empty(side.gpus.size, dtype=np.int64)
    place[np.argsort(-side.rate / side.gpus, kind="stable")] = np.arange(side.gpus.size)
    most = side.gpus // np.gcd(side.gpus[:, None], side.gpus) - 1  # (other, better): G/gcd(G, H) - 1
    limits: Ints = np.where(place < place[:, None], most, unlimited).min(axis=1)
    return limits


class _Program:
    """A PuLP model under construction; rates are divided by ``scale`` to suit the solver's tolerances.

    ``most`` is the largest rate, in units of ``scale``, that an answer may have or must reach. An instance counts
    with no more: a solver that takes counts within 1e-6 for whole would fill a pool with a millionth of an instance.
    """

    def __init__(
        self, pools: Sequence[Choices], *, scale: float, most: float, limits: tuple[Ints, ...], sense: str
    ) -> None:
        import pulp

        self.pulp = pulp
        self.pools = pools
        self.limits = limits
        self.model: Any = pulp.LpProblem("pools", pulp.LpMaximize if sense == "max" else pulp.LpMinimize)
        self.sign = -1.0 if sense == "max" else 1.0  # PuLP hands HiGHS a minimisation
        self.rate = self.model.add_variable("rate", 0)
        self.counts = [
            [self.model.add_variable(f"{pool.name}_{i}", 0, int(u), cat=pulp.LpInteger) for i, u in enumerate(limit)]
            for pool, limit in zip(pools, limits, strict=True)
        ]
        for pool, counts in zip(pools, self.counts, strict=True):
            rates = np.minimum(pool.rate / scale, most).tolist()
            self._add([*zip(counts, rates, strict=True), (self.rate, -1.0)], ">=", 0.0)

    def _add(self, terms: list[tuple[Any, float]], sense: str, right: float) -> None:
        left = self.pulp.LpAffineExpression(terms)
        self.model += left >= right if sense == ">=" else left <= right

    def gpu_terms(self, prices: Sequence[float | Floats]) -> list[tuple[Any, float]]:
        return [
            (count, price)
            for of_gpu, pool, counts in zip(prices, self.pools, self.counts, strict=True)
            for count, price in zip(counts, (of_gpu * pool.gpus).tolist(), strict=True)
        ]

    def objective(self, terms: list[tuple[Any, float]]) -> None:
        self.model += self.pulp.LpAffineExpression(terms)

    def at_most_gpus(self, gpu_budget: int) -> None:
        self._add(self.gpu_terms([1.0] * len(self.pools)), "<=", gpu_budget)

    def at_most_kinds(self, kinds: int | None) -> None:
        for pool, counts, limits in zip(self.pools, self.counts, self.limits, strict=True):
            if kinds is None or kinds >= len(counts):
                continue
            used = [
                self.model.add_variable(f"{pool.name}_used_{i}", cat=self.pulp.LpBinary) for i in range(len(counts))
            ]
            for count, flag, limit in zip(counts, used, limits.tolist(), strict=True):
                self._add([(count, 1.0), (flag, -float(limit))], "<=", 0.0)
            self._add([(flag, 1.0) for flag in used], "<=", kinds)

    def solve(self, time_limit: float, *, unit: float) -> Filling:
        """Every program posed here has a solution, so a solver that ends early without one failed: try the next."""
        model, pulp = self.model, self.pulp
        deadline = time.monotonic() + time_limit
        for solver in _solvers(pulp, time_limit):
            model.solve(solver)
            solved = model.sol_status in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}
            if solved or time.monotonic() >= deadline:
                break
        optimal = solved and model.sol_status == pulp.LpSolutionOptimal
        found = tuple(
            np.array([round(count.varValue) if solved else 0 for count in counts], dtype=np.int64)
            for counts in self.counts
        )
        gap, bound = np.nan, np.nan
        if solver.name == "HiGHS":
            account = model.solverModel.getInfo()
            gap, bound = account.mip_gap, self.sign * account.mip_dual_bound * unit
        elif optimal:
            gap, bound = 0.0, pulp.value(model.objective) * unit
        status = "optimal" if optimal else "feasible" if solved else "unsolved"
        return Filling(status, found, float(gap), float(bound))


def _solvers(pulp: Any, time_limit: float) -> Iterator[Any]:
    """HiGHS inside the process where ``highspy`` is installed, then the CBC that PuLP brings along.

    HiGHS keeps its own feasibility tolerances: at 1e-9 it calls wrong answers optimal (4 in 1,000 small pools,
    HiGHS 1.15). Its feasibility-jump heuristic costs 4 ms a program and finds nothing that these lack.
    """
    highs = pulp.HiGHS(
        msg=False, timeLimit=time_limit, gapRel=0.0, gapAbs=0.0, threads=1, mip_heuristic_run_feasibility_jump=False
    )
    if highs.available():
        _first_made()
        yield highs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will want CBC installed apart
        cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit, gapRel=0.0)
    yield cbc


@cache
def _first_made() -> None:
    """Make one HiGHS aside: 1.16 prints its version as the first of a process is made, before it can be told not to."""
    highspy: Any = import_module("highspy")
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        own, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # a process without standard output
        highspy.Highs()
        return
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nowhere)
