"""Look at the clusters of a run at times a fixed period apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.simulation.cluster import Cluster
from disagg_sim.simulation.engine import OBSERVE
from disagg_sim.simulation.options import MOST_SAMPLES
from disagg_sim.simulation.pieces import Pieces
from disagg_sim.simulation.records import Samples


class Sampler:
    """Looks at the clusters of a run, one a model, every ``period`` [s], after all that happens at that time.

    Of more than ``MOST_SAMPLES`` samples, which a run gets that goes on long after its last arrival, every second
    one is kept, and the period doubles.
    """

    def __init__(self, clusters: Sequence[Cluster], period: float, pieces: Pieces | None = None) -> None:
        self._clusters, self._period, self._engine, self._pieces = clusters, period, clusters[0].engine, pieces
        self._rows: list[tuple[float, ...]] = []
        self._engine.at(0.0, OBSERVE, self._look)

    def _look(self) -> None:
        arrived, queued, running, free, blocks, *rest = map(sum, zip(*map(_sample, self._clusters), strict=True))
        self._rows.append((self._engine.now, arrived, queued, running, 1.0 - free / max(blocks, 1), *rest))
        halved = len(self._rows) > MOST_SAMPLES
        if self._pieces is not None:
            self._pieces.looked(now=halved)
        if halved:  # an odd number: the last stays
            del self._rows[1::2]
            self._period *= 2
            if self._pieces is not None:
                self._pieces.halve()
        if any(cluster.at_work for cluster in self._clusters):
            self._engine.at(self._engine.now + self._period, OBSERVE, self._look)

    def samples(self, finish_s: Floats) -> Samples:
        """All samples; ``finish_s`` of the requests that have finished and not left the run. [s]"""
        table = np.array(self._rows, dtype=float).reshape(-1, 9).T
        whole = table.astype(np.int64)
        finished = np.searchsorted(np.sort(finish_s), table[0], side="right")
        if self._pieces is not None:
            finished = self._pieces.finished()
        return Samples(
            time_s=table[0],
            arrivals=whole[1],
            finished=finished,
            queued=whole[2],
            running=whole[3],
            kv_use=table[4],
            gpus=whole[5],
            prefill_gpus=whole[6],
            decode_gpus=whole[7],
            transfers=whole[8],
        )


def _sample(cluster: Cluster) -> tuple[int, ...]:
    """Requests that came, wait and decode, free blocks and all, GPUs held, by role, and transfers in flight."""
    view, roster = cluster.view, cluster.roster
    view.refresh()
    return (
        view.arrived,
        view.queued_requests.sum() + cluster.batches.waiting + len(cluster.recovery.parked),
        view.running_requests.sum(),
        view.free_blocks[roster.there].sum(),
        view.total_blocks[roster.there].sum(),
        *roster.held_gpus,
        cluster.link.in_flight,
    )
