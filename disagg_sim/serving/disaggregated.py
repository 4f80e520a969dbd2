"""Score disaggregated serving: every decode configuration with its best prefill pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from disagg_sim.domain import ServingMode
from disagg_sim.errors import InputError, above_zero, check_word, nearest, whole_number
from disagg_sim.physics.kv_transfer import bandwidth_per_gpu
from disagg_sim.search.blocks import row_blocks
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.candidates import PrefillCandidates, check_same_case, prefill_candidates
from disagg_sim.serving.costs import Per, add_cost, check_per, costs_of_gpus, throughput_of
from disagg_sim.serving.matching import MatchedFront, Matcher, Pairs
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
    """As ``disaggregated``; with ``keep="frontier"`` ``points.pareto_front`` of these points, row for row.

    That takes a fraction of time and memory.
    """
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

    matcher = Matcher(prefill, gpu_cap=rules.gpu_cap, weight=weight, paper=rules.matching == "paper", ratio=rules.ratio)
    table = _table(prefill, decode, _matched(decode, matcher, rules), "paper" if matcher.paper else "exact")
    table = add_cost(table, rules.per, costs)
    return pareto_front(table, by=(), throughput=throughput_of(rules.per)) if rules.keep == "frontier" else table


def _matched(decode: PhaseGrid, matcher: Matcher, rules: Rules) -> Pairs:
    """The pairs of all decode points, or of those that may be on the frontier, in grid order.

    Rows are matched in blocks, which stay in cache; no array but the pairs has the size of the grid.
    """
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
