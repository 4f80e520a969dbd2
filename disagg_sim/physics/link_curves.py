"""Turn fitted rows into curves: time of a collective by message size and group size.

Source: physics page, sections 5 and 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.efficiency import ASSUMED, EAGER, LARGE_MESSAGES, AllToAllFit, CollectiveFit, Fit
from disagg_sim.physics.collectives import (
    COPIES,
    Copies,
    MessageTime,
    copies_per_rank,
    fastest,
    gather_bytes,
    in_switch_all_reduce_bytes,
    one_shot_all_reduce_bytes,
    pipelined_transfer,
    ring_all_reduce_bytes,
)
from disagg_sim.physics.distinct import of_distinct
from disagg_sim.physics.work import Numeric


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective inside a domain."""

    name: str  # a key of VOLUMES
    latency: float  # of two ranks less one hop [s]
    hop: float  # latency that each rank beyond the first adds [s]
    bandwidth: float  # [B/s]
    ramp: float  # hand-over of a pipelined message [s]
    least: float = 0.0  # ranks that it takes, at least [1]
    most: float = np.inf  # at most [1]

    def takes(self, n: Numeric) -> Numeric:
        """Whether it takes ``n`` ranks."""
        return (np.asarray(n) >= self.least) & (np.asarray(n) <= self.most)

    def transfer(self, size: Numeric, n: Numeric) -> MessageTime:
        """Latency and wire time of a tensor of ``size`` bytes over ``n`` ranks; endless if it takes fewer."""
        wire = VOLUMES[self.name](size, n) / self.bandwidth
        found = pipelined_transfer(wire, n, latency=self.latency, hop=self.hop, ramp=self.ramp)
        return MessageTime(np.where(self.takes(n), found.latency, np.inf), found.wire)


#: Algorithm -> bytes over one rank's link; "gather" stands for all-gather, reduce-scatter and all-to-all.
VOLUMES = {
    "ring": ring_all_reduce_bytes,
    "two_shot": ring_all_reduce_bytes,
    "one_shot": one_shot_all_reduce_bytes,
    "in_switch": in_switch_all_reduce_bytes,
    "gather": gather_bytes,
}


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """Latency and bandwidth of a collective against the number of ranks (or nodes), log2-interpolated.

    Where ``algorithms`` are known, the fastest of those that take so many ranks counts instead; the curve then holds
    their latency at small and their bandwidth at large messages. Beyond ``algorithm_ranks`` the curve is one of them.
    """

    ranks: NDArray[np.float64]
    latency: NDArray[np.float64]  # [s]
    bandwidth: NDArray[np.float64]  # [B/s]
    step: float = 0.0  # latency added per doubling beyond the last entry [s]
    copies: Copies = copies_per_rank  # all-to-all: copies of a token that are sent
    token_bandwidth: float = np.inf  # all-to-all across nodes: what the sending kernel itself reaches [B/s]
    algorithms: tuple[Algorithm, ...] = ()
    algorithm_ranks: float = np.inf

    def at(self, ranks: Numeric) -> tuple[Numeric, Numeric]:
        """Latency [s] and bandwidth [B/s] for a group of ``ranks``."""

        def interpolated(n: Numeric) -> tuple[Numeric, Numeric]:
            x, known = np.log2(n), np.log2(self.ranks)
            beyond = np.maximum(x - known[-1], 0.0) * self.step
            return np.interp(x, known, self.latency) + beyond, np.interp(x, known, self.bandwidth)

        found: tuple[Numeric, Numeric] = of_distinct(interpolated, ranks)
        return found

    def transfer(self, size: Numeric, n: Numeric, volume: Numeric) -> MessageTime:
        """Latency and wire time of a tensor of ``size`` bytes, ``volume`` of them over each link of the curve."""
        latency, bandwidth = self.at(n)
        flat = MessageTime(latency, volume / bandwidth)
        if not self.algorithms:
            return flat
        beyond = MessageTime(np.where(np.asarray(n) > self.algorithm_ranks, flat.latency, np.inf), flat.wire)
        return fastest([*(algorithm.transfer(size, n) for algorithm in self.algorithms), beyond])

    def with_latency(self, factor: float) -> LinkCurve:
        """The same links with every latency times ``factor``. [1]"""
        algorithms = tuple(
            replace(each, latency=each.latency * factor, hop=each.hop * factor, ramp=each.ramp * factor)
            for each in self.algorithms
        )
        return replace(self, latency=self.latency * factor, step=self.step * factor, algorithms=algorithms)


@dataclass(frozen=True, slots=True)
class AllToAllRate:
    """One direction of the MoE exchange: inside an NVLink domain and across domains."""

    inside: LinkCurve
    across: LinkCurve  # against the number of domains


def flat_curve(bandwidth: float, latency: float) -> LinkCurve:
    """The same latency and bandwidth for every group."""
    return LinkCurve(np.array([1.0]), np.array([latency]), np.array([bandwidth]))


def algorithm_of(fit: CollectiveFit, link: float) -> Algorithm:
    """Read the algorithm that a fitted row describes, on links of ``link`` B/s.

    Takes ``link`` [B/s].

    8 MB over 8 ranks in a ring move 2*7/8*8 = 14 MB over each link, at 0.8 of 450 GB/s:

    >>> row = {"engine": "nccl", "version": "", "points": 0, "median_error": 0.0, "p90_error": 0.0}
    >>> fit = CollectiveFit(**row, op="all_reduce", gpus=0, latency=0.0, e_bandwidth=0.8, algorithm="ring")
    >>> f"{algorithm_of(fit, 450e9).transfer(8e6, 8).wire * 1e6:.1f} us"
    '38.9 us'
    """
    name = "gather" if fit.op != "all_reduce" else fit.algorithm.removesuffix("_ll")
    if name not in VOLUMES:
        raise InputError(f"no algorithm {fit.algorithm!r} of {fit.op}{nearest(name, VOLUMES)}")
    return Algorithm(name, fit.latency, fit.hop, fit.e_bandwidth * link, fit.ramp)


def collective_curve(rows: Sequence[CollectiveFit], link: float, *, latency: float | None, step: float) -> LinkCurve:
    """Fits of one collective, rank count by rank count or by algorithm, to a curve.

    Takes ``link`` [B/s], ``latency`` [s] (None = as fitted) and ``step`` [s].
    """
    counted = [row for row in rows if not row.algorithm]
    laws = [row for row in rows if row.algorithm and row.algorithm != EAGER]
    points = {float(row.gpus): (row.latency, row.e_bandwidth * link) for row in counted}
    algorithms = _with_ranks(laws, link)
    timed = [_gpus(row)[1] for row in laws]
    reach = min((algorithm.most for algorithm in algorithms), default=0.0)
    most = min(max(timed, default=0.0), np.inf if not counted else reach, 1024.0)
    for n in [2.0**i for i in range(1, int(np.log2(most)) + 1)] if laws else ():
        mine = [algorithm for algorithm in algorithms if algorithm.takes(n)]
        points[n] = min(a.latency + a.hop * (n - 1.0) for a in mine), max(a.bandwidth for a in mine)
    ranks = sorted(points)
    return LinkCurve(
        np.array(ranks),
        np.array([points[n][0] if latency is None else latency for n in ranks]),
        np.array([points[n][1] for n in ranks]),
        step if latency is None else 0.0,
        algorithms=algorithms if latency is None else (),
        algorithm_ranks=reach if counted or all(np.isfinite(a.most) for a in algorithms) else np.inf,
    )


def _with_ranks(laws: Sequence[CollectiveFit], link: float) -> tuple[Algorithm, ...]:
    """Algorithms with the ranks that they take: NCCL's any number, the kernels of an engine as many as were timed.

    What is assumed takes any number beyond those of the engine.
    """
    own = timed_ranks(laws)
    ranks = {LARGE_MESSAGES: (0.0, np.inf), ASSUMED: (own + 1.0, np.inf)}
    found = []
    for row in laws:
        least, most = ranks.get(row.engine, (0.0, _gpus(row)[1]))
        found.append(replace(algorithm_of(row, link), least=least, most=most))
    return tuple(found)


def timed_ranks(rows: Sequence[Fit]) -> float:
    """Count the ranks up to which the collectives of an engine were timed.

    Parameters
    ----------
    rows
        Fits of one collective, of the engine and of what stands in for it.

    Returns
    -------
    float
        0 where the engine has none of its own. [1]

    Examples
    --------
    >>> from disagg_sim.facts.load import load_efficiency
    >>> timed_ranks([row for row in load_efficiency("gb200_nvl72").collectives if row.engine == "trtllm"])
    4.0
    """
    own = [row for row in rows if isinstance(row, CollectiveFit) and row.engine not in (LARGE_MESSAGES, ASSUMED)]
    return max((_gpus(row)[1] for row in own), default=0.0)


def _gpus(row: CollectiveFit) -> tuple[float, float]:
    return dict(_spans(row)).get("num_gpus", (2.0, np.inf))


def _spans(row: CollectiveFit | AllToAllFit) -> list[tuple[str, tuple[float, float]]]:
    return [(size, (low, high)) for size, low, high in row.valid]


def pick_backend(rows: Sequence[AllToAllFit], backends: tuple[str, ...], wire: str) -> list[AllToAllFit]:
    """Rows of the first backend present, in the format sent (or all, where it does not say), one per group size."""
    for backend in backends:
        mine = [row for row in rows if row.backend == backend]
        if mine:
            same = [row for row in mine if row.format == wire] or mine
            largest: dict[tuple[int, int], AllToAllFit] = {}
            for row in same:
                key = (row.ranks, row.nodes)
                if key not in largest or row.points > largest[key].points:
                    largest[key] = row
            return [largest[key] for key in sorted(largest)]
    return []


def exchange_curve(rows: Sequence[AllToAllFit], link: float, floor: float | None, *, nodes: bool) -> LinkCurve:
    """Curve of one direction of the exchange, from fits by group size or from one equation for all sizes.

    Parameters
    ----------
    rows
        Fits of one backend and phase.
    link
        NVLink, or the NIC across nodes. [B/s]
    floor
        Latency that a profile sets; None = as fitted. [s]
    nodes
        Whether the curve runs over nodes rather than ranks.
    """
    points: dict[float, tuple[float, float]] = {}
    for row in rows:
        bandwidth = (row.e_bandwidth or 1.0) * link
        group = row.nodes if nodes else row.ranks
        low, high = dict(_spans(row)).get("node_num" if nodes else "ep_size", (2.0, 2.0))
        for n in (float(group),) if group else (low, high):
            points[n] = row.latency + row.step * np.log2(n), bandwidth
    ranks = sorted(points)
    return LinkCurve(
        np.array(ranks),
        np.array([points[n][0] if floor is None else floor for n in ranks]),
        np.array([points[n][1] for n in ranks]),
        copies=COPIES.get(rows[0].volume, copies_per_rank),
        token_bandwidth=rows[0].token_bandwidth or np.inf,
    )
