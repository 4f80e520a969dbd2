"""Evidence for claims: frontiers of the figures, and pools that no figure shows.

Every claim runs under the default recipe (fp8 attention) unless its note says otherwise; interactivity is compared over
20-100 tokens/s/user, near the paper's plots, where the acceptance names no other range. Acceptance bands of pictures
are this project's own reading.

The paper has a simulator and no engine, so that its claims are judged by profile; as its authors set them up experts
are even. Those acceptances were set before the runs; where they are not this project's own, ``inferred`` says what they
read. Sections are those of arXiv 2506.05508; values of figures were read from them, to a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from disagg_sim.arrays import Floats
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InfeasibleError
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.gains import COLOCATED, Curve, curve
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, pareto_front
from disagg_sim.workload.lengths import lengths
from lab.studies.claims import Keeping, kept

PROFILES = ("ideal", "optimistic", "measured")
SYSTEM = "gb200_nvl72"
DOMAIN = 72  # GPUs of its NVLink domain [1]
RECIPE = "nvfp4_fp8kv"
R1, SMALL, MIDDLE, LARGE = "deepseek_r1", "llama_3_1_8b", "llama_3_1_70b", "llama_3_1_405b"
LONG_PROMPTS = (16_384, 2048)  # traffic of most figures: input and output length [token]
#: Range of interactivity near that of the paper's plots; own ranges run to one request an instance. [token/s]
LOW, HIGH = 20.0, 100.0
SAME_TIME = 1e-9  # rounding of a throughput that must not fall [1]


class FrontierSource(Protocol):
    """Where frontiers come from (``lab.studies.beyond_the_buzz.frontiers.Frontiers``)."""

    def frontier(self, figure: str, profile: str) -> pd.DataFrame:
        """Frontiers of all modes and cases of a figure or of one sweep, below one another."""


class Front(NamedTuple):
    """A frontier in order of interactivity."""

    table: pd.DataFrame

    @property
    def x(self) -> Floats:
        """Interactivity, rising. [token/s]"""
        return self.column(INTERACTIVITY)

    @property
    def curve(self) -> Curve:
        """As a step function."""
        return curve(self.table)

    def column(self, name: str) -> Floats:
        """A column as floats, in order of interactivity."""
        return self.table[name].to_numpy(dtype=float)

    def at(self, name: str, x: ArrayLike) -> Any:
        """A column of the point that serves interactivity ``x``; the last point's beyond the reach."""
        return self.column(name)[np.minimum(np.searchsorted(self.x, x), len(self.table) - 1)]

    def throughput(self, x: ArrayLike) -> Floats:
        """Throughput per GPU at interactivity ``x``; 0 beyond the reach. [token/s]"""
        return self.curve.at(x)

    def least_over(self, worse: Front) -> float:
        """Smallest ratio to another frontier: at a point of that, flat in between, while this one never rises. [1]"""
        return float((self.throughput(worse.x) / worse.column(THROUGHPUT)).min())


class Evidence(Keeping):
    """Frontiers and grids of one profile, each computed once."""

    def __init__(self, source: FrontierSource, profile: str) -> None:
        super().__init__()
        self.source, self.profile = source, profile

    def front(self, sweep: str, *, modes: Sequence[str] = (ServingMode.DISAGGREGATED,), **where: object) -> Front:
        """One frontier of a sweep: its rows in ``modes`` whose columns have the values ``where``."""
        return self.once(("front", sweep, tuple(modes), *where.items()), lambda: self._front(sweep, modes, where))

    def _front(self, sweep: str, modes: Sequence[str], where: dict[str, object]) -> Front:
        table = self.once(("table", sweep), lambda: self.source.frontier(sweep, self.profile))
        keep = table["mode"].isin(modes)
        if "sweep" in table:
            keep &= table["sweep"] == sweep
        for name, value in where.items():
            keep &= table[name] == value
        if not keep.any():
            asked = ", ".join(f"{name} {value}" for name, value in where.items())
            raise InfeasibleError(f"{sweep} under {self.profile}: no frontier of {', '.join(modes)} with {asked}")
        return Front(pareto_front(table[keep], by=[]))

    def both(self, sweep: str, **where: Any) -> tuple[Front, Front]:
        """The disaggregated frontier, and the best of both co-located modes."""
        return self.front(sweep, **where), self.front(sweep, modes=COLOCATED, **where)

    def pipelines(self) -> pd.DataFrame:
        """The rows of figure 5."""
        return self.source.frontier("fig05", self.profile)

    def setup(self, model: str) -> Setup:
        """A model on the system of the study in the profile of the evidence."""
        return setup(model, SYSTEM, RECIPE, self.profile)

    @kept
    def mappings(self, model: str) -> Sharding:
        """All mappings of a model on the system of the study."""
        return enumerate_mappings(self.setup(model))

    @kept
    def pool(self, score: Callable[..., PhaseGrid], model: str, isl: int = LONG_PROMPTS[0]) -> PhaseGrid:
        """Configurations of a model, scored by ``prefill_grid`` or ``decode_grid``."""
        work = lengths(isl, LONG_PROMPTS[1])
        return score(self.setup(model), self.mappings(model), work, allow_long_context=True)


def shared(*fronts: Front, low: float = LOW, high: float = HIGH) -> tuple[float, float]:
    """``low`` to ``high``, or as far as all frontiers reach. [token/s]"""
    return low, min(high, *(float(front.x[-1]) for front in fronts))


def third(low: float, high: float, part: int) -> Floats:
    """Fifty interactivities of a third (0, 1, 2) of a range on a log axis. [token/s]"""
    edges = np.geomspace(low, high, 4)
    return np.geomspace(edges[part], edges[part + 1], 50)


def largest_rise(values: Floats) -> float:
    """Largest of the values over the least before it. [1]"""
    return float((values / np.minimum.accumulate(values)).max())


def listed(values: dict[str, float], digits: str = ".3g") -> str:
    """``8B 1.1; 70B 1.57``."""
    return "; ".join(f"{name} {value:{digits}}" for name, value in values.items())
