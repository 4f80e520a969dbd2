"""Score disaggregated serving: every decode configuration with its best prefill pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Mode
from disagg_sim.errors import InputError, above_zero, nearest, whole_number
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu
from disagg_sim.search.grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, check_same_case, kv_rate_per_gpu, least, prefill_candidates
from disagg_sim.serving.costs import Per, add_cost, check_per, costs_of_gpus
from disagg_sim.serving.pairing import TIE, best_counts, counts_at_ratio, paper_counts, rate_per_cost
from disagg_sim.serving.points import Served, Side, names_of, points_table

MATCHINGS = ("exact", "paper")


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
    >>> prefill = ds.prefill_grid(at, ds.Mapping(), lengths)
    >>> decode = ds.decode_grid(at, ds.Mapping(), lengths, batch=[1, 8, 64])
    >>> table = disaggregated(prefill, decode, gpu_cap=8)
    >>> table[["decode_batch", "prefill_instances", "decode_instances"]].values.tolist()
    [[1, 1, 7], [8, 1, 3], [64, 4, 3]]
    """
    rules = Rules(
        ftl_limit=ftl_limit, ttl_limit=ttl_limit, gpu_cap=gpu_cap, nic_limit=nic_limit, matching=matching, per=per
    )
    return match_pools(prefill, decode, rules).points


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How decode configurations are matched; as the arguments of ``disaggregated``."""

    ftl_limit: float = 10.0  # inclusive [s]
    ttl_limit: float | None = None  # inclusive [s]
    gpu_cap: int = 576  # [1]
    nic_limit: float | None = None  # inclusive [B/s]
    matching: str | Fraction | float = "exact"
    per: Per = "gpu"

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range."""
        if self.ttl_limit is not None:
            above_zero("ttl_limit", self.ttl_limit, "s")
        whole_number("gpu_cap", self.gpu_cap, 2, ": one GPU a pool")
        check_per(self.per)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matched:
    """The table of matched decode points, and what became of all of them."""

    points: pd.DataFrame  # columns as ``points.COLUMNS``
    decode_points: int  # design points of the decode grid [1]
    decode_feasible: int  # of them, those that fit in memory [1]
    above_ttl_limit: int  # feasible, but too slow [1]
    removed_by_nic_limit: int  # would have a match without the NIC limit [1]
    unmatched: int  # of the others, those without a pair within ``gpu_cap`` or within the tolerance [1]
    best_ttl_s: float  # lowest of the feasible points; inf if none [s]


def match_pools(prefill: PhaseGrid | PrefillCandidates, decode: PhaseGrid, rules: Rules) -> Matched:
    """As ``disaggregated``, with the counts of what was left out."""
    if decode.phase != "decode":
        raise InputError(f"expected a decode grid, got a {decode.phase} grid")
    sender = prefill.setup.system if isinstance(prefill, PhaseGrid) else prefill.system
    systems = (sender, decode.setup.system)
    if isinstance(prefill, PhaseGrid):
        prefill = prefill_candidates(prefill, ftl_limit=rules.ftl_limit, nic_limit=rules.nic_limit)
    _check_candidates(prefill, decode, rules)
    prefill.require()
    costs = costs_of_gpus(systems, rules.per)
    weight = costs[prefill.system] / costs[decode.setup.system.name]

    feasible, gpu_cap = decode.feasible, rules.gpu_cap
    in_time = feasible & (decode.latency <= (np.inf if rules.ttl_limit is None else rules.ttl_limit))
    usable = in_time & (kv_rate_per_gpu(decode) <= prefill.nic_limit)
    rows, columns = np.nonzero(usable)
    r, gpus_d = decode.request_rate[rows, columns], decode.gpus[rows]
    if rules.matching == "paper":
        choice, n_p, n_d = _paper(prefill, r, gpus_d, gpu_cap)
    else:
        choice, n_p, n_d = _exact(prefill, r, gpus_d, gpu_cap, weight, rules.ratio)

    matched = n_d > 0
    fits_without_nic = in_time & (decode.gpus[:, None] + prefill.smallest_gpus <= gpu_cap)
    fits_with_nic = usable & (decode.gpus[:, None] + prefill.gpus.min() <= gpu_cap)
    removed = int(fits_without_nic.sum() - fits_with_nic.sum())
    pairs = _Pairs(*(values[matched] for values in (rows, columns, choice, n_p, n_d)))
    table = _table(prefill, decode, pairs, "paper" if rules.matching == "paper" else "exact")
    return Matched(
        points=add_cost(table, rules.per, costs),
        decode_points=int(feasible.size),
        decode_feasible=int(feasible.sum()),
        above_ttl_limit=int(feasible.sum() - in_time.sum()),
        removed_by_nic_limit=removed,
        unmatched=int(in_time.sum() - removed - matched.sum()),
        best_ttl_s=least(decode.latency, feasible),
    )


def _exact(
    prefill: PrefillCandidates, r: Floats, gpus_d: Ints, gpu_cap: int, weight: float, ratio: Fraction | None
) -> tuple[Ints, Ints, Ints]:
    """Best candidate and counts of every decode point, shape (n,) each; counts 0 where nothing fits.

    A prefill GPU costs as much as ``weight`` decode GPUs. With P = p/(G_p*weight) and R = r/G_d, matched
    throughput over cost is at most P*R/(P+R), the limit of real-valued counts, which rises with P for
    every R. So one order of candidates, by falling P, serves all decode points, and a candidate is tried
    only where its bound still reaches the best found. Candidates are the fastest of each instance size of
    one system, and equal sizes cost the same: the weight makes none of those left out useful. A fixed
    ``ratio`` of the pools' GPUs only takes counts away, so the same bound holds.
    """
    n = r.size
    best, total = np.full(n, -1.0), np.full(n, np.inf)
    choice, n_p, n_d = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
    gpus, order = prefill.gpus, prefill.order
    per_cost = prefill.request_rate / (gpus * weight)
    decode_per_cost = r / gpus_d
    sizes = gpus_d.astype(np.float64)
    for j in np.argsort(-per_cost, kind="stable"):
        bound = per_cost[j] * decode_per_cost / (per_cost[j] + decode_per_cost)
        at = np.flatnonzero((bound * (1 + TIE) >= best) & (gpus_d + gpus[j] <= gpu_cap))
        if at.size == 0:
            continue
        p, size = float(prefill.request_rate[j]), int(gpus[j])
        if ratio is None:
            trial_p, trial_d = best_counts(p, size, r[at], sizes[at], gpu_cap, weight)
        else:
            trial_p, trial_d = counts_at_ratio(size, sizes[at], gpu_cap, ratio)
            at, trial_p, trial_d = at[trial_d > 0], trial_p[trial_d > 0], trial_d[trial_d > 0]
        value = rate_per_cost(trial_p, trial_d, p=p, gpus_p=size, r=r[at], gpus_d=sizes[at], weight=weight)
        needed = trial_p * size + trial_d * sizes[at]
        lighter = (needed < total[at]) | ((needed == total[at]) & (order[j] < order[choice[at]]))
        better = (value > best[at] * (1 + TIE)) | ((value >= best[at] * (1 - TIE)) & lighter)
        at = at[better]
        best[at], total[at], choice[at] = value[better], needed[better], j
        n_p[at], n_d[at] = trial_p[better], trial_d[better]
    return choice, n_p.astype(np.int64), n_d.astype(np.int64)


def _paper(prefill: PrefillCandidates, r: Floats, gpus_d: Ints, gpu_cap: int) -> tuple[Ints, Ints, Ints]:
    """Algorithms 1 and 2 of the paper; shapes as ``_exact``."""
    j = int(np.argmax(prefill.request_rate / prefill.gpus))
    p, size = float(prefill.request_rate[j]), int(prefill.gpus[j])
    n_p, n_d = paper_counts(p, size, r, gpus_d.astype(np.float64), gpu_cap)
    return np.full(r.size, j, dtype=np.int64), n_p.astype(np.int64), n_d.astype(np.int64)


class _Pairs(NamedTuple):
    """Decode points and what they were matched with, arrays of shape (n,)."""

    row: Ints  # place in the decode grid
    column: Ints
    choice: Ints  # of the prefill candidates
    n_p: Ints  # prefill instances [1]
    n_d: Ints  # decode instances [1]


def _table(prefill: PrefillCandidates, decode: PhaseGrid, pairs: _Pairs, matching: str) -> pd.DataFrame:
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
        Served(
            mode=Mode.DISAGGREGATED,
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
            request_rate=np.minimum(n_p * sender.request_rate, n_d * r),
            group=sender.batch,
        )
    )


def _check_candidates(prefill: PrefillCandidates, decode: PhaseGrid, rules: Rules) -> None:
    check_same_case(prefill, decode)
    asked = {"ftl_limit": rules.ftl_limit, "nic_limit": np.inf if rules.nic_limit is None else rules.nic_limit}
    for name, value in asked.items():
        if getattr(prefill, name) != value:
            raise InputError(f"prefill candidates were chosen under {name} {getattr(prefill, name):g}, not {value:g}")
