"""Match decode points with prefill candidates, and tell which points cannot be on the frontier."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.search.pareto import pareto_mask
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates
from disagg_sim.serving.pairing import TIE, best_counts, counts_at_ratio, paper_counts, rate_per_cost

#: A point is left out where another exceeds its bound by more than this: more than rounding moves either. [1]
SURE = 1e-9


class Pairs(NamedTuple):
    """Decode points and what they are matched with, arrays of shape (n,); counts 0 where nothing fits."""

    row: Ints  # place in the decode grid
    column: Ints
    choice: Ints  # of the prefill candidates
    n_p: Ints  # prefill instances [1]
    n_d: Ints  # decode instances [1]

    def at(self, which: Mask) -> Pairs:
        """Some of them."""
        return Pairs(*(each[which] for each in self))


class Matcher:
    """Finds the prefill instances of decode points: rates r [request/s] and GPUs [1] of shape (n,).

    A prefill GPU costs as much as ``weight`` decode GPUs. With P = p/(G_p*weight) and R = r/G_d, matched throughput
    over cost is at most P*R/(P+R), the limit of real-valued counts, which rises with P for every R.
    """

    def __init__(
        self, prefill: PrefillCandidates, *, gpu_cap: int, weight: float, paper: bool, ratio: Fraction | None
    ) -> None:
        self.prefill, self.gpu_cap, self.weight, self.paper, self.ratio = prefill, gpu_cap, weight, paper, ratio
        self.gpus, self.order = prefill.gpus, prefill.order
        self.per_cost: Floats = prefill.request_rate / (self.gpus * weight)
        self.falling = np.argsort(-self.per_cost, kind="stable")

    def fits(self, gpus_d: Ints) -> Mask:
        """Whether the cap has room for a decode instance and what the exact matching pairs it with; shape (n,)."""
        if self.ratio is None:
            return np.asarray(gpus_d + self.gpus.min() <= self.gpu_cap)
        sizes, place = np.unique(gpus_d, return_inverse=True)
        some = [counts_at_ratio(int(g), sizes.astype(float), self.gpu_cap, self.ratio)[1] > 0 for g in self.gpus]
        return np.asarray(np.any(some, axis=0)[place])

    def bound(self, r: Floats, gpus_d: Ints) -> Floats:
        """Rate over cost that no counts exceed, whatever the matching; shape (n,). [request/s]"""
        best, decode = float(self.per_cost.max()), r / gpus_d
        return np.asarray(best * decode / (best + decode))

    def rate_over_cost(self, pairs: Pairs, decode: PhaseGrid) -> Floats:
        """Matched rate over the cost in decode GPUs, no count 0; shape (n,). [request/s]"""
        p, gpus_p = self.prefill.request_rate[pairs.choice], self.gpus[pairs.choice]
        r, gpus_d = decode.request_rate[pairs.row, pairs.column], decode.gpus[pairs.row]
        rate = np.minimum(pairs.n_p * p, pairs.n_d * r)
        return np.asarray(rate / (pairs.n_p * gpus_p * self.weight + pairs.n_d * gpus_d))

    def match(self, r: Floats, gpus_d: Ints) -> tuple[Ints, Ints, Ints]:
        """Candidate and counts of prefill and decode instances of every point; counts 0 where nothing fits."""
        return self._paper(r, gpus_d) if self.paper else self._exact(r, gpus_d)

    def _exact(self, r: Floats, gpus_d: Ints) -> tuple[Ints, Ints, Ints]:
        """Best candidate and counts.

        As the bound rises with P, one order of candidates, by falling P, serves all decode points, and a point whose
        bound falls short of the best found is done. Candidates are the fastest of each instance size of
        one system, and equal sizes cost the same: the weight makes none of those left out useful. A fixed
        ratio of the pools' GPUs only takes counts away, so the same bound holds.
        """
        n, sizes, weight = r.size, gpus_d.astype(np.float64), self.weight
        best, total = np.full(n, -1.0), np.full(n, np.inf)
        choice, n_p, n_d = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
        decode_per_cost, open_ = r / gpus_d, np.arange(n)
        for j in self.falling:
            decode = decode_per_cost[open_]
            bound = self.per_cost[j] * decode / (self.per_cost[j] + decode)
            open_ = open_[bound * (1 + TIE) >= best[open_]]
            if open_.size == 0:
                break
            at = open_[gpus_d[open_] + self.gpus[j] <= self.gpu_cap]
            p, size = float(self.prefill.request_rate[j]), int(self.gpus[j])
            if self.ratio is None:
                trial_p, trial_d = best_counts(p, size, r[at], sizes[at], self.gpu_cap, weight)
            else:
                trial_p, trial_d = counts_at_ratio(size, sizes[at], self.gpu_cap, self.ratio)
                at, trial_p, trial_d = at[trial_d > 0], trial_p[trial_d > 0], trial_d[trial_d > 0]
            value = rate_per_cost(trial_p, trial_d, p=p, gpus_p=size, r=r[at], gpus_d=sizes[at], weight=weight)
            needed = trial_p * size + trial_d * sizes[at]
            lighter = (needed < total[at]) | ((needed == total[at]) & (self.order[j] < self.order[choice[at]]))
            better = (value > best[at] * (1 + TIE)) | ((value >= best[at] * (1 - TIE)) & lighter)
            at = at[better]
            best[at], total[at], choice[at] = value[better], needed[better], j
            n_p[at], n_d[at] = trial_p[better], trial_d[better]
        return choice, n_p.astype(np.int64), n_d.astype(np.int64)

    def _paper(self, r: Floats, gpus_d: Ints) -> tuple[Ints, Ints, Ints]:
        """Algorithms 1 and 2 of the paper: the candidate of the most requests/s/GPU for all."""
        j = int(np.argmax(self.prefill.request_rate / self.gpus))
        p, size = float(self.prefill.request_rate[j]), int(self.gpus[j])
        n_p, n_d = paper_counts(p, size, r, gpus_d.astype(np.float64), self.gpu_cap)
        return np.full(r.size, j, dtype=np.int64), n_p.astype(np.int64), n_d.astype(np.int64)


class MatchedFront:
    """The front of the points matched so far, in TTL [s] and in rate over cost [request/s].

    Points come in parts; each leaves out what the front of the earlier ones beats for sure.
    """

    def __init__(self) -> None:
        self.ttl, self.value = np.empty(0), np.empty(0)  # TTL falls, so does the value

    def leaves(self, ttl: Floats, value: Floats) -> Mask:
        """Which points may be on the front, where ``value`` is what they reach, or a bound of it; shape (n,)."""
        faster = np.append(self.value, -np.inf)[np.searchsorted(-self.ttl, -ttl)]  # best value at this TTL or less
        return np.asarray(value * (1 + SURE) >= faster)

    def add(self, ttl: Floats, value: Floats) -> None:
        """Take in points that were matched; shape (n,)."""
        ttl, value = np.concatenate([self.ttl, ttl]), np.concatenate([self.value, value])
        keep = np.flatnonzero(pareto_mask(-ttl, value))
        keep = keep[np.argsort(-ttl[keep])]
        self.ttl, self.value = ttl[keep], value[keep]
