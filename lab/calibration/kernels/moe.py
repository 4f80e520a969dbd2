"""Fit grouped expert GEMMs: the equation of ``physics.experts`` to rows of one library and version.

Every kernel has a few parameters of its own (``_OWN``); all kernels of a library share the others. A row states
tokens, not token-expert pairs (picks); the number of picks on the measured rank follows from the distribution of the
row:

* ``balanced``: even picks, T*k/ep per rank, over all experts;
* ``power_law``: the most loaded rank, for expert loads drawn from a power law, see ``heaviest_rank``; some of its
  experts get nothing, see ``hit_experts``;
* ``..._eplb`` (redundant experts): the row states how many tokens reach rank 0, and so its share of the picks;
* tables of large expert groups without redundant experts, where there are no more picks than experts: the picks that no
  draw of the power law accounts for go to the lowest expert numbers, which rank 0 has (it is reached by every token);
* kernels that route tokens themselves within 4 of 8 groups, as DeepSeek does: balanced scores are ties, which go to the
  lowest expert numbers, so half of the picks go to the first k/2 experts, the rest to the first half of all experts;
* kernels that route tokens themselves without groups: a rank also computes a share of the picks of other ranks (fitted,
  ``stray``).

Tables of large expert groups (``moe_ep_compute``) are not fitted: the fits of the same kernel predict them. The rank
that they time is handed all T tokens of the layer and writes a row of output for each, where a served rank gets the
tokens that reach it. So what is summed is counted in tokens there, beside the picks (``MeasuredRankLoad.summed``), at
the rate of handling of the fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.facts.efficiency import ANY_REGIME, MoeFit
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.precision import FORMATS
from disagg_sim.physics.experts import moe_cost
from disagg_sim.physics.rates import moe_rate
from disagg_sim.physics.work import ACTIVATION_BYTES, ExpertRows, expert_work
from disagg_sim.units import US
from lab.calibration.kernels.gemm import FORMAT_OF
from lab.calibration.kernels.robust import Array, Parameter, by_fit, enough, joint_fits, origin

_NUMBERS = (
    Parameter("e_compute", 0.5, 0.02, 1.0),
    Parameter("t0", 30 * US, 1 * US, 300 * US),
    Parameter("e_memory", 0.85, 0.05, 1.0),
    Parameter("handling", 0.03, 0.001, 1.0),
    Parameter("per_expert", 0.05 * US, 1e-4 * US, 1 * US),
)
#: Which of them each kernel may have to itself.
_OWN = (
    ("e_compute", "t0"),
    ("e_compute", "t0", "handling"),
    ("e_compute", "t0", "e_memory"),
    ("e_compute", "t0", "e_memory", "handling"),
)
#: Numbers of all kernels of a library together, at most. [1]
MOST = 15
_STRAY = Parameter("stray", 0.1, 1e-3, 1.0)
#: Exponent of the blend, and rows of the smallest tile: the data do not tell, so neither is fitted. [1]
BLEND_Q, LEAST_ROWS = 2.0, 16.0
#: Experts of the models whose routers are limited to 4 of 8 groups (DeepSeek-V3 technical report, section 2.1.2).
GROUP_LIMITED_EXPERTS = 256
#: Kernels of TensorRT-LLM that route by themselves; its others are handed picks. All of vLLM and SGLang route.
SELF_ROUTING = "min_latency"
#: Kernels that multiply as another one does, fed with other picks; they are predicted by its fit.
SAME_KERNEL = {"wideep_compute_cutlass": "moe_torch_flow_cutlass"}
#: Largest load of an expert in a power-law row, in tokens: the tables draw between 1 and this share of all. [1]
LARGEST_DRAW = 0.8
#: Between what they draw where there are no more picks than experts. [1]
FEW_DRAWS = (0.01, 2.0)


def fit_moe(rows: pd.DataFrame, system: SystemSpec) -> list[MoeFit]:
    """One fit a format and kernel, all together; the shared numbers count as parameters of the first."""
    kinds = rows.groupby([rows["dtype"].map(FORMAT_OF), rows["kernel_source"]], sort=True)
    named = {(str(form), str(kernel)): table for (form, kernel), table in kinds}
    tables = {key: table for key, table in named.items() if FORMATS[key[0]].arithmetic in system.peak_flops}
    if not tables:
        return []
    given = {key: MeasuredRankLoad(table) for key, table in tables.items()}
    tables = {key: table[given[key].known] for key, table in tables.items()}
    given = {key: MeasuredRankLoad(table) for key, table in tables.items()}
    numbers = (*_NUMBERS, _STRAY) if any(each.routes_itself for each in given.values()) else _NUMBERS
    tried = [
        joint_fits(
            tables,
            numbers,
            dict.fromkeys(tables, own),
            lambda key, values: _fit(tables[key], key, values),
            lambda key, fit: _times(given[key], fit, system),
        )
        for own in _OWN
    ]
    return enough(tried, MOST)


def predict_moe(rows: pd.DataFrame, system: SystemSpec, fits: list[MoeFit]) -> Array:
    """Time of each row by the fit of its framework, format and kernel; NaN where there is none, or where the table does
    not say how tokens fall on the rank. [s]
    """
    words = {"engine": rows["framework"], "format": rows["dtype"].map(FORMAT_OF)}
    words |= {"kernel": rows["kernel_source"].replace(SAME_KERNEL)}
    return by_fit(rows, fits, words, lambda table, fit: _times(MeasuredRankLoad(table), fit, system))


def drawn_between(*, tokens: Array, top_k: Array, experts: Array) -> tuple[Array, Array]:
    """Ends of the range from which power-law rows draw the load of an expert: [1, 0.8*T], or ``FEW_DRAWS``. [1]"""
    few, (low, high) = tokens * top_k <= experts, FEW_DRAWS
    return np.where(few, low, 1.0), np.where(few, high, np.maximum(LARGEST_DRAW * tokens, 1.5))


def heaviest_rank(exponent: float, *, drawn: tuple[Array, Array], experts: Array, ep: Array) -> Array:
    r"""Load of the fullest of ``ep`` ranks over the mean, for expert loads that follow a power law. [1]

    The load x of an expert is drawn from a density :math:`x^{-\alpha}` (``drawn_between``); a rank sums ``experts/ep``
    of them, and the largest of ep sums lies about :math:`\sqrt{2 \ln ep}` standard deviations above the mean (extreme
    value of normal variables). No rank has more than all picks, or than experts that all have the largest load.
    """
    weight, first, second = (_power_integral(power - exponent, *drawn) for power in (0.0, 1.0, 2.0))
    mean = first / weight
    variation = np.sqrt(np.maximum(second / weight / mean**2 - 1.0, 0.0))
    excess = np.sqrt(2.0 * np.log(ep)) * variation / np.sqrt(experts / ep)
    return np.minimum(1.0 + excess, np.maximum(np.minimum(ep, drawn[1] / mean), 1.0))


def hit_experts(exponent: float, *, drawn: tuple[Array, Array], picks: Array, local: Array) -> Array:
    r"""Experts of a rank that are picked at all, where loads follow a power law. [1]

    Draws x are scaled to the ``picks`` of the rank and rounded. An expert whose load rounds to one or more is hit; what
    falls below is made up by single picks, each of another expert. With x of mean m, c = m*local/(2*picks):

    .. math:: D = n\,P(x > c) + P_k\,\frac{E[x; x < c]}{m}
    """
    weight = _power_integral(-exponent, *drawn)
    above = _power_integral(-exponent, _least_hit(exponent, drawn, picks, local), drawn[1]) / weight
    return np.asarray(local * above + picks * single_picks(exponent, drawn=drawn, picks=picks, experts=local))


def single_picks(exponent: float, *, drawn: tuple[Array, Array], picks: Array, experts: Array) -> Array:
    """Share of ``picks`` on ``experts`` that loads below half a pick leave, to be made up one by one. [1]"""
    first = _power_integral(1.0 - exponent, *drawn)
    return np.asarray(_power_integral(1.0 - exponent, drawn[0], _least_hit(exponent, drawn, picks, experts)) / first)


def _least_hit(exponent: float, drawn: tuple[Array, Array], picks: Array, experts: Array) -> Array:
    """The draw that rounds to one pick: half the mean draw over the picks of an expert. [1]"""
    mean = _power_integral(1.0 - exponent, *drawn) / _power_integral(-exponent, *drawn)
    return np.asarray(np.clip(0.5 * mean * experts / np.maximum(picks, 1e-9), *drawn))


def _power_integral(power: float, start: Array, end: Array) -> Array:
    """Integral of x**power from ``start`` to ``end``."""
    if power == -1.0:
        return np.asarray(np.log(end / start))
    return np.asarray((end ** (power + 1.0) - start ** (power + 1.0)) / (power + 1.0))


class MeasuredRankLoad:
    """What the measured rank of each row of a table was given: rows of one framework and kernel."""

    def __init__(self, rows: pd.DataFrame) -> None:
        tokens, top_k, experts, tp, ep = (
            rows[name].to_numpy(dtype=float) for name in ("num_tokens", "topk", "num_experts", "tp", "ep")
        )
        slots = rows["num_slots"].to_numpy(dtype=float) if "num_slots" in rows else experts
        framework, kernel = rows["framework"].iloc[0], rows["kernel_source"].iloc[0]
        words = rows["distribution"].to_numpy(dtype=str)
        self.hidden = rows["hidden"].to_numpy(dtype=float)
        self.width = rows["inter"].to_numpy(dtype=float) / tp
        self.local = slots / ep
        self.routes_itself = framework != "trtllm" or SELF_ROUTING in kernel
        self.all_picks, self.most = tokens * top_k, tokens * self.local
        drawn = drawn_between(tokens=tokens, top_k=top_k, experts=experts)
        share = _shares(words, rows, drawn=drawn, tokens=tokens, top_k=top_k, experts=experts, ep=ep)
        self.known = np.isfinite(share)
        self.picks = np.minimum(self.all_picks * share, self.most)
        self.distinct = np.minimum(self.picks, self.local)
        large_group = "rank0_num_tokens" in rows
        self.summed = tokens if large_group else np.zeros_like(tokens)  # rows of output of tokens without a pick here
        for word in np.unique(words[self.known]):
            if (law := _power_law(word)) is None:
                continue
            hit = hit_experts(law[0], drawn=drawn, picks=self.picks, local=self.local)
            hit = np.minimum(hit, self.distinct)
            if large_group and not law[1]:
                single = single_picks(law[0], drawn=drawn, picks=self.all_picks, experts=experts) * self.all_picks
                hit = np.where(self.all_picks <= experts, np.minimum(hit + single, self.local), hit)
            self.distinct = np.where(words == word, hit, self.distinct)
        self.picks = np.maximum(self.picks, self.distinct)
        self.strays = self.routes_itself & (ep > 1)
        grouped = self.routes_itself & (experts == GROUP_LIMITED_EXPERTS) & (words == "balanced")
        grouped &= (rows["dtype"] != "bfloat16").to_numpy()  # those in 8 and 4 bit were timed with the group limit
        if grouped.any():
            first = np.where(ep > 1, np.minimum(self.local, top_k / 2), top_k / 2)  # experts with a pick of every token
            spread = np.where(ep > 1, tokens * top_k / ep, tokens * top_k / 2)
            hit = np.minimum(first + spread, np.where(ep > 1, self.local, self.local / 2))
            self.picks = np.where(grouped, np.minimum(tokens * first + spread, self.most), self.picks)
            self.distinct = np.where(grouped, np.minimum(hit, self.picks), self.distinct)
            self.strays = self.strays & ~grouped

    def rows(self, stray: float) -> ExpertRows:
        """Picks and experts of the rank, a share ``stray`` of the picks of other ranks included."""
        more = np.minimum(self.picks + stray * (self.all_picks - self.picks), self.most)
        picks = np.where(self.strays, more, self.picks)
        distinct = np.where(self.strays, np.minimum(picks, self.local), self.distinct)
        return ExpertRows(picks, distinct, self.local, self.hidden, self.width)


def _power_law(word: str) -> tuple[float, bool] | None:
    """Exponent that a word for a distribution names, and whether experts were rearranged; None = no power law."""
    kind, found, rest = word.partition("power_law_")
    exponent, _, rearranged = rest.partition("_")
    if kind or not found or not exponent.replace(".", "", 1).isdigit() or rearranged not in ("", "eplb"):
        return None
    return float(exponent), bool(rearranged)


def _shares(
    words: Any,
    rows: pd.DataFrame,
    *,
    drawn: tuple[Array, Array],
    tokens: Array,
    top_k: Array,
    experts: Array,
    ep: Array,
) -> Array:
    """Share of all picks that the measured rank has by the word for their distribution; NaN for other words. [1]"""
    share = np.where(words == "balanced", 1.0 / ep, np.nan)
    for word in np.unique(words):
        mine = words == word
        if (law := _power_law(word)) is None:
            continue
        if law[1] and "rank0_num_tokens" in rows:
            # Of T tokens with k picks each, r reach a rank with the share s: r/T = 1-(1-s)^k.
            reached = np.minimum(rows["rank0_num_tokens"].to_numpy(dtype=float), tokens - 0.5) / tokens
            share[mine] = np.clip(1.0 - (1.0 - reached) ** (1.0 / top_k), 1.0 / ep, 1.0)[mine]
        else:
            load = heaviest_rank(law[0], drawn=drawn, experts=experts, ep=ep)
            share[mine] = (np.where(ep > 1, load, 1.0) / ep)[mine]
    return share


def _fit(table: pd.DataFrame, key: tuple[str, str], values: dict[str, Any]) -> MoeFit:
    sizes = ("num_tokens", "hidden", "inter", "num_experts", "tp", "ep", "width")
    table = table.assign(width=table["inter"] / table["tp"])  # columns of an expert on a rank
    return MoeFit(
        **origin(table, sizes),
        format=key[0],
        kernel=key[1],
        regime=ANY_REGIME,
        picks="T*k/ep",
        blend_q=BLEND_Q,
        least_rows=LEAST_ROWS,
        **values,
    )


def _times(given: MeasuredRankLoad, fit: MoeFit, system: SystemSpec) -> Array:
    rows, rate = given.rows(fit.stray), moe_rate(fit, system)
    work = expert_work(rows, weight_bytes=FORMATS[fit.format].bytes)
    summed = given.summed * given.hidden * ACTIVATION_BYTES * (1.0 / rate.handling + 1.0 / rate.passing)
    return np.asarray(moe_cost(rows, work, rate).time + summed)
