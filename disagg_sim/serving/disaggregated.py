"""Score disaggregated serving: every decode configuration with its best prefill pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError, above_zero, check_word, nearest, whole_number
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu
from disagg_sim.search.blocks import row_blocks
from disagg_sim.search.pareto import pareto_mask
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, check_same_case, prefill_candidates
from disagg_sim.serving.costs import Per, add_cost, check_per, costs_of_gpus, throughput_of
from disagg_sim.serving.pairing import TIE, best_counts, counts_at_ratio, paper_counts, rate_per_cost
from disagg_sim.serving.points import Delivered, Side, names_of, pareto_front, points_table

MATCHINGS = ("exact", "paper")
KEEPS = ("points", "frontier")


def disaggregated(
    prefill: PhaseGrid | PrefillCandidates,
    decode: PhaseGrid,
    *,
    ftl_limit: float = 10.0,
    ttl_limit: float | None = None,
    gpu_cap: int = 576,
    nic_limit: float | None = None,
    matching: str | Fraction | float = "exact",
    per: Per = "gpu",
) -> pd.DataFrame:
    """Match every decode configuration with prefill instances at equal request rates.

    Prefill and decode may run on different systems, and in different precisions, profiles and engines,
    as long as they share the model, the prompt length and the format of the KV cache.

    Parameters
    ----------
    prefill : PhaseGrid or PrefillCandidates
        Scored prefill points, or what ``prefill_candidates`` kept of them under the same limits.
    decode : PhaseGrid
        Scored decode points.
    ftl_limit, ttl_limit : float
        Largest latencies of a configuration, inclusive. [s]
    gpu_cap : int
        Most GPUs of a deployment, both pools together. [1]
    matching : {"exact", "paper"}, Fraction or float
        "exact": over all prefill configurations, the integer counts of the highest throughput per
        GPU (or per what ``per`` says); ties (relative 1e-12) to fewer GPUs, then to the lexicographic
        order of the mapping.
        "paper": Algorithms 1 and 2 of arXiv 2506.05508: one prefill configuration, the best by
        requests/s/GPU, for all; the fewest GPUs that balance within 3 %.
        A number: as "exact", with prefill GPUs over decode GPUs held at this ratio; a float stands for the
        nearest fraction of a denominator up to 1000. Never above "exact". [1]
    nic_limit : float, optional
        Largest KV egress and ingress of a GPU at full rate, inclusive. [B/s]
    per : {"gpu", "usd", "watt"} or mapping
        What throughput is maximised over: GPUs, their price, or their TDP (the rating of the GPUs, not
        what they draw; hosts are left out). The choice differs from "gpu" only where the pools run on
        different systems. "usd" adds the columns ``usd_per_hour`` and ``tokens_per_usd``, "watt" adds
        ``tdp_watts`` and ``tokens_per_joule``. A mapping is "usd" with the price of a GPU by system, in place
        of the middle of its ``usd_per_gpu_hour`` [USD/h]. The paper's matching counts GPUs whatever ``per`` says.

    Returns
    -------
    DataFrame
        One row per feasible decode point that has a match, in grid order, columns as ``points.COLUMNS``
        (``system`` and ``precision`` are those of decode, ``prefill_system`` ... those of prefill).

    Raises
    ------
    InfeasibleError
        When no prefill configuration meets the limits; says the best that there is.
    InputError
        Values out of range, grids that do not belong together.

    Examples
    --------
    A prefill instance of 57 requests/s feeds seven decode instances of batch 1, of 2.3 requests/s each. At batch 64
    a decode instance takes 68, so four of prefill feed three; the cap is 8 GPUs:

    >>> import disagg_sim as ds
    >>> at, lengths = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile="ideal"), ds.lengths(2048, 256)
    >>> prefill = ds.prefill_grid(at, ds.Sharding(), lengths)
    >>> decode = ds.decode_grid(at, ds.Sharding(), lengths, batch=[1, 8, 64])
    >>> table = disaggregated(prefill, decode, gpu_cap=8)
    >>> table[["decode_batch", "prefill_instances", "decode_instances"]].values.tolist()
    [[1, 1, 7], [8, 1, 3], [64, 4, 3]]
    """
    rules = Rules(
        ftl_limit=ftl_limit, ttl_limit=ttl_limit, gpu_cap=gpu_cap, nic_limit=nic_limit, matching=matching, per=per
    )
    return match_pools(prefill, decode, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How decode configurations are matched, as the arguments of ``disaggregated``, and which rows are kept."""

    ftl_limit: float = 10.0  # inclusive [s]
    ttl_limit: float | None = None  # inclusive [s]
    gpu_cap: int = 576  # [1]
    nic_limit: float | None = None  # inclusive [B/s]
    matching: str | Fraction | float = "exact"
    per: Per = "gpu"
    keep: str = "points"  # or "frontier": of the points, those that no other beats in interactivity and throughput

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range."""
        if self.ttl_limit is not None:
            above_zero("ttl_limit", self.ttl_limit, "s")
        whole_number("gpu_cap", self.gpu_cap, 2, ": one GPU a pool")
        check_per(self.per)
        check_word("keep", self.keep, KEEPS)
        if isinstance(self.matching, str):
            if self.matching not in MATCHINGS:
                near = nearest(self.matching, MATCHINGS)
                raise InputError(f"matching {self.matching!r} is not one of {', '.join(MATCHINGS)}, or a ratio{near}")
        elif above_zero("matching", self.matching) == np.inf:
            raise InputError("matching must be above 0 and finite, got inf")

    @property
    def ratio(self) -> Fraction | None:
        """Prefill GPUs over decode GPUs, where they are held; None = the best. [1]"""
        if isinstance(self.matching, str):
            return None
        return self.matching if isinstance(self.matching, Fraction) else Fraction(self.matching).limit_denominator(1000)


def match_pools(prefill: PhaseGrid | PrefillCandidates, decode: PhaseGrid, rules: Rules) -> pd.DataFrame:
    """As ``disaggregated``; with ``keep="frontier"`` ``points.pareto_front`` of these points, row for row."""
    if decode.phase != "decode":
        raise InputError(f"expected a decode grid, got a {decode.phase} grid")
    sender = prefill.setup.system if isinstance(prefill, PhaseGrid) else prefill.system
    systems = (sender, decode.setup.system)
    if isinstance(prefill, PhaseGrid):
        prefill = prefill_candidates(prefill, ftl_limit=rules.ftl_limit, nic_limit=rules.nic_limit)
    check_same_case(prefill, decode)
    asked = {"ftl_limit": rules.ftl_limit, "nic_limit": np.inf if rules.nic_limit is None else rules.nic_limit}
    for name, value in asked.items():
        if getattr(prefill, name) != value:
            raise InputError(f"prefill candidates were chosen under {name} {getattr(prefill, name):g}, not {value:g}")
    prefill.require()
    costs = costs_of_gpus(systems, rules.per)
    weight = costs[prefill.system] / costs[decode.setup.system.name]

    matcher = Matcher(prefill, gpu_cap=rules.gpu_cap, weight=weight, paper=rules.matching == "paper", ratio=rules.ratio)
    table = _table(prefill, decode, _matched(decode, matcher, rules), "paper" if matcher.paper else "exact")
    table = add_cost(table, rules.per, costs)
    return pareto_front(table, by=(), throughput=throughput_of(rules.per)) if rules.keep == "frontier" else table


def _matched(decode: PhaseGrid, matcher: Matcher, rules: Rules) -> Pairs:
    """The pairs of all decode points, or of those that may be on the frontier, in grid order, block by block."""
    seen = MatchedFront()
    found = [Pairs(*np.empty((5, 0), dtype=np.int64))]
    ttl_limit = np.inf if rules.ttl_limit is None else rules.ttl_limit
    row_gpus, feasible = decode.gpus, decode.feasible
    fits = matcher.fits(row_gpus)
    for block in row_blocks(*decode.latency.shape):
        in_time = feasible[block] & (decode.latency[block] <= ttl_limit)
        ingress = bandwidth_per_gpu(
            decode.request_rate[block], decode.kv_bytes_per_request, decode.unique_gpus[block, None]
        )
        usable = in_time & (ingress <= matcher.prefill.nic_limit)
        row, column = np.nonzero(usable & fits[block, None])
        row += block.start
        if rules.keep == "frontier" and not matcher.paper:
            bound = matcher.bound(decode.request_rate[row, column], row_gpus[row])
            may_win = seen.leaves(decode.latency[row, column], bound)
            row, column = row[may_win], column[may_win]
        pairs = Pairs(row, column, *matcher.match(decode.request_rate[row, column], row_gpus[row]))
        pairs = pairs.at(pairs.n_d > 0)
        if rules.keep == "frontier":
            seen.add(decode.latency[pairs.row, pairs.column], matcher.rate_over_cost(pairs, decode))
        found.append(pairs)
    pairs = Pairs(*map(np.concatenate, zip(*found, strict=True)))
    if rules.keep == "frontier":
        ttl = decode.latency[pairs.row, pairs.column]
        pairs = pairs.at(seen.leaves(ttl, matcher.rate_over_cost(pairs, decode)))
    return pairs


def _table(prefill: PrefillCandidates, decode: PhaseGrid, pairs: Pairs, matching: str) -> pd.DataFrame:
    rows, columns, choice, n_p, n_d = pairs
    r, ttl, ftl = decode.request_rate[rows, columns], decode.latency[rows, columns], prefill.latency[choice]
    sender = Side(
        names=(prefill.system, prefill.precision, prefill.profile, prefill.engine),
        mapping=prefill.mapping[choice],
        batch=prefill.batch[choice],
        instances=n_p,
        memory_bytes=prefill.memory_bytes[choice],
        request_rate=prefill.request_rate[choice],
        unique_gpus=prefill.unique_gpus[choice],
        kv_rate=prefill.egress[choice],
    )
    taker = Side(
        names=names_of(decode.setup),
        mapping=decode.chosen(rows, columns),
        batch=decode.batch[columns],
        instances=n_d,
        memory_bytes=decode.memory_bytes[rows, columns],
        request_rate=r,
        unique_gpus=decode.unique_gpus[rows],
        kv_rate=bandwidth_per_gpu(r, decode.kv_bytes_per_request, decode.unique_gpus[rows]),
    )
    return points_table(
        Delivered(
            mode=ServingMode.DISAGGREGATED,
            model=decode.setup.model.name,
            matching=matching,
            lengths=decode.lengths,
            kv_bytes_per_request=decode.kv_bytes_per_request,
            prefill=sender,
            decode=taker,
            microbatches=decode.microbatches[rows, columns],
            bound=decode.bound[rows, columns],
            mla_form=prefill.mla_form[choice],
            ftl=ftl,
            ttl=ttl,
            ttl_mean=ttl,
            largest_gap=decode.step[rows, columns],
            speculation=decode.setup.speculation,
            techniques=decode.setup.techniques,
            request_rate=np.minimum(n_p * sender.request_rate, n_d * r),
            group=sender.batch,
        )
    )


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
