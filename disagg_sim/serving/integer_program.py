"""Fill a prefill and a decode pool by integer programs, modelled in PuLP, solved by HiGHS or CBC.

With counts :math:`n_i` of prefill and :math:`m_j` of decode configurations (G GPUs, rate p or r each):

.. math::
    \\max X \\;\\text{or}\\; \\min c_p \\sum n_i G_i + c_d \\sum m_j G_j \\quad\\text{s.t.}\\quad
    \\sum n_i p_i \\ge X,\\; \\sum m_j r_j \\ge X,\\; \\sum n_i G_i + \\sum m_j G_j \\le budget

and, where the number of distinct configurations of a pool is limited, binaries :math:`y` with
:math:`n_i \\le u_i y_i` and :math:`\\sum y_i \\le k`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints

#: A required rate in the solver's unit: its feasibility tolerance of 1e-6 then is a relative 1e-9. [1]
FINE = 1000.0


@dataclass(frozen=True, eq=False, slots=True)
class Choices:
    """Configurations that a pool may use; arrays of shape (choices,)."""

    gpus: Ints  # of one instance [1]
    rate: Floats  # of one instance at full rate [request/s]

    @property
    def best_per_gpu(self) -> float:
        """Highest request rate per GPU. [request/s]"""
        return float((self.rate / self.gpus).max())


@dataclass(frozen=True, eq=False, slots=True)
class Filling:
    """How many instances of each choice, and how sure the solver is of it."""

    status: str  # "optimal", "feasible" (stopped by the time limit) or "unsolved" (stopped before any answer)
    prefill: Ints  # counts, shape of the prefill choices [1]
    decode: Ints  # counts, shape of the decode choices [1]
    gap: float  # relative distance of objective and bound; NaN where the solver does not say [1]
    bound: float  # proven limit of the objective, in its unit; NaN where the solver does not say


def most_rate(prefill: Choices, decode: Choices, *, gpu_budget: int, kinds: int | None, time_limit: float) -> Filling:
    """Pools of the highest matched request rate within a GPU budget; ``bound`` in [request/s].

    Parameters
    ----------
    prefill, decode : Choices
        What the pools may be made of; the smallest pair fits the budget.
    gpu_budget : int
        Most GPUs of the two pools together. [1]
    kinds : int, optional
        Most distinct configurations of a pool. [1]
    time_limit : float
        Of the solver. [s]
    """
    p, r = prefill.best_per_gpu, decode.best_per_gpu
    scale = gpu_budget * p * r / (p + r)  # real-valued counts reach no more, so X/scale stays within [0, 1]
    limits = tuple(np.minimum(gpu_budget // side.gpus, exchange_limits(side, kinds)) for side in (prefill, decode))
    program = _Program(prefill, decode, scale=scale, limits=limits, sense="max")
    program.objective([(program.rate, 1.0)])
    program.at_most_gpus(gpu_budget)
    program.at_most_kinds(kinds)
    return program.solve(time_limit, unit=scale)


def least_cost(
    prefill: Choices,
    decode: Choices,
    *,
    required_rate: float,
    prices: tuple[float, float],
    kinds: int | None,
    time_limit: float,
) -> Filling:
    """Cheapest pools that both reach a request rate; ``bound`` in the unit of the prices.

    Parameters
    ----------
    prefill, decode, kinds, time_limit
        As in ``most_rate``.
    required_rate : float
        Rate that each pool must reach, to a relative 1e-9. [request/s]
    prices : pair of float
        Of a GPU of the prefill and of the decode pool; 1, 1 counts GPUs. [any]
    """
    limits = tuple(
        np.minimum(np.ceil(required_rate / side.rate).astype(np.int64), exchange_limits(side, kinds))
        for side in (prefill, decode)
    )
    program = _Program(prefill, decode, scale=required_rate / FINE, limits=limits, sense="min")
    program.objective(program.gpu_terms(prices))
    program.at_least_rate(FINE)
    program.at_most_kinds(kinds)
    return program.solve(time_limit, unit=1.0)


def exchange_limits(side: Choices, kinds: int | None) -> Ints:
    """How many instances of each choice a best pool needs at most; shape (choices,). [1]

    Where a choice of G GPUs has a better (or the same, and stands earlier) rate per GPU than one of H,
    lcm(G, H)/G instances of it can take the place of lcm(G, H)/H = G/gcd(G, H) instances of the other: the
    GPUs stay and the rate does not fall. Such exchanges come to an end, so some best pool allows none and
    has at most G/gcd(G, H) - 1 instances of the other. They may add a kind, so there is no such limit where
    ``kinds`` limits the distinct configurations of a pool.
    """
    unlimited = np.iinfo(np.int64).max
    if kinds is not None:
        return np.full(side.gpus.size, unlimited)
    place = np.empty(side.gpus.size, dtype=np.int64)
    place[np.argsort(-side.rate / side.gpus, kind="stable")] = np.arange(side.gpus.size)
    most = side.gpus // np.gcd(side.gpus[:, None], side.gpus) - 1  # (other, better): G/gcd(G, H) - 1
    limits: Ints = np.where(place < place[:, None], most, unlimited).min(axis=1)
    return limits


class _Program:
    """A PuLP model under construction; rates are divided by ``scale`` to suit the solver's tolerances."""

    def __init__(
        self, prefill: Choices, decode: Choices, *, scale: float, limits: tuple[Ints, ...], sense: str
    ) -> None:
        import pulp

        self.pulp = pulp
        self.sides = (prefill, decode)
        self.limits = limits
        self.model: Any = pulp.LpProblem("pools", pulp.LpMaximize if sense == "max" else pulp.LpMinimize)
        self.sign = -1.0 if sense == "max" else 1.0  # PuLP hands HiGHS a minimisation
        self.rate = self.model.add_variable("rate", 0)
        self.counts = [
            [self.model.add_variable(f"{name}_{i}", 0, int(u), cat=pulp.LpInteger) for i, u in enumerate(limit)]
            for name, limit in zip(("prefill", "decode"), limits, strict=True)
        ]
        for side, counts in zip(self.sides, self.counts, strict=True):
            self._add([*zip(counts, (side.rate / scale).tolist(), strict=True), (self.rate, -1.0)], ">=", 0.0)

    def _add(self, terms: list[tuple[Any, float]], sense: str, right: float) -> None:
        left = self.pulp.LpAffineExpression(terms)
        self.model += left >= right if sense == ">=" else left <= right

    def gpu_terms(self, prices: tuple[float, float]) -> list[tuple[Any, float]]:
        return [
            (count, price * gpus)
            for price, side, counts in zip(prices, self.sides, self.counts, strict=True)
            for count, gpus in zip(counts, side.gpus.tolist(), strict=True)
        ]

    def objective(self, terms: list[tuple[Any, float]]) -> None:
        self.model += self.pulp.LpAffineExpression(terms)

    def at_most_gpus(self, gpu_budget: int) -> None:
        self._add(self.gpu_terms((1.0, 1.0)), "<=", gpu_budget)

    def at_least_rate(self, scaled_rate: float) -> None:
        self.rate.lowBound = scaled_rate

    def at_most_kinds(self, kinds: int | None) -> None:
        for name, counts, limits in zip(("prefill", "decode"), self.counts, self.limits, strict=True):
            if kinds is None or kinds >= len(counts):
                continue
            used = [self.model.add_variable(f"{name}_used_{i}", cat=self.pulp.LpBinary) for i in range(len(counts))]
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
        prefill, decode = (
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
        return Filling(status, prefill, decode, float(gap), float(bound))


def _solvers(pulp: Any, time_limit: float) -> Iterator[Any]:
    """HiGHS inside the process where ``highspy`` is installed, then the CBC that PuLP brings along.

    HiGHS keeps its own feasibility tolerances: at 1e-9 it calls wrong answers optimal (4 in 1,000 small pools,
    HiGHS 1.15). Its feasibility-jump heuristic costs 4 ms a program and finds nothing that these lack.
    """
    highs = pulp.HiGHS(
        msg=False, timeLimit=time_limit, gapRel=0.0, gapAbs=0.0, threads=1, mip_heuristic_run_feasibility_jump=False
    )
    if highs.available():
        yield highs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will want CBC installed apart
        cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit, gapRel=0.0)
    yield cbc
