r"""Sizes of DOPD's pools and its prefill batches: concurrency of a decode instance, and prefill instances to match.

Equations (11) to (13) and (15) of the paper, for a decode instance of TP GPUs and requests of ISL input and OSL output
tokens, M_token bytes of cache each:

.. math:: V_{mem} = (M_{gpu} - M')\,TP - M_{model},\quad V_{BW} = t_{SLO}\,\alpha\,TP\,BW,\quad
          cc = \frac{\min(V_{mem}, V_{BW})}{(ISL + OSL/2)\,M_{token}},\quad \frac{n_p}{n_d} = \frac{cc\,t_p}{t_d\,OSL}

where t_p is one prefill and t_d one decode step at batch cc, itself no larger than the largest captured CUDA graph.
V_BW forgets that the weights are read too; ``reads_weights`` takes them off, which is the physical form.

``Profile`` has the same on the memory and step times of the instances that serve: for r requests at a time
n_d = ceil(r/cc_max), and at the concurrency cc = r/n_d of each, n_p = n_d * cc * t_p/(t_d * OSL).

Prefill batches by length are those of algorithm 1, or, to compare with, in order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg_sim.domain import Sharding
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.policies.pools import Sizes
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import SHARED, Batch, Limits, Wish

#: Share of the bandwidth that a decode step reaches (alpha), and the largest captured CUDA graph, as in the paper. [1]
BANDWIDTH_SHARE, LARGEST_GRAPH = 0.6, 256
#: Short prompts filled into the length threshold by worth, or prompts in order of arrival up to the threshold.
BATCHES = ("knapsack", "fifo")
#: Share of the queueing time after which a batch runs before further long prompts [1]; mean input of the profile:
#: longer prompts run alone until the first forecast. [token]
TIMEOUT_SHARE, PROFILE_TOKENS = 0.5, 1024
#: Rules of the sizes: eq. (15) without the faults of algorithm 2; as algorithm 2 prints them; as the authors' published
#: code has them (liao4s/DOPD, c1d793e); by Little's law, this project's own.
SIZINGS = ("mended", "printed", "published", "little")
#: Weight of the newest window in the correction of times, by rule: the published code keeps no average. [1]
NEWEST = {"mended": 0.3, "printed": 0.3, "published": 1.0, "little": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one instance of each pool can do."""

    prefill: StepTable
    decode: StepTable
    tokens: float  # that a decode instance holds: min(V_mem, V_BW)/M_token [token]
    graph: int  # largest captured CUDA graph of a decode instance [1]

    @classmethod
    def of(cls, site: Site, prefill: Sharding, decode: Sharding, limits: Limits) -> Profile:
        """Of two instances at a site; ``limits`` are those of decode instances."""
        table = site.table(decode, limits.max_sequences)
        step = site.slo.tpot * table.accepted_tokens
        bandwidth = step * BANDWIDTH_SHARE * decode.gpus * site.setup_of(decode).system.hbm_bandwidth
        held = site.blocks(decode, limits) * BLOCK_TOKENS
        return cls(
            prefill=site.table(prefill, limits.max_sequences),
            decode=table,
            tokens=min(held, bandwidth / site.handed_model.kv_bytes(1, site.setup.precision)),
            graph=limits.max_sequences,
        )

    def prefill_time(self, prompt: int) -> float:
        """t_p: what one prompt keeps a prefill instance busy. [s]"""
        return self.prefill.pass_time(prompt)[1]

    def token_time(self, sequences: float, context: float) -> float:
        """t_d: one token of so many sequences, rounded, at a mean context. [s]"""
        return self.decode.token_time(min(max(round(sequences), 1), self.graph), context)

    def concurrency(self, inputs: float, outputs: float) -> float:
        """cc_max of requests of these mean lengths. [request]"""
        return max(1.0, min(self.tokens / (inputs + outputs / 2), self.graph))

    def sizes(
        self,
        requests: float,
        inputs: float,
        outputs: float,
        *,
        rule: str = "mended",
        correction: Sequence[float] = (1.0, 1.0),
    ) -> Sizes:
        """Instances of both pools, at mean lengths [token].

        ``requests`` are those in service at a time [1], for ``published`` those that came in a window [1], for
        ``little`` those that come in a second [request/s].

        * ``printed`` takes t_d at all requests together and at the length (ISL + OSL)/2, and multiplies n_p by n_d.
        * ``published`` has n_d = ceil(r/cc), and n_p = ceil(cc * t_p/(OSL * t_d)) whatever n_d is, t_d at cc.
        * ``little``: a decode instance of cc requests ends cc/(OSL * t_d) of them in a second, and a prefill instance
          1/t_p. Requests in service, of which the other rules take n_d, are more the fewer instances there are, so that
          their sizes swing under a constant load; a rate does not depend on the sizes.
        """
        decode = max(1, math.ceil(requests / self.concurrency(inputs, outputs)))
        printed = rule == "printed"
        if rule in ("published", "little"):
            held, prompt = self.concurrency(inputs, outputs), max(round(inputs), 1)
            stays = outputs * correction[1] * self.token_time(held, inputs + outputs / 2)
            if rule == "little":
                first = correction[0] * self.prefill_time(prompt)
                return Sizes(max(1, math.ceil(requests * first)), max(1, math.ceil(requests * stays / held)))
            return Sizes(max(1, math.ceil(math.floor(held) * self.prefill_time(prompt) / stays)), decode)
        context = (inputs + outputs) / 2 if printed else inputs + outputs / 2
        step = correction[1] * self.token_time(requests if printed else requests / decode, context)
        first = correction[0] * self.prefill_time(max(round(inputs), 1))
        matched = matching_prefill(requests, decode, prefill_s=first, step_s=step, outputs=outputs, rule=rule)
        return Sizes(max(1, math.ceil(matched)), decode)


def matching_prefill(
    requests: float, decode: int, *, prefill_s: float, step_s: float, outputs: float, rule: str
) -> float:
    """Match prefill instances to decode instances, not rounded: n_p of eq. (15). [1]

    Takes the requests in decode at a time on all decode instances, t_p of one prompt and t_d of one decode step [s],
    the mean output length [token], and a rule, "mended" or "printed": as printed the ratio is taken at the requests of
    all instances and then multiplied by their number.

    100 requests of 50 tokens in steps of 20 ms complete 100 in 1 s; prompts of 30 ms keep 3 instances busy:

    >>> [matching_prefill(100, 2, prefill_s=0.03, step_s=0.02, outputs=50, rule=rule) for rule in ("mended", "printed")]
    [3.0, 6.0]
    """
    ratio = requests / (outputs * step_s / prefill_s)
    return ratio * decode if rule == "printed" else ratio


def kingman_wait(gaps: Sequence[float] | NDArray[np.float64], services: NDArray[np.float64], *, servers: int) -> float:
    r"""Estimate the mean queueing time by eq. (10); infinite when the servers are full.

    .. math:: W = \frac{\rho}{1 - \rho}\,\frac{c_a^2 + c_s^2}{2}\,\tau, \qquad \rho = \tau / E[gap]

    Source: J. Kingman, "The single server queue in heavy traffic", Proc. Camb. Phil. Soc. 57 (1961). Several servers
    count as one so many times as fast, which they are when all of them have work. Takes the gaps between arrivals,
    (requests - 1,), and service times, (requests,) [s]; infinite also without two arrivals at different times. [s]

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

    def __init__(self, site: Site, batches: str, threshold: float = PROFILE_TOKENS, *, shared: bool = False) -> None:
        self.threshold = threshold  # forecast mean input length, i_next [token]
        self.wait_s = 0.0  # queueing time of the last window; before the first no batch waits [s]
        self._fifo, self._limit = batches == "fifo", site.slo.ttft
        self._full_s = site.table(site.deployment.prefill[0].mapping).pass_time(max(round(threshold), 1))[0]
        self._joined: dict[int, float] = {}  # when the first prompt joined the batch of a queue [s]
        self.shared = shared  # whether all instances take from one queue
        #: Whether each instance holds what any other holds.
        self._equal = len(site.deployment.prefill) == 1
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
                share, arrival = TIMEOUT_SHARE * self.wait_s, view.arrival_s[request]
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
    """Indices of what goes in, by value per weight, whatever does not fit passed over: of equals the first.

    At most the heaviest item's value off the best filling, as the fractional knapsack shows.
    """
    order = sorted(range(len(weights)), key=lambda item: -values[item] / weights[item])
    taken, left = [], capacity
    for item in order:
        if weights[item] <= left:
            taken.append(item)
            left -= weights[item]
    return taken
