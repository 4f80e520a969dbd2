"""All that a run left behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Slo
from disagg_sim.notebook import Shown
from disagg_sim.simulation.records import Decision, EncodeUse, Instances, Models, Requests, Samples, TierLoads, frame_of
from disagg_sim.simulation.totals import Totals
from disagg_sim.techniques.availability.play import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Shown):
    """All that a run left behind; metrics are computed from it alone."""

    policy: str  # its name
    deployment: str
    trace: str
    seed: int
    requests: Requests
    itl_edges: Floats  # of the gaps between tokens, shape (bins + 1,); the last bin is open above [s]
    itl_counts: Ints  # gaps, one a token after the first, shape (bins,) [token]
    samples: Samples
    instances: Instances
    decisions: tuple[Decision, ...]
    duration_s: float  # from 0 to the last event [s]
    peak_flops: float  # dense peak of one GPU in the arithmetic of the recipe's matrices [FLOP/s]
    wall_s: float  # of the simulation itself [s]
    cpu_s: float  # [s]
    failures: tuple[Failure, ...] = ()  # that happened
    models: Models | None = None  # None = one
    tier_loads: TierLoads | None = None  # None = no tiers below HBM
    late_gaps: Ints | None = None  # of each request, above ``gap_limit_s`` of the run; None = there is no limit [1]
    totals: Totals | None = None  # of requests that have left the run in pieces; ``requests`` has none of them then
    judged_by: Slo | None = None  # the limits that these totals were judged by [s]
    encode: EncodeUse | None = None  # None = no encode pool

    def gpus_by_model(self) -> dict[str, float]:
        """GPUs that the instances of each model held on average; none where there is one model. [1]"""
        if self.models is None:
            return {}
        held = np.bincount(self.models.instance, self.instances.gpu_s, minlength=len(self.models.names))
        return dict(zip(self.models.names, (held / self.duration_s).tolist(), strict=True))

    def frame(self) -> pd.DataFrame:
        """The requests as a table; ``status`` in words, and ``model`` or loads where there are several, or tiers."""
        model = {} if self.models is None else {"model": np.array(self.models.names)[self.models.request]}
        loads = {} if self.tier_loads is None else self.tier_loads.columns
        late = {} if self.late_gaps is None else {"late_gaps": self.late_gaps}
        return frame_of(self.requests).assign(**model | loads | late)
