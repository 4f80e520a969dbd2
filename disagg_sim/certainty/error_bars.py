r"""Compute error bars of latencies and throughput of designs, and of frontiers.

**Model.** The time of every operator o, and of every whole pass p, has a random factor:

.. math:: t_o \to t_o\,\exp\left(\sigma_o\left(\sqrt{\rho_k}\,z_{s,e,k} + \sqrt{1-\rho_k}\,\epsilon_{o,m}\right)\right),
          \qquad T_p \to T_p\,\exp\left(\tau_p\left(\sqrt{\rho}\,z_{e,p} + \sqrt{1-\rho}\,\epsilon_{p,m}\right)\right)

* :math:`\sigma_o` is the spread of the fit of operator o (``facts.uncertainty.spread_of``), wider for a fit of another
  system (``transfer``, ``transfer_across``), a size outside its range (``per_doubling``), or an assumption;
* z is **systematic**: one number for all operators of kind k on a (system s, engine e) in every design and mode.
  :math:`\rho_k` is its share of the variance;
* :math:`\epsilon` is **idiosyncratic**: one number for each operator o and mapping m. It partly averages out over the
  operators of a layer; all batches of a mapping share it;
* :math:`\tau_p` is the spread of served runs beyond their kernels (host, scheduling), wider for layouts, model families
  and engines without a fitted run (``ServedSpread``). Decode steps and prefill passes both take the spread of the time
  per output token, estimated from the FITTED part of the served runs. Errors that all configurations share cancel
  where two modes are compared.

The time of a request outside its pass before the first token (HTTP, tokenising, scheduling, hand-over) is not in the
FTL of a configuration. Its error is a share of that time (``ServedSpread`` of ``first_token``); ``beside`` has draws of
it in seconds, to add to a pass.

Nobody knows how a text of yours fills expert ranks: ``rank_skew`` of the profile is its middle, ``text_skew`` its 80 %
band. Passes are timed at both ends, and one more normal number y of all designs moves them by
:math:`(T_{end}/T)^{|y|/1.28}`, towards the most skewed where it is above 0. With a skew of your own nothing is added.

All z and :math:`\epsilon` are standard normal and drawn by name from one seed, so that several tables have the same
factors.

**Propagation.** The time of a pass is linear in the times of its operators as long as the same operator is hidden and
the same pipeline stage is slowest. So the contributions of its operators (``timed_contributions``) times the factors
give its time in every sample; the mode then gives latencies and throughput. Designs stay as chosen at nominal values,
except the counts of instances, which are matched anew unless ``rematch`` is off.

Past 400 lines: all that is drawn by name, and what it moves.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import Contribution, timed_contributions
from disagg_sim.certainty.designs import MODES, Designs, Scores, Times, scores_of, times_of
from disagg_sim.certainty.evidence import family_of, layout_kinds, served_sigma
from disagg_sim.certainty.extrapolation import breaches, words_of
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of
from disagg_sim.domain import SHARDING, Sharding
from disagg_sim.errors import InputError, whole_number
from disagg_sim.facts.efficiency import ASSUMED
from disagg_sim.facts.load import load_system, load_uncertainty
from disagg_sim.facts.uncertainty import EIGHTY, KindSpread, ServedSpread, UncertaintySpec, spread_of
from disagg_sim.physics.rates import Rates
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT

#: Quantiles of a band, which has 80 % of the samples.
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
#: A point is sampled if the nominal frontier beats it by no more than this margin; smaller where points are many. [1]
MARGINS = (0.2, 0.1, 0.05, 0.02)
#: Most sampled points of one mode, unless the nominal frontier has more.
CANDIDATES = 400
#: Kind of operators -> its section in the efficiency files, where the names differ.
_SECTION = {
    "attention_part": "attention_parts",
    "experts": "moe",
    "all_reduce": "collectives",
    "gather": "collectives",
    "all_to_all": "alltoall",
    "copy": "elementwise",
    "hop": "collectives",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Uncertainty:
    """Designs with samples of their numbers; two-dimensional arrays have shape (rows, samples)."""

    points: pd.DataFrame  # the designs, nominal
    column: str  # of ``points`` with the throughput
    ttl: Floats  # [s]
    ftl: Floats  # [s]
    throughput: Floats  # of ``column`` [token/s, token/USD or token/J]
    beside: Floats  # error of the time outside the pass before the first token [s]
    text: Floats  # TTL and FTL with the least and the most skewed experts of text over nominal, (rows, 2, 2) [1]
    outside_calibration: tuple[str, ...]  # as ``calibrated.outside_calibration``

    def bands(self) -> pd.DataFrame:
        """Add the 10 %, 50 % and 90 % quantiles of their numbers to the designs.

        Returns
        -------
        DataFrame
            The columns of the points, then ``tokens_per_s_per_gpu_p10``, ``_p50``, ``_p90``, the same of
            ``tokens_per_s_per_user`` [token/s], ``ttl_p10_s`` ..., ``ftl_p10_s`` ... [s], ``outside_calibration``.
        """
        columns: dict[str, Any] = {}
        for name, values in ((self.column, self.throughput), (INTERACTIVITY, 1.0 / self.ttl)):
            columns |= {f"{name}_{q}": np.quantile(values, share, axis=1) for q, share in QUANTILES.items()}
        for name, values in (("ttl", self.ttl), ("ftl", self.ftl)):
            columns |= {f"{name}_{q}_s": np.quantile(values, share, axis=1) for q, share in QUANTILES.items()}
        return self.points.assign(**columns, outside_calibration=list(self.outside_calibration))

    def frontier(self, at: ArrayLike | None = None) -> pd.DataFrame:
        """Compute the band of the frontier of each mode: the best throughput at an interactivity in every sample.

        Columns ``mode``, ``tokens_per_s_per_user``, ``tokens_per_s_per_gpu`` (nominal) and its ``_p10``, ``_p50``,
        ``_p90`` [token/s]; 0 in samples without a design as fast.
        """
        parts = []
        for mode in self.modes:
            mine = (self.points["mode"].astype(str) == mode).to_numpy()
            x, y = (self.points.loc[mine, name].to_numpy(dtype=float) for name in (INTERACTIVITY, self.column))
            grid = x[y >= best_from(x, y, x)] if at is None else np.asarray(at, dtype=float).ravel()
            grid = np.unique(grid)
            best = self._best(grid, (mode,))
            bands = {f"{self.column}_{q}": np.quantile(best, share, axis=1) for q, share in QUANTILES.items()}
            columns = {"mode": mode, INTERACTIVITY: grid, self.column: best_from(x, y, grid), **bands}
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def gain(self, at: ArrayLike) -> pd.DataFrame:
        """Divide disaggregated by the best co-located throughput at interactivities [token/s].

        Both modes have the same factors in a sample, so that common errors cancel. ``gain`` (nominal), ``gain_p10``,
        ``gain_p50``, ``gain_p90`` and ``probability`` of a gain above 1 [1] are infinite where only disaggregation is
        as fast, NaN where neither is; ``InputError`` where one of both modes is missing.
        """
        shared = tuple(mode for mode in self.modes if mode != MODES[0])
        if MODES[0] not in self.modes or not shared:
            has = ", ".join(self.modes)
            raise InputError(f"a gain needs {MODES[0]} points and co-located ones; the table has {has}")
        grid = np.asarray(at, dtype=float).ravel()
        x, y = (self.points[name].to_numpy(dtype=float) for name in (INTERACTIVITY, self.column))
        split = (self.points["mode"].astype(str) == MODES[0]).to_numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            nominal = best_from(x[split], y[split], grid) / best_from(x[~split], y[~split], grid)
            sampled = self._best(grid, MODES[:1]) / self._best(grid, shared)
        known = [row[~np.isnan(row)] for row in sampled]  # samples in which a mode is as fast
        columns = {  # one of the values, perhaps infinite
            f"gain_{q}": [
                float(np.quantile(row, share, method="inverted_cdf")) if row.size else np.nan for row in known
            ]
            for q, share in QUANTILES.items()
        }
        above = [float(np.mean(row > 1)) if row.size else np.nan for row in known]
        return pd.DataFrame({INTERACTIVITY: grid, "gain": nominal, **columns, "probability": above})

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the points, in order of first appearance."""
        return tuple(dict.fromkeys(self.points["mode"].astype(str)))

    def _best(self, grid: Floats, modes: Sequence[str]) -> Floats:
        """Find the best throughput of some modes at interactivities, (grid, samples). [token/s]"""
        mine = self.points["mode"].astype(str).isin(list(modes)).to_numpy()
        x, y = 1.0 / self.ttl[mine], self.throughput[mine]
        columns = [best_from(x[:, s], y[:, s], grid) for s in range(x.shape[1])]
        return np.stack(columns, axis=1)


def uncertainty(
    points: pd.DataFrame,
    *,
    samples: int = 1000,
    seed: int = 0,
    rematch: bool = True,
    spreads: UncertaintySpec | str = "measured",
    throughput: str = THROUGHPUT,
    origin: Origin = SHIPPED,
) -> Uncertainty:
    """Compute error bars of designs: latencies and throughput, the frontier, the gain of disaggregation.

    Parameters
    ----------
    points : DataFrame
        Frontiers or whole tables of points of ONE case (``points.COLUMNS``), of one or more modes. Points far from the
        frontier of their mode are left out.
    samples : int
        Draws of the factors. [1]
    seed : int
        Seed of the draws.
    rematch : bool
        Whether the counts of prefill and decode instances are matched anew in every sample; otherwise pools with
        different factors are out of balance.
    spreads : UncertaintySpec or str
        Spreads of operators and engines: a shipped name, or the path of a file.
    throughput : str
        Column of the throughput: per GPU, USD or joule, as in ``pareto_front``; costs have no error.
    origin : Origin
        Inputs of the rows: own systems, a distribution of lengths.

    Returns
    -------
    Uncertainty
        ``bands()``, ``frontier(at)``, ``gain(at)``.

    Raises
    ------
    InputError
        No points, a profile without fits, and as ``rescore``.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> options = ds.Colocation(batch=(1, 4), prefill_batch=(1,))
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> bars = uncertainty(ds.colocated(at, ds.Sharding(), ds.lengths(1000, 101), options=options), samples=8)
    >>> bars.ttl.shape, [name for name in bars.bands() if name.startswith("ttl_p")]
    ((2, 8), ['ttl_p10_s', 'ttl_p50_s', 'ttl_p90_s'])
    """
    whole_number("samples", samples)
    if not len(points):
        raise InputError("no points: error bars need one or more")
    spec = load_uncertainty(spreads) if isinstance(spreads, str) else spreads
    kept = near_frontier(points, throughput=throughput)
    arrays = {name: np.empty((len(kept), samples)) for name in ("ttl", "ftl", "throughput")}
    beside, text = np.empty((len(kept), samples)), np.ones((len(kept), 2, 2))
    words = np.full(len(kept), "", dtype=object)
    draws = _Draws(samples, seed)
    columns = {"ttl": "ttl_s", "ftl": "ftl_s", "throughput": throughput}
    for designs in designs_of(kept, origin):
        times = times_of(designs)
        ends = _text_ends(designs, spec)
        scores, outside = _sampled(designs, spec, draws, ends, rematch=rematch)
        nominal = scores_of(designs, times)
        for place, end in enumerate(ends):
            found = scores_of(designs, Times(*(factor * part for factor, part in zip(end, times, strict=True))))
            text[designs.rows, :, place] = np.stack([found.ttl / nominal.ttl, found.ftl / nominal.ftl], axis=1)
        words[designs.rows] = outside
        beside[designs.rows] = _beside(designs, spec, draws)
        for name, values in arrays.items():
            own = kept[columns[name]].to_numpy(dtype=float)[designs.rows]
            values[designs.rows] = getattr(scores, name) * (own / getattr(nominal, name))[:, None]
    told = tuple(words)
    return Uncertainty(points=kept, column=throughput, **arrays, beside=beside, text=text, outside_calibration=told)


def near_frontier(points: pd.DataFrame, *, throughput: str = THROUGHPUT) -> pd.DataFrame:
    """Keep the points of each mode on or near its frontier, with a new index.

    A point is near if no other point beats it in both axes by a margin: the largest of ``MARGINS`` that leaves no more
    than ``CANDIDATES`` points of a mode.

    The first point beats the second by less than 20 %, the third by more:

    >>> points = pd.DataFrame({"mode": "colocated", INTERACTIVITY: [100.0, 90.0, 50.0], THROUGHPUT: [60.0, 55.0, 30.0]})
    >>> near_frontier(points)[THROUGHPUT].tolist()
    [60.0, 55.0]
    """
    parts = []
    for _, mine in points.groupby("mode", sort=False, observed=True):
        x, y = (mine[name].to_numpy(dtype=float) for name in (INTERACTIVITY, throughput))
        keep = y >= best_from(x, y, x)
        for margin in MARGINS:
            near = y * (1.0 + margin) >= best_from(x, y, x * (1.0 + margin))
            if near.sum() <= max(CANDIDATES, keep.sum()):
                keep |= near
                break
        parts.append(mine[keep])
    return pd.concat(parts, ignore_index=True)


def within_reach(points: pd.DataFrame, *, throughput: str = THROUGHPUT) -> pd.DataFrame:
    """Drop the points of one mode that ``near_frontier`` never keeps, whatever tables are joined with this one."""
    x, y = (points[name].to_numpy(dtype=float) for name in (INTERACTIVITY, throughput))
    reach = 1.0 + MARGINS[0]
    return points[y * reach >= best_from(x, y, x * reach)].reset_index(drop=True)


class _Draws:
    """Standard normal numbers by name, the same for the same name and seed. [1]"""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._known: dict[str, Floats] = {}

    def of(self, name: str) -> Floats:
        """Draw numbers of shape (samples,)."""
        if name not in self._known:
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            self._known[name] = rng.standard_normal(self.samples)
        return self._known[name]

    def mixed(self, common: str, own: Sequence[str], share: float) -> Floats:
        """Draw sums of a common and an own part, (len(own), samples); the common part has ``share`` of the variance."""
        index = {name: place for place, name in enumerate(dict.fromkeys(own))}
        apart = np.stack([self.of(name) for name in index])[[index[name] for name in own]]
        return np.asarray(np.sqrt(share) * self.of(common) + np.sqrt(1.0 - share) * apart)


def assumed_factor(name: str, samples: int, seed: int = 0) -> Floats:
    """Draw the factor on a time of which no fit speaks, the same for the same name; shape (samples,). [1]"""
    return np.asarray(np.exp(load_uncertainty("measured").assumed * _Draws(samples, seed).of(name)))


def kv_factor(samples: int, seed: int = 0) -> Floats:
    """Draw the factor on the time in which a cache moves from prefill to decode; shape (samples,). [1]"""
    return np.asarray(np.exp(load_uncertainty("measured").kv_transfer * _Draws(samples, seed).of("kv transfer")))


def _text_ends(designs: Designs, spec: UncertaintySpec) -> tuple[Times, ...]:
    """Times of passes with the least and the most skewed experts of text, over nominal; none without expert ranks. [1]

    >>> import disagg_sim as ds
    >>> at, wide = ds.setup("deepseek_r1", "h200_sxm", "fp8_block"), ds.Sharding(dp_attn=16, tp_ffn=1, ep=16)
    >>> grids = [of(at, wide, ds.lengths(4096, 512), batch=[16]) for of in (ds.prefill_grid, ds.decode_grid)]
    >>> (one,) = designs_of(ds.disaggregated(*grids))
    >>> [f"{end.fill[0]:.2f} {end.step[0]:.2f}" for end in _text_ends(one, load_uncertainty("measured"))]
    ['0.76 1.00', '1.14 1.00']
    """
    sides = {"decode": (designs.at, designs.mapping), "prefill": (designs.prefill_at, designs.prefill_mapping)}
    text = {
        phase: at
        for phase, (at, mapping) in sides.items()
        if phase in designs.phases and at.model.is_moe and np.any(np.asarray(mapping.ep) > 1)
        if at.profile.random_routing and not at.profile.expert_skew and at.profile.rank_skew
    }
    if not text:
        return ()
    times, found = times_of(designs), []
    for skew in spec.text_skew:
        other = {phase: at.changed(profile=replace(at.profile, rank_skew=skew)) for phase, at in text.items()}
        moved = times_of(designs.under(**other))
        pairs = zip(moved, times, strict=True)
        found.append(
            Times(*(np.where(mean > 0.0, part / np.where(mean > 0.0, mean, 1.0), 1.0) for part, mean in pairs))
        )
    return tuple(found)


def _sampled(
    designs: Designs, spec: UncertaintySpec, draws: _Draws, text: Sequence[Times], *, rematch: bool
) -> tuple[Scores, list[str]]:
    """Score designs in every sample, (rows, samples); also return ``outside_calibration`` of each."""
    if not (designs.at.profile.fitted and designs.prefill_at.profile.fitted):
        raise InputError(f"profile {designs.at.profile.name!r} has no fits, so its errors are unknown")
    ((nominal, operators),) = timed_contributions([designs])
    places = {phase: _mapping_names(designs, phase) for phase in ("decode", "prefill")}
    sampled = [np.repeat(part[:, None], draws.samples, axis=1) for part in nominal]
    for operator in operators:
        moved = np.expm1(log_factor(operator, designs, spec, draws, places[operator.phase]))
        for index, part in enumerate(operator.seconds):
            if np.any(part):
                sampled[index] += part[:, None] * moved
    for phase, passes in (("decode", (0,)), ("prefill", (1, 2, 3, 6))):
        # A mixed step is a decode step with prompts in it, so it has the error of decode.
        kind = "decode" if designs.mode == "piggyback" else phase
        prefill = kind == "prefill"
        at, mapping = (designs.prefill_at, designs.prefill_mapping) if prefill else (designs.at, designs.mapping)
        engine = engine_of(at.rates, at.engine, spec)
        sigma = _engine_sigma(designs, mapping, engine, spec.served["step"])
        own = [f"{designs.mode} {kind} {place}" for place in places[phase]]
        factor = np.exp(sigma[:, None] * draws.mixed(f"engine {engine} {kind}", own, spec.shared))
        for index in passes:
            sampled[index] *= factor
    if text:
        z = draws.of("experts of the text") / EIGHTY
        ends = zip(sampled, *text, strict=True)
        sampled = [part * np.where(z < 0.0, low[:, None] ** -z, high[:, None] ** z) for part, low, high in ends]
    turned = Times(*(part.T for part in sampled))
    scores = Scores(*(np.asarray(value).T for value in scores_of(designs, turned, rematch=rematch)))
    return scores, words_of(operators, nominal)


def _beside(designs: Designs, spec: UncertaintySpec, draws: _Draws) -> Floats:
    """Draw errors of the time outside the pass before the first token, (rows, samples). [s]"""
    at = designs.prefill_at
    engine = engine_of(at.rates, at.engine, spec)
    sigma = _engine_sigma(designs, designs.prefill_mapping, engine, spec.served["first_token"])
    return at.request_host * sigma[:, None] * draws.of(f"engine {engine} first token")


def _engine_sigma(designs: Designs, mapping: Sharding, engine: str, spread: ServedSpread) -> Floats:
    """Standard deviation of the error of an engine on designs like these, (rows,). [1]"""
    kinds = layout_kinds(mapping)
    rows = len(designs.rows)
    same = {
        "engine": engine,
        "load": "closed_loop",
        "family": family_of(designs.at.model),
        "mode": "disaggregated" if designs.mode == MODES[0] else "aggregated",
    }
    levels = {kind: [level] * rows for kind, level in same.items()}
    return served_sigma(spread, levels | {"layout": np.broadcast_to(kinds, (rows,)).tolist()})


def log_factor(
    operator: Contribution, designs: Designs, spec: UncertaintySpec, draws: _Draws, places: Sequence[str]
) -> Floats:
    """Draw the logarithm of the factor on an operator's time, (rows, samples)."""
    at = designs.at if operator.phase == "decode" else designs.prefill_at
    kind = kind_of(operator, spec)
    library = operator.fits[0].engine if operator.fits else ASSUMED
    common = f"{at.system.name} {library} {operator.label}"
    own = [f"{at.system.name} {library} {operator.name} {operator.format} {place}" for place in places]
    return sigma_of(operator, spec)[:, None] * draws.mixed(common, own, kind.shared)


def kind_of(operator: Contribution, spec: UncertaintySpec) -> KindSpread:
    """Find the spread of the kind of an operator: shares of the variance, s.d. of the logarithm. [1]"""
    return spec.kinds[_SECTION.get(operator.kind, operator.kind)]


def sigma_of(operator: Contribution, spec: UncertaintySpec) -> Floats:
    r"""Add up the s.d. of the logarithm of an operator's time: its fit, a transfer, sizes outside the range.

    .. math:: \sigma = \sqrt{\sigma_{fit}^2 + \sigma_{transfer}^2} + \sigma_{doubling} \sum |\log_2(size / end)|

    The result has shape (rows,).
    """
    measured = [fit for fit in operator.fits if fit.engine != ASSUMED]
    own = max((spread_of(fit, spec) for fit in measured), default=spec.assumed)
    transfer = max(
        (_transfer(fit.inherited_from, operator, spec) for fit in measured if fit.inherited_from), default=0.0
    )
    far = sum((breach.doublings for breach in breaches(operator)), start=np.zeros(operator.rows))
    return np.asarray(np.sqrt(own**2 + transfer**2) + spec.per_doubling * far)


def _transfer(origin: str, operator: Contribution, spec: UncertaintySpec) -> float:
    """Standard deviation of the logarithm added by a fit of another system. [1]"""
    kind = kind_of(operator, spec)
    alike = load_system(origin).architecture == operator.architecture
    return kind.transfer if alike else kind.transfer_across


def engine_of(rates: Rates, engine: str, spec: UncertaintySpec) -> str:
    """Choose the engine whose spread counts: ``engine``, else the first known one whose kernels are used."""
    used = (fit.engine for each in rates.used for fit in each.fits)
    known = [name for name in (engine, *used) if name in spec.served["step"].levels.get("engine", {})]
    return known[0] if known else engine


def _mapping_names(designs: Designs, phase: str) -> list[str]:
    mapping = designs.mapping if phase == "decode" else designs.prefill_mapping
    named = {name: np.broadcast_to(getattr(mapping, name), (len(mapping),)) for name in SHARDING}
    shared = {name: named.pop(name) for name in ("dcp", "pcp")}  # named only above 1, since these names seed the draws
    names = [" ".join(f"{value:g}" for value in row) for row in zip(*named.values(), strict=True)]
    for name, degree in shared.items():
        names = [f"{each} {name} {n:g}" if n > 1 else each for each, n in zip(names, degree, strict=True)]
    return names
