"""Judge the optimum of split deployments: the best that a search finds, beside the best that was published.

A **group** is one model, system, recipe, engine and pair of lengths with disaggregated runs in a closed loop. Its
published frontier are the runs that no other run beats in interactivity (``1/TPOT``) and throughput. At the
interactivity of each of them five forecasts are held against the measured throughput:

* ``as_run``: the forecast of the run itself, its layout, counts and load;
* ``same_workers``: the frontier over the workers that the group's runs have, at any batch and in any number;
* ``same_kinds``: the frontier over the kinds of their layouts ("DP, EP"), at any degree;
* ``planned``: the same on no more GPUs than the largest run of the group, with prefill loaded as a plan loads it;
* ``free``: the frontier over all layouts that a plan of this engine may take.

So ``as_run`` is the error of the model, ``same_workers`` over it what the search gains by counts and batches,
``same_kinds`` over that what it gains by degrees, and ``free`` what it gains by kinds that others did not run. A right
optimum gains little: operators have searched, too. Frontiers match pools to the last request on up to 576 GPUs, where
published runs have 22 to 80 and their prefill is not always busy: ``planned`` is what a plan would have deployed there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.candidates import mappings_of
from disagg_sim.planning.limits import MOST_LOAD
from disagg_sim.planning.question import PlanOptions
from disagg_sim.report.words import mapping_text
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.layouts import layouts_of
from disagg_sim.serving.candidates import prefill_candidates
from disagg_sim.serving.disaggregated import Rules, match_pools
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT
from disagg_sim.workload.lengths import Lengths, lengths_at
from lab.calibration.served.ranking import curve_at, served_points
from lab.calibration.served.rows import ServingRow
from lab.calibration.served.steady_state import of_random_tokens

#: Interactivity below which optima are judged: faster runs have drafts, or one prefill worker. [token/s/user]
FASTEST = 60.0
#: Classes of interactivity that are told apart. [token/s/user]
CLASSES = (0.0, 20.0, 35.0, FASTEST)
#: Longest first-token latency of a frontier, without a queue. [s]
FTL = 10.0
#: Fewest prefill workers of a run whose ratio of pools is judged: below that it is rounded to whole workers. [1]
LEAST_WORKERS = 3
#: What is held against the published throughput.
HEIGHTS = ("as_run", "same_workers", "same_kinds", "planned", "free")
GROUP = ("model", "system", "recipe", "engine", "isl", "osl")
#: Columns of ``judged_optima``, in order.
COLUMNS = (
    *GROUP,
    INTERACTIVITY,
    "published",  # input and output tokens [token/s/GPU]
    *HEIGHTS,  # forecast over published [1]
    "ran",
    "found",  # of the free frontier, at this interactivity
    "prefill_over_decode",  # GPUs, as published [1]
    "ratio_over_published",  # of the run's own two kinds, matched, over this; from LEAST_WORKERS prefill workers on [1]
)


@dataclass(frozen=True, eq=False)
class SplitGroup:
    """Disaggregated runs of one group, as operating points with their rows."""

    runs: pd.DataFrame  # as ``served_points``
    rows: tuple[ServingRow, ...]  # of the points, in order

    @property
    def lengths(self) -> Lengths:
        """Means of input and output."""
        return lengths_at(self.rows[0].isl, self.rows[0].osl)

    @cached_property
    def at(self) -> Setup:
        """Model, system, recipe and engine, with prompts as the runs had them."""
        first = self.rows[0]
        return of_random_tokens(setup(first.model, first.system, first.recipe, engine=first.engine))

    @cached_property
    def every(self) -> Sharding:
        """All layouts that a plan takes: those that the engine of the group can start."""
        return mappings_of((self.at, self.at), PlanOptions())[1]

    @cached_property
    def frontiers(self) -> dict[str, pd.DataFrame]:
        """Frontiers over the layouts of its workers, over all of their kinds (as planned, too), and over all."""
        sides = ([row.prefill for row in self.rows], [row.workers for row in self.rows])
        own = [list(dict.fromkeys(each.mapping for each in side if each)) for side in sides]
        alike = [self.every[np.isin(layouts_of(self.every), layouts_of(Sharding.stack(side)))] for side in own]
        kinds = [list(dict.fromkeys([*side, *others])) for side, others in zip(own, alike, strict=True)]
        largest = max(int(row.gpus) for row in self.rows)
        return {
            "same_workers": self.frontier(*own),
            "same_kinds": self.frontier(*kinds),
            "planned": self.frontier(*kinds, gpus=largest, load=MOST_LOAD),
            "free": self.frontier(self.every, self.every),
        }

    def frontier(
        self,
        prefill: Sharding | list[Sharding],
        decode: Sharding | list[Sharding],
        *,
        gpus: int = Rules().gpu_cap,
        load: float = 1.0,
    ) -> pd.DataFrame:
        """The best matches of these layouts on so many GPUs at most; prefill has a ``load`` of its full rate [1]."""
        sent = prefill_candidates(prefill_grid(self.at, prefill, self.lengths), ftl_limit=FTL)
        taken = decode_grid(self.at, decode, self.lengths)
        loaded = replace(sent, request_rate=load * sent.request_rate)
        return match_pools(loaded, taken, Rules(ftl_limit=FTL, gpu_cap=gpus, keep="frontier"))

    def best(self, frontier: pd.DataFrame, level: float) -> dict[str, Any] | None:
        """The point of a frontier with the most throughput from an interactivity on [token/s/user]."""
        fast = frontier[frontier[INTERACTIVITY] >= level]
        found = fast.nlargest(1, THROUGHPUT).to_dict("records")
        return {str(name): value for name, value in found[0].items()} if found else None

    def height(self, frontier: pd.DataFrame, level: float) -> float:
        """Input and output tokens of a frontier at an interactivity. [token/s/GPU]"""
        both = 1.0 + self.rows[0].isl / self.rows[0].osl
        found = curve_at(frontier[INTERACTIVITY].to_numpy(), frontier[THROUGHPUT].to_numpy(), [level])
        return float(both * found[0])


def split_groups(table: pd.DataFrame, rows: Sequence[ServingRow]) -> list[SplitGroup]:
    """Put disaggregated operating points whose throughput was measured together by group. Runs beyond saturation count:
    what they delivered is on the frontier, though they did not decode all that was in flight.
    """
    split = table[(table["mode"] == "disaggregated") & (table["qa_flag"] != "check")]
    stated = split.loc[(split["quantity"] == "throughput") & split["evaluated"], "point"]
    found = served_points(split[split["point"].isin(stated)].assign(saturated=False))
    by_point = {row.point: row for row in rows if row.prefill is not None and not row.reason}
    found = found.assign(recipe=[by_point[point].recipe for point in found["point"]])
    return [
        SplitGroup(mine.reset_index(drop=True), tuple(by_point[point] for point in mine["point"]))
        for _, mine in found.groupby(list(GROUP), sort=True)
    ]


def on_frontier(runs: pd.DataFrame) -> pd.Series:
    """Whether no other run is as fast as each, and has more throughput, measured."""
    fast, high = (runs[f"{name}_measured"].to_numpy() for name in ("interactivity", "throughput"))
    beaten = (fast[:, None] <= fast) & (high[:, None] < high) | (fast[:, None] < fast) & (high[:, None] <= high)
    return pd.Series(~beaten.any(axis=1), index=runs.index)


def judged_optima(groups: Sequence[SplitGroup]) -> pd.DataFrame:
    """Hold the frontiers of every group against its published one, up to ``FASTEST``."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        kept = on_frontier(group.runs) & (group.runs["interactivity_measured"] < FASTEST)
        runs = zip(kept, group.runs.to_dict("records"), group.rows, strict=True)
        lines += [_judged(group, run, row) for good, run, row in runs if good]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _judged(group: SplitGroup, run: dict[Any, Any], row: ServingRow) -> dict[str, Any]:
    assert row.prefill is not None
    assert row.workers is not None
    level, published = float(run["interactivity_measured"]), float(run["throughput_measured"])
    ratio = row.prefill.gpus / row.workers.gpus
    told: dict[str, Any] = {name: run[name] for name in GROUP} | {
        INTERACTIVITY: level,
        "published": published,
        "as_run": float(run["throughput_forecast"]) / published,
        **{name: group.height(frontier, level) / published for name, frontier in group.frontiers.items()},
        "ran": run["configuration"],
        "prefill_over_decode": ratio,
        "ratio_over_published": math.nan,
    }
    if (found := group.best(group.frontiers["free"], level)) is not None:
        pools = ((int(found[f"{phase}_instances"]), mapping_text(found, phase)) for phase in ("prefill", "decode"))
        told["found"] = " + ".join(f"{count}x{layout}" for count, layout in pools)
    if row.prefill.count >= LEAST_WORKERS:
        own = group.best(group.frontier([row.prefill.mapping], [row.workers.mapping]), level)
        if own is not None:
            told["ratio_over_published"] = float(own["ctx_gen_gpu_ratio"]) / ratio
    return told


def heights_by(optima: pd.DataFrame) -> pd.DataFrame:
    """Medians of the heights by system, weights and class of interactivity, and of all below one another. [1]"""
    bounds = [f"{low:g}-{high:g}" for low, high in pairwise(CLASSES)]
    classes = pd.cut(optima[INTERACTIVITY], CLASSES, right=False, labels=bounds).astype(str)
    lines = optima.assign(speed=classes, weights=[str(name).partition("_")[0] for name in optima["recipe"]])
    parts = [(system, weights, "all", mine) for (system, weights), mine in lines.groupby(["system", "weights"])]
    parts += [("all", "all", speed, lines[lines["speed"] == speed]) for speed in bounds]
    parts.append(("all", "all", "all", lines))
    found = [(*words, len(mine), *(mine[name].median() for name in HEIGHTS)) for *words, mine in parts if len(mine)]
    return pd.DataFrame(found, columns=["system", "weights", INTERACTIVITY, "points", *HEIGHTS])


def ratios_by(optima: pd.DataFrame) -> pd.DataFrame:
    """Ratio of the pools over the published one by input length, of runs with ``LEAST_WORKERS`` prefill workers. [1]"""
    known = optima.dropna(subset=["ratio_over_published"])
    found = known.groupby("isl")["ratio_over_published"]
    columns = {"points": found.size(), "median": found.median(), "p10": found.quantile(0.1), "p90": found.quantile(0.9)}
    return pd.DataFrame(columns).reset_index()
