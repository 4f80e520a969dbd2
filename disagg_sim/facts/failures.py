"""How often GPUs, nodes, NVLink domains and links fail, and how long an instance takes to serve again.

One file per measured cluster in ``hw_specs/failures/``; every figure has its source there, and what nobody measured is
null: it counts as never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from disagg_sim.facts.schema import NOT_IN_FILE, Line, Quantity, Range
from disagg_sim.notebook import Shown
from disagg_sim.units import HOUR

_Between = Annotated[float, Quantity("s", 1.0, 1e8 * HOUR)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSpec(Shown):
    """Mean times between failures, each of one part; failures are independent, at exponential times."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    gpu_mtbf: _Between | None  # of a GPU; it takes its instance along [s]
    node_mtbf: _Between | None  # of a node; it takes all instances with a GPU on it along [s]
    gpus_per_node: Annotated[int, Range(1, 1024)]  # [1]
    domain_mtbf: _Between | None  # of an NVLink domain beyond its nodes: switches, cooling, power [s]
    link_mtbf: _Between | None  # of the links of a GPU beyond the domain; it stops an instance that needs them [s]
    restart: Annotated[float, Quantity("s", 0.0, 1e4 * HOUR)]  # from a failure until an instance serves again [s]
    sources: Mapping[str, str]  # key -> where its figure comes from

    def rate(self, part: str) -> float:
        """Failures of one ``gpu``, ``node``, ``domain`` or ``link`` a second; 0 where no figure is known. [1/s]"""
        mtbf: float | None = getattr(self, f"{part}_mtbf")
        return 0.0 if mtbf is None or math.isinf(mtbf) else 1.0 / mtbf
