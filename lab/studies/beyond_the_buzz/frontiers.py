"""Compute the sweeps of a study once per profile and store them: figures and claims read the same tables.

A figure is one YAML file, ``fig06.yaml``, and where it needs a second sweep, files beside it such as
``fig06_every_step_mixed.yaml``. Its frontier is that of all of them, told apart by the column ``sweep``. Figure 5 is
chunked pipelined prefill of very long prompts, depth against expert ranks: the GPUs of an instance stay while PP takes
over from EP, at one prompt an attention rank. Deeper pipelines hold fewer prompts at a time, so the first token comes
earlier and the request rate stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from disagg_sim.domain import Sharding
from disagg_sim.errors import check_word
from disagg_sim.facts.yaml_files import spec_roots
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.grid import prefill_grid
from disagg_sim.sweep.plan import FRONTIER, plan_sweeps
from disagg_sim.sweep.run import run_sweeps
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.sweep.store import RunListener
from disagg_sim.workload.lengths import lengths
from lab.studies.beyond_the_buzz.evidence import R1, RECIPE, SYSTEM

#: Figure 5, which is no sweep: prompt [token], GPUs of an instance, EP x PP, stages [1], forms of MLA, chunk [token].
FIGURE_5 = "fig05"
PROMPT, GPUS, DEPTHS, FORMS, CHUNK = 262_144, 64, (1, 2, 4, 8, 16, 32), ("cached", "naive"), 512
#: Directory below ``sweeps/`` of the study of arXiv 2506.05508.
BEYOND_THE_BUZZ = "beyond_the_buzz"


class ProgressOnly:
    """Tells another listener how far a computation is and what goes wrong, and nothing else."""

    def __init__(self, told: RunListener) -> None:
        self.warn, self.start, self.advance, self.finish = told.warn, told.start, told.advance, told.finish

    def note(self, text: str) -> None:
        """Drop it."""


def study_files(study: str = BEYOND_THE_BUZZ) -> dict[str, Path]:
    """Name -> file of every sweep of a study, sorted; those of the user's directories come first."""
    found: dict[str, Path] = {}
    for root in spec_roots():
        for path in (root / "sweeps" / study).glob("*.yaml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def parts_of(figure: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The sweeps among ``names`` that make a figure: its own, and those named after it."""
    parts = tuple(name for name in names if name == figure or name.startswith(f"{figure}_"))
    if not parts:
        check_word("figure or sweep", figure, names)
    return parts


@dataclass(frozen=True, slots=True)
class Tables:
    """Frontiers of sweeps of a study under one profile, by the name of the sweep."""

    parts: Mapping[str, pd.DataFrame]

    def frontier(self, figure: str, profile: str) -> pd.DataFrame:  # noqa: ARG002 - a table names its own profile
        """As ``Frontiers.frontier``, of a figure whose sweeps are all there."""
        parts = [self.parts[name].assign(sweep=name) for name in parts_of(figure, tuple(self.parts))]
        return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class Frontiers:
    """Frontiers of the sweeps of a study, computed when first asked for."""

    #: Directory of the results: ``root/<profile>/sweeps/<sweep>/``. What lies there already and is not stale is taken
    #: from there.
    root: Path
    listener: RunListener  # told what a computation does
    jobs: int = 1  # worker processes [1]
    study: str = BEYOND_THE_BUZZ  # directory of the sweeps below ``sweeps/``
    #: Frontier, and design points whose time and memory were computed for it [1], by sweep and profile.
    _kept: dict[tuple[str, str], tuple[pd.DataFrame, int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All sweeps of the study, and figure 5."""
        return (FIGURE_5, *study_files(self.study))

    @property
    def design_points(self) -> int:
        """Design points whose time and memory were computed for what was asked so far. [1]"""
        return sum(points for _, points in self._kept.values())

    def frontier(self, figure: str, profile: str) -> pd.DataFrame:
        """The frontiers of a figure in all its modes and cases, below one another, told apart by ``sweep`` and
        ``case``; cases without a feasible point are absent. Figure 5 has the columns of ``pipelined_prefill``.
        """
        return self.tables([figure], profile).frontier(figure, profile)

    def tables(self, figures: Iterable[str], profile: str) -> Tables:
        """The frontiers of some figures under a profile, computed, as another process takes them."""
        return Tables({name: self._kept[name, profile][0] for name in self.prepare(figures, [profile])})

    def prepare(self, figures: Iterable[str], profiles: Iterable[str]) -> list[str]:
        """Compute, several at once, what is not kept yet of the sweeps of these figures, which it returns, under these
        profiles.
        """
        names = list(dict.fromkeys(part for figure in figures for part in parts_of(figure, self.names)))
        keys = [(name, profile) for profile in profiles for name in names if (name, profile) not in self._kept]
        for name, profile in keys:
            if name == FIGURE_5:
                table = pipelined_prefill(profile)
                self._kept[name, profile] = table, len(table)
        keys = [key for key in keys if key not in self._kept]
        found = study_files(self.study)
        plans = plan_sweeps([load_sweep(str(found[name]), profile=profile) for name, profile in keys], keep=FRONTIER)
        places = [self.root / profile / "sweeps" / name for name, profile in keys]
        pairs = list(zip(plans, places, strict=True))
        results = run_sweeps(pairs, jobs=self.jobs, listener=ProgressOnly(self.listener))
        for (name, profile), result in zip(keys, results, strict=True):
            self.listener.note(f"{profile}, {name}: {result.total.computed:,} design points")
            self._kept[name, profile] = result.frontier, result.total.computed
        return names


def pipelined_prefill(profile: str) -> pd.DataFrame:
    """FTL and rate of every depth of the pipeline of figure 5, by MLA form: columns of ``depth_row``."""
    at = setup(R1, SYSTEM, RECIPE, profile)
    about = {"model": R1, "system": SYSTEM, "precision": RECIPE, "profile": profile}
    return pd.DataFrame([about | depth_row(at, pp, mla_form=form) for form in FORMS for pp in DEPTHS])


def depth_row(at: Setup, pp: int, *, chunk_tokens: int = CHUNK, mla_form: str = "cached") -> dict[str, Any]:
    """Score a depth of the pipeline; one stage is not chunked. Tokens/s/GPU are of the prompt, by the rate and not by
    1/FTL.
    """
    ranks, chunk = GPUS // pp, chunk_tokens if pp > 1 else 0
    mapping, law = Sharding(dp_attn=ranks, ep=ranks, pp=pp), lengths(PROMPT, 2)
    options: dict[str, Any] = {"batch": ranks, "chunk_tokens": chunk, "mla_form": mla_form}
    grid = prefill_grid(at, mapping, law, **options, allow_long_context=True)
    row = int((grid.mappings.chunk_tokens == chunk).argmax())
    rate = float(grid.request_rate[row, 0])
    return {
        "isl": PROMPT,
        "mla_form": mla_form,
        "pp": pp,
        "ep": ranks,
        "chunk_tokens": chunk,
        "batch": ranks,
        "gpus": GPUS,
        "ftl_s": float(grid.latency[row, 0]),
        "request_rate_per_s": rate,
        "tokens_per_s_per_gpu": rate * PROMPT / GPUS,
        "memory_bytes": float(grid.memory_bytes[row, 0]),
        "memory_limit_bytes": grid.memory_limit,
        "fits": bool(grid.feasible[row, 0]),
    }
