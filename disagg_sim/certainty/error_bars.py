r"""Compute error bars of latencies and throughput of designs, and of frontiers.

**Model.** Every operator time of a design carries a factor, and so do the passes as a whole:

.. math:: t_o \to t_o\,\exp\left(\sigma_o\left(\sqrt{\rho_k}\,z_{s,e,k} + \sqrt{1-\rho_k}\,\epsilon_{o,m}\right)\right),
          \qquad T_p \to T_p\,\exp\left(\tau_p\left(\sqrt{\rho}\,z_{e,p} + \sqrt{1-\rho}\,\epsilon_{p,m}\right)\right)

* :math:`\sigma_o` is the spread of the fit behind operator o (``facts.uncertainty.spread_of``), wider where the fit is
  of another system (``transfer``, ``transfer_across``), where a size leaves its range (``per_doubling``), or where
  nobody measured;
* z is **systematic**: one number for all operators of kind k of a (system s, engine e) in every design and mode.
  :math:`\rho_k` is the share of the variance that whole groups of shapes have in common;
* :math:`\epsilon` is **idiosyncratic**: its own for every operator o of a layer and mapping m, so that it partly
  averages over the operators of a layer, and batches of one mapping share it;
* :math:`\tau_p` is the discrepancy of an engine: what served runs show beyond their kernels (host, scheduling), wider
  for layouts, families of models and engines of which no run was fitted (``ServedSpread``). For decode steps and passes
  of prefill it is that of the time of an output token, estimated from the served runs of the FITTED part alone. What
  all configurations have in common cancels where two modes are compared.

What a request spends beside its pass before the first token (HTTP, tokenising, scheduling, hand-over) is no part of the
FTL of a configuration. It is off by seconds, not by a factor (``ServedSpread`` of ``first_token``), and ``beside`` has
draws of it for who adds it to a pass.

All of z and :math:`\epsilon` are standard normal, and drawn by name from one seed: tables of several modes, or the same
table twice, see the same factors.

**Propagation.** A pass is linear in the times of its operators where no overlap and no pipeline stage changes hands, so
the contributions of its operators (``timed_contributions``) times the factors give its time in every sample; latencies
and throughput follow as the mode puts them together. Designs stay as they were chosen (limits on latency act on the
nominal values), but for the counts of instances, which follow unless ``rematch`` is off.

Past 400 lines: the model stands above, and its spreads, draws and bands each have an example.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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
from disagg_sim.facts.uncertainty import KindSpread, ServedSpread, UncertaintySpec, spread_of
from disagg_sim.physics.rates import Rates
from disagg_sim.search.pareto import best_from
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT

#: Ends and middle of a band: 80 % of the samples lie between the ends.
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
#: A point may join a frontier in a sample when the nominal one beats it by no more than this; less where many could.
MARGINS = (0.2, 0.1, 0.05, 0.02)
#: Points of one mode that are sampled, unless the nominal frontier has more.
CANDIDATES = 400
#: Section of the efficiency files that speaks of a kind of operators, where it has another name.
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
    """Designs with what they may turn out to be; two-dimensional arrays have shape (rows, samples)."""

    points: pd.DataFrame  # the designs, nominal
    column: str  # of their throughput
    ttl: Floats  # [s]
    ftl: Floats  # [s]
    throughput: Floats  # of ``column`` [token/s, token/USD or token/J]
    beside: Floats  # what a request spends beside its pass before its first token, over its forecast [s]
    outside_calibration: tuple[str, ...]  # as ``calibrated.outside_calibration``

    def bands(self) -> pd.DataFrame:
        """The designs with the 10 %, 50 % and 90 % quantiles of their numbers, and what they rest on.

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
        """Band of the frontier of each mode: the best throughput at an interactivity, sample by sample.

        Parameters
        ----------
        at : array_like, optional
            Interactivities; by default those of the nominal frontier. [token/s]

        Returns
        -------
        DataFrame
            ``mode``, ``tokens_per_s_per_user``, ``tokens_per_s_per_gpu`` (nominal) and its ``_p10``, ``_p50``, ``_p90``
            [token/s]; 0 in samples in which no design is so fast.
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
        """Throughput of disaggregated over the best co-located serving, with its probability to be above 1.

        Both modes see the same factors in a sample: what slows an operator of both cancels.

        Parameters
        ----------
        at : array_like
            Interactivities. [token/s]

        Returns
        -------
        DataFrame
            ``tokens_per_s_per_user`` [token/s], ``gain`` (nominal), ``gain_p10``, ``gain_p50``, ``gain_p90`` [1] and
            ``probability`` of a gain above 1 [1]; infinite where only disaggregation reaches, NaN where neither does.

        Raises
        ------
        InputError
            When a side is missing.
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
        known = [row[~np.isnan(row)] for row in sampled]  # samples in which a mode is so fast
        columns = {f"gain_{q}": [_quantile(row, share) for row in known] for q, share in QUANTILES.items()}
        above = [float(np.mean(row > 1)) if row.size else np.nan for row in known]
        return pd.DataFrame({INTERACTIVITY: grid, "gain": nominal, **columns, "probability": above})

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the points, in order of first appearance."""
        return tuple(dict.fromkeys(self.points["mode"].astype(str)))

    def _best(self, grid: Floats, modes: Sequence[str]) -> Floats:
        """Best throughput of some modes at interactivities, (grid, samples). [token/s]"""
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
    """Compute error bars of designs: of latencies and throughput, of the frontier, and of what disaggregation gains.

    Parameters
    ----------
    points : DataFrame
        Frontiers or whole tables of points of ONE case (``points.COLUMNS``), of one or more modes below one another.
        Points far from the frontier of their mode are left out: no factor brings them there.
    samples : int
        Draws of the factors. [1]
    seed : int
        Of the draws; the same seed gives the same bands.
    rematch : bool
        Whether the counts of prefill and decode instances are adapted to what the pools turn out to do; else the pair
        stays as it was matched, and is out of balance wherever the two are off by different factors.
    spreads : UncertaintySpec or str
        How far operators and engines may be off: shipped ones by name, or a file's path.
    throughput : str
        Column of the throughput: per GPU, USD or joule, as in ``pareto_front``; costs are taken as sure.
    origin : Origin
        What the rows were made with: systems of one's own, interference, a distribution of lengths.

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
    >>> found = uncertainty(ds.colocated(at, ds.Sharding(), ds.lengths(1000, 101), options=options), samples=8)
    >>> found.ttl.shape, [name for name in found.bands() if name.startswith("ttl_p")]
    ((2, 8), ['ttl_p10_s', 'ttl_p50_s', 'ttl_p90_s'])
    """
    whole_number("samples", samples)
    if not len(points):
        raise InputError("no points: error bars need one or more")
    spec = load_uncertainty(spreads) if isinstance(spreads, str) else spreads
    kept = near_frontier(points, throughput=throughput)
    arrays = {name: np.empty((len(kept), samples)) for name in ("ttl", "ftl", "throughput")}
    beside = np.empty((len(kept), samples))
    words = np.full(len(kept), "", dtype=object)
    draws = _Draws(samples, seed)
    columns = {"ttl": "ttl_s", "ftl": "ftl_s", "throughput": throughput}
    for designs in designs_of(kept, origin):
        found, told = _sampled(designs, spec, draws, rematch=rematch)
        nominal = scores_of(designs, times_of(designs))
        words[designs.rows] = told
        beside[designs.rows] = _beside(designs, spec, draws)
        for name, values in arrays.items():
            own = kept[columns[name]].to_numpy(dtype=float)[designs.rows]
            values[designs.rows] = getattr(found, name) * (own / getattr(nominal, name))[:, None]
    return Uncertainty(points=kept, column=throughput, **arrays, beside=beside, outside_calibration=tuple(words))


def near_frontier(points: pd.DataFrame, *, throughput: str = THROUGHPUT) -> pd.DataFrame:
    """Keep the points that may come to lie on the frontier of their mode: not beaten in both axes by a margin.

    All points of the nominal frontier; of the others those within the largest of ``MARGINS`` that leaves no more than
    ``CANDIDATES`` of a mode. Takes ``points`` (with ``mode``, ``tokens_per_s_per_user`` and the column of the
    throughput) and ``throughput`` (column of the throughput [token/s, token/USD or token/J]). Returns the rows that are
    kept, modes one below another, with a new index.

    20 % more in both axes would bring the second point level with the first, not the third:

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
    """Drop the points that no table joined with this one lets come near a frontier.

    What ``near_frontier`` keeps of several tables below one another, it keeps of what is left of each, too: another
    table can only raise the frontier, and no margin is wider than the first of ``MARGINS``. Takes ``points`` (of one
    mode, with ``tokens_per_s_per_user`` and the column of the throughput) and ``throughput`` (column of the throughput
    [token/s, token/USD or token/J]). Returns the rows that are left, in their order, with a new index.
    """
    x, y = (points[name].to_numpy(dtype=float) for name in (INTERACTIVITY, throughput))
    reach = 1.0 + MARGINS[0]
    return points[y * reach >= best_from(x, y, x * reach)].reset_index(drop=True)


def _quantile(values: Floats, share: float) -> float:
    """A quantile that is one of the values, infinite ones included; NaN of none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values.size else np.nan


class _Draws:
    """Standard normal numbers by name, the same for the same name and seed. [1]"""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._known: dict[str, Floats] = {}

    def of(self, name: str) -> Floats:
        """Shape (samples,)."""
        if name not in self._known:
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            self._known[name] = rng.standard_normal(self.samples)
        return self._known[name]

    def mixed(self, common: str, own: Sequence[str], share: float) -> Floats:
        """Shape (len(own), samples): a common and an own part, the common one with ``share`` of the variance."""
        index = {name: place for place, name in enumerate(dict.fromkeys(own))}
        apart = np.stack([self.of(name) for name in index])[[index[name] for name in own]]
        return np.asarray(np.sqrt(share) * self.of(common) + np.sqrt(1.0 - share) * apart)


def _sampled(designs: Designs, spec: UncertaintySpec, draws: _Draws, *, rematch: bool) -> tuple[Scores, list[str]]:
    """Scores of designs in every sample, arrays of shape (rows, samples), and what they rest on."""
    if not (designs.at.profile.fitted and designs.prefill_at.profile.fitted):
        raise InputError(f"profile {designs.at.profile.name!r} has no fits, so that nothing says how far it may be off")
    ((nominal, operators),) = timed_contributions([designs])
    places = {phase: _mapping_names(designs, phase) for phase in ("decode", "prefill")}
    sampled = [np.repeat(part[:, None], draws.samples, axis=1) for part in nominal]
    for operator in operators:
        moved = np.expm1(log_factor(operator, designs, spec, draws, places[operator.phase]))
        for index, part in enumerate(operator.seconds):
            if np.any(part):
                sampled[index] += part[:, None] * moved
    for phase, passes in (("decode", (0,)), ("prefill", (1, 2, 3))):
        # A mixed step is a decode step with prompts in it: it is off as decode is.
        kind = "decode" if designs.mode == "piggyback" else phase
        factor = _engine_factor(designs, f"{designs.mode} {kind}", kind, places[phase], spec, draws)
        for index in passes:
            sampled[index] *= factor
    turned = Times(*(part.T for part in sampled))
    found = Scores(*(np.asarray(value).T for value in scores_of(designs, turned, rematch=rematch)))
    return found, words_of(operators, nominal)


def _engine_factor(
    designs: Designs, what: str, kind: str, places: Sequence[str], spec: UncertaintySpec, draws: _Draws
) -> Floats:
    """What an engine adds to passes of a kind, (rows, samples). [1]"""
    at, mapping = (designs.at, designs.mapping) if kind == "decode" else (designs.prefill_at, designs.prefill_mapping)
    engine = engine_of(at.rates, at.engine, spec)
    sigma = _engine_sigma(designs, mapping, engine, spec.served["step"])
    own = [f"{what} {place}" for place in places]
    return np.exp(sigma[:, None] * draws.mixed(f"engine {engine} {kind}", own, spec.shared))


def _beside(designs: Designs, spec: UncertaintySpec, draws: _Draws) -> Floats:
    """What a request spends beside its pass before its first token, over its forecast, (rows, samples). [s]"""
    at = designs.prefill_at
    engine = engine_of(at.rates, at.engine, spec)
    sigma = _engine_sigma(designs, designs.prefill_mapping, engine, spec.served["first_token"])
    return sigma[:, None] * draws.of(f"engine {engine} first token")


def _engine_sigma(designs: Designs, mapping: Sharding, engine: str, spread: ServedSpread) -> Floats:
    """S.d. of what an engine adds, by how well designs of this kind are known, (rows,), in the unit of the spread."""
    kinds = layout_kinds(mapping)
    rows = len(designs.rows)
    same = {
        "engine": engine,
        "load": "closed_loop",
        "family": family_of(designs.at.model),
        "mode": "disaggregated" if designs.mode == MODES[0] else "aggregated",
    }
    told = {kind: [level] * rows for kind, level in same.items()}
    return served_sigma(spread, told | {"layout": np.broadcast_to(kinds, (rows,)).tolist()})


def log_factor(
    operator: Contribution, designs: Designs, spec: UncertaintySpec, draws: _Draws, places: Sequence[str]
) -> Floats:
    """Logarithm of the factor on an operator's time, (rows, samples)."""
    at = designs.at if operator.phase == "decode" else designs.prefill_at
    kind = kind_of(operator, spec)
    library = operator.fits[0].engine if operator.fits else ASSUMED
    common = f"{at.system.name} {library} {operator.label}"
    own = [f"{at.system.name} {library} {operator.name} {operator.format} {place}" for place in places]
    return sigma_of(operator, spec)[:, None] * draws.mixed(common, own, kind.shared)


def kind_of(operator: Contribution, spec: UncertaintySpec) -> KindSpread:
    """Find how the errors of the fits behind an operator are shared out.

    Returns shares of the variance [1] and s.d. of the logarithm [1].
    """
    return spec.kinds[_SECTION.get(operator.kind, operator.kind)]


def sigma_of(operator: Contribution, spec: UncertaintySpec) -> Floats:
    r"""Add up the s.d. of the logarithm of an operator's time: of its fit, of a transfer, and of leaving the range.

    .. math:: \sigma = \sqrt{\sigma_{fit}^2 + \sigma_{transfer}^2} + \sigma_{doubling} \sum |\log_2(size / end)|

    The result has shape (rows,).

    >>> from types import SimpleNamespace
    >>> spec, hop = load_uncertainty("measured"), SimpleNamespace(kind="hop", fits=(), sizes={}, rows=2, cut_of=None)
    >>> (sigma_of(hop, spec) / spec.assumed).tolist()
    [1.0, 1.0]
    """
    measured = [fit for fit in operator.fits if fit.engine != ASSUMED]
    own = max((spread_of(fit, spec) for fit in measured), default=spec.assumed)
    transfer = max(
        (_transfer(fit.inherited_from, operator, spec) for fit in measured if fit.inherited_from), default=0.0
    )
    far = sum((breach.doublings for breach in breaches(operator)), start=np.zeros(operator.rows))
    return np.asarray(np.sqrt(own**2 + transfer**2) + spec.per_doubling * far)


def _transfer(origin: str, operator: Contribution, spec: UncertaintySpec) -> float:
    """S.d. of the logarithm that a fit of another system adds. [1]"""
    kind = kind_of(operator, spec)
    alike = load_system(origin).architecture == operator.architecture
    return kind.transfer if alike else kind.transfer_across


def engine_of(rates: Rates, engine: str, spec: UncertaintySpec) -> str:
    """Engine whose discrepancy counts: the one asked for, else the first one known whose kernels were taken."""
    taken = (fit.engine for each in rates.used for fit in each.fits)
    known = [name for name in (engine, *taken) if name in spec.served["step"].levels.get("engine", {})]
    return known[0] if known else engine


def _mapping_names(designs: Designs, phase: str) -> list[str]:
    mapping = designs.mapping if phase == "decode" else designs.prefill_mapping
    named = {name: np.broadcast_to(getattr(mapping, name), (len(mapping),)) for name in SHARDING}
    shared = {name: named.pop(name) for name in ("dcp", "pcp")}  # told where they are above 1: draws go by these names
    names = [" ".join(f"{value:g}" for value in row) for row in zip(*named.values(), strict=True)]
    for name, degree in shared.items():
        names = [f"{each} {name} {n:g}" if n > 1 else each for each, n in zip(names, degree, strict=True)]
    return names
