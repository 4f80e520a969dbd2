"""Time collectives from bytes, ranks and links, and fit curves of them; without knowledge of models.

``S`` is the full tensor in bytes, ``n`` the ranks, bandwidths are one way per GPU and already
times the efficiency reached. A group of one rank costs nothing. Fitted rows become curves: time of a collective by
message size and group size. Source: physics page, sections 5 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.efficiency import ASSUMED, EAGER, LARGE_MESSAGES, AllToAllFit, CollectiveFit, Fit
from disagg_sim.physics.tabulate import of_distinct
from disagg_sim.physics.work import Numeric


class MessageTime(NamedTuple):
    """Latency and wire time of a message; their sum is its time."""

    latency: Numeric  # [s]
    wire: Numeric  # [s]

    @property
    def time(self) -> Numeric:
        """[s]"""
        return self.latency + self.wire


def ring_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link: ``2(n-1)/n*S`` (ring or two-shot)."""
    return size * (2.0 * (n - 1.0) / n)


def one_shot_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link when each rank pulls every peer: ``(n-1)*S``."""
    return size * (n - 1.0)


def in_switch_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link with reduction in the switch: ``(1+1/n)*S``; nothing for n = 1."""
    return size * np.where(n > 1, 1.0 + 1.0 / n, 0.0)


def gather_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link of an all-gather or reduce-scatter: ``(n-1)/n*S``."""
    return size * ((n - 1.0) / n)


def all_reduce_bytes(size: Numeric, n: Numeric, *, best: bool, in_switch: bool) -> Numeric:
    """Volume of the ring, or of the least of three algorithms when ``best``; ``in_switch``: the switch can reduce."""
    ring = ring_all_reduce_bytes(size, n)
    if not best:
        return ring
    least = np.minimum(ring, one_shot_all_reduce_bytes(size, n))
    return np.minimum(least, in_switch_all_reduce_bytes(size, n)) if in_switch else least


def pipelined_transfer(wire: Numeric, n: Numeric, *, latency: float, hop: float, ramp: float) -> MessageTime:
    r"""A message of ``wire`` seconds handed on in pieces over ``n`` ranks.

    .. math:: t = a + h (n - 1) + w + 2\sqrt{r w}

    ``a`` [s] (``latency``) starts the call, ``h`` [s] (``hop``) is what each further rank adds. With pieces of the best
    size the pipeline takes :math:`(\sqrt r + \sqrt w)^2`, where ``r`` [s] (``ramp``; 0 = no hand-over) is the hand-over
    of a piece times the stages; its constant part is in ``a``. So the rate rises with the message and reaches half of
    its plateau at w = 4r. Latency and time on the wire have the broadcast shape.

    References: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    IJHPCA 19(1), 2005, :doi:`10.1177/1094342005051521`.

    At w = 4r, 100 us on the wire, half of the rate is reached:

    >>> found = pipelined_transfer(100e-6, 8, latency=10e-6, hop=1e-6, ramp=25e-6)
    >>> f"{found.latency * 1e6:.0f} us, {found.wire * 1e6:.0f} us"
    '17 us, 200 us'
    """
    return MessageTime(latency + hop * (n - 1.0), wire + 2.0 * np.sqrt(ramp * wire) if ramp else wire)


def fastest(transfers: Sequence[MessageTime]) -> MessageTime:
    """Take, at each point, the transfer that takes least time: its latency and wire time. [s]"""
    best, *others = transfers
    for other in others:
        sooner = other.time < best.time
        best = MessageTime(np.where(sooner, other.latency, best.latency), np.where(sooner, other.wire, best.wire))
    return best


def hierarchical_all_reduce(
    size: Numeric, n: Numeric, domain: Numeric, *, inside: MessageTime, nic_bandwidth: Numeric, nic_latency: float
) -> MessageTime:
    """All-reduce of ``n`` ranks over domains of ``domain`` GPUs with one NIC a GPU.

    ``inside`` is the all-reduce of one domain's ranks (reduce-scatter plus all-gather have its
    volume); between them ``2(m-1)/m*(S/n_in)`` crosses each NIC in ``2*ceil(log2 m)`` hops.
    """
    inner = np.minimum(n, domain)
    domains = np.ceil(n / domain)
    across = size / inner * (2.0 * (domains - 1.0) / domains) / nic_bandwidth
    return MessageTime(inside.latency + 2.0 * nic_latency * np.ceil(np.log2(domains)), inside.wire + across)


def copies_per_pick(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token that leave its rank, one per pick: ``k*(1-1/n)``. [1]"""
    return top_k * (1.0 - 1.0 / n)


def copies_per_rank(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token that leave its rank, one per distinct rank: ``(n-1)*(1-(1-1/n)^k)``. [1]"""
    return (n - 1.0) * (1.0 - (1.0 - 1.0 / n) ** top_k)


def copies_with_own(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token, one per distinct rank, its own counted: ``n*(1-(1-1/n)^k)``. [1]"""
    return n * (1.0 - (1.0 - 1.0 / n) ** top_k)


#: Copies of a token against picks and ranks (or nodes).
Copies = Callable[[Numeric, Numeric], Numeric]
#: Volume of an exchange, as its fit names it -> the copies of a token that it counts.
COPIES: dict[str, Copies] = {
    "T*k*d*b*(1-1/n)": copies_per_pick,
    "T*k*d*b*(1-1/nodes)": copies_per_pick,
    "T*d*b*(n-1)*(1-(1-1/n)^k)": copies_per_rank,
    "T*d*b*(nodes-1)*(1-(1-1/nodes)^k)": copies_per_rank,
    "T*d*b*n*(1-(1-1/n)^k)": copies_with_own,
}


def pipeline_hop(size: Numeric, *, latency: Numeric, bandwidth: Numeric) -> MessageTime:
    """Hand-over of a micro-batch's activations to the next stage."""
    return MessageTime(latency, size / bandwidth)


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
    """Fits of one collective, rank count by rank count or by algorithm, to a curve over links of ``link`` B/s. [s]"""
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
    """Count the ranks up to which the collectives of an engine were timed; 0 where it has none. [1]"""
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
    """Curve of one direction of the exchange over links of ``link`` B/s, by group size or from one equation. [s]"""
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
