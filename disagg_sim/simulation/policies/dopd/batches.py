"""Prefill batches by length: algorithm 1 of DOPD, and batches in order of arrival to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Sharding
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import SHARED, Batch, Wish

#: Short prompts filled into the length threshold by worth, or prompts in order of arrival up to the threshold.
BATCHES = ("knapsack", "fifo")


def kingman_wait(gaps: Sequence[float] | NDArray[np.float64], services: NDArray[np.float64], *, servers: int) -> float:
    r"""Estimate the mean queueing time by eq. (10); infinite when the servers are full.

    .. math:: W = \frac{\rho}{1 - \rho}\,\frac{c_a^2 + c_s^2}{2}\,\tau, \qquad \rho = \tau / E[gap]

    Source: J. Kingman, "The single server queue in heavy traffic", Proc. Camb. Phil. Soc. 57 (1961). Several servers
    count as one so many times as fast, which they are when all of them have work.

    Parameters
    ----------
    gaps
        Between arrivals, shape (requests - 1,). [s]
    services
        Service times, shape (requests,). [s]
    servers
        How many. [1]

    Returns
    -------
    float
        inf when the servers are full, or without two arrivals at different times. [s]

    Examples
    --------
    Half loaded, gaps with a squared coefficient of variation of 1/4, equal services: 1 * 1/8 * 0.5 s

    >>> kingman_wait([0.5, 1.5], np.array([0.5, 0.5, 0.5]), servers=1)
    0.0625
    """
    gaps = np.asarray(gaps, dtype=float)
    if gaps.size < 1 or not gaps.mean() > 0:
        return math.inf
    mean = float(services.mean()) / servers
    rho = mean / float(gaps.mean())
    if rho >= 1:
        return math.inf
    variations = float(gaps.var() / gaps.mean() ** 2 + services.var() / services.mean() ** 2)
    return rho / (1 - rho) * variations / 2 * mean


class LengthAware:
    """Prompts shorter than ``threshold`` run together, up to that many tokens; longer ones run alone.

    Asked when an instance is free, it takes the waiting prompts from the oldest on. Short ones join the batch; a
    long one runs at once, the batch stays. A batch that stays is part of the queue: where instances share it, whichever
    is free next may run it. The batch runs when it is full, when the queue is at its end, and when
    its time is up: a share of the queueing time since its first prompt joined, or what the oldest of
    them has left of the TTFT limit. What of all waiting short prompts then runs is a knapsack's choice:
    worth 1 + wait/TTFT limit, weight the length, capacity the threshold.
    """

    def __init__(
        self,
        site: Site,
        batches: str,
        timeout_share: float,
        threshold: float,
        *,
        shared: bool = False,
        prefill: Sharding | None = None,
    ) -> None:
        self.threshold = threshold  # forecast mean input length, i_next [token]
        self.wait_s = 0.0  # queueing time of the last window; before the first no batch waits [s]
        self._fifo, self._share, self._limit = batches == "fifo", timeout_share, site.slo.ttft
        self._full_s = site.table(prefill or site.deployment.prefill[0].mapping).pass_time(max(round(threshold), 1))[0]
        self._joined: dict[int, float] = {}  # when the first prompt joined the batch of a queue [s]
        self.shared = shared  # whether all instances take from one queue
        #: Whether each instance holds what any other holds.
        self._equal = prefill is not None or len(site.deployment.prefill) == 1
        self._waiting: NDArray[np.int64] = np.zeros(0, np.int64)

    def waiting_tokens(self, view: ClusterView) -> NDArray[np.int64]:
        """Tokens of the prompts that wait at each instance. [token]"""
        missing = view.total_blocks.size - self._waiting.size
        if missing > 0:
            self._waiting = np.append(self._waiting, np.zeros(missing, np.int64))
        return self._waiting

    def arrived(self, instance: int, tokens: int) -> None:
        """A prompt of ``tokens`` has been sent to an instance."""
        self._waiting[instance] += tokens

    def failed(self, view: ClusterView, instances: Sequence[int], requests: Sequence[int]) -> Sequence[Wish]:  # noqa: ARG002  all are gone
        """See ``Failover``: nothing waits on an instance that has failed."""
        self.waiting_tokens(view)[list(instances)] = 0
        for instance in instances:
            self._joined.pop(instance, None)
        return ()

    def restored(self, view: ClusterView, instances: Sequence[int]) -> Sequence[Wish]:  # noqa: ARG002  nothing to do
        """See ``Failover``."""
        return ()

    def form(self, view: ClusterView, instance: int, waiting: Sequence[int]) -> Batch:
        """See ``BatchForming``."""
        tokens = view.input_tokens
        if self.shared and not self._equal:
            room = view.rank_blocks[instance] * BLOCK_TOKENS
            waiting = [request for request in waiting if tokens[request] < room]
            if not waiting:
                return Batch(())
        queue = SHARED if self.shared else instance
        chosen = self._in_order(view, waiting) if self._fifo else self._by_length(view, queue, waiting)
        if not self.shared:
            self._waiting[instance] -= sum([tokens[request] for request in chosen])
        return Batch(chosen)

    def _in_order(self, view: ClusterView, waiting: Sequence[int]) -> tuple[int, ...]:
        """The oldest up to the threshold, one at least."""
        tokens, count, total = view.input_tokens, 0, 0
        for request in waiting:
            total += tokens[request]
            if total > self.threshold and count:
                break
            count += 1
        return tuple(waiting[:count])

    def _by_length(self, view: ClusterView, queue: int, waiting: Sequence[int]) -> tuple[int, ...]:
        tokens, threshold, now = view.input_tokens, self.threshold, view.now
        joined = self._joined.get(queue)
        total = 0
        for request in waiting:
            length = tokens[request]
            if length < threshold:
                if joined is None:
                    joined = self._joined[queue] = now
                share, arrival = self._share * self.wait_s, view.arrival_s[request]
                # a share of the queueing time after the batch began, or in time for the request itself
                if total == 0 and now >= min(joined + share, arrival + self._limit - self._full_s):
                    break
                total += length
                if total >= threshold:
                    break
            else:
                if total == 0:
                    self._joined.pop(queue, None)
                return (request,)
        self._joined.pop(queue, None)
        short = [request for request in waiting if tokens[request] < threshold]
        worth = [1.0 + (now - view.arrival_s[request]) / self._limit for request in short]
        return tuple(short[item] for item in greedy(worth, [tokens[request] for request in short], threshold))


def greedy(values: Sequence[float], weights: Sequence[float], capacity: float) -> list[int]:
    """Indices of what goes in: the highest value per weight first, whatever does not fit is passed over.

    At most the heaviest item's value off the best filling, as the fractional knapsack shows. Of equals the first.

    >>> greedy([1.0, 1.0, 1.5], [40, 70, 50], 100)
    [2, 0]
    """
    order = sorted(range(len(weights)), key=lambda item: -values[item] / weights[item])
    taken, left = [], capacity
    for item in order:
        if weights[item] <= left:
            taken.append(item)
            left -= weights[item]
    return taken
