"""What a pool may be made of: the configurations of grids within the limits that no other makes superfluous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.errors import InputError
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.search.deployment import Instance
from disagg_sim.search.phase_grid import PhaseGrid, best_per_size, fastest_points, least
from disagg_sim.serving.candidates import kv_rate_per_gpu
from disagg_sim.serving.integer_program import Choices
from disagg_sim.serving.pool_program import PoolCounts
from disagg_sim.techniques.encode.physics import EncodeStep
from disagg_sim.techniques.split.search import SplitGrid, SplitInstance
from disagg_sim.units import GB

G = TypeVar("G", PhaseGrid, SplitGrid)


def undominated(gpus: Ints, rate: Floats, order: Ints) -> Ints:
    """Places of the configurations that a pool may need, of GPUs that all cost the same.

    Take two configurations of G and H <= G GPUs and rates a and b with floor(G/H)*b >= a. In any pool,
    floor(G/H) instances of the second can take the place of one of the first: GPUs and cost do not rise,
    the rate does not fall, the number of distinct configurations does not grow, and the limits of latency
    and of the KV link, which hold for each configuration by itself, stay met. So the first can be left
    out and the optimum is untouched. With G = H this leaves one point per GPU count.
    """
    best = best_per_size(gpus, rate, order)
    instead = (gpus[best][:, None] // gpus[best]) * rate[best]  # (first, second)
    np.fill_diagonal(instead, -np.inf)
    return best[(instead < rate[best][:, None]).all(axis=1)]


class _Side(Generic[G]):
    """Configurations of a grid within a limit of latency, at the rates that the links of their GPUs can feed."""

    rows: Ints
    columns: Ints
    choices: Choices
    #: A layout, a configuration and its latency, as messages say them.
    words: tuple[str, str, str]

    def __init__(self, grid: G, latency_limit: float | None, kv_link_limit: float | None, within_domain: bool) -> None:
        self.grid: G = grid
        self.latency_limit = np.inf if latency_limit is None else latency_limit
        self.kv_link_limit = np.inf if kv_link_limit is None else kv_link_limit
        self.rates: Floats = grid.request_rate
        if kv_link_limit is None:
            link = own_link_bandwidth(grid.setup.system, grid.setup.profile, within_domain=within_domain)
            stored = 0.0 if isinstance(grid, SplitGrid) or within_domain else grid.stored_bytes_per_request
            fed = link * grid.unique_gpus[:, None] / (grid.kv_bytes_per_request + stored)
            self.rates = np.minimum(grid.request_rate, fed)
        self.in_time = grid.feasible & (grid.latency <= self.latency_limit)
        self.moved = self._moved()
        self._choose()

    def _moved(self) -> Floats:
        """Bytes of caches that a GPU of each point moves. [B/s]"""
        raise NotImplementedError

    def _choose(self) -> None:
        raise NotImplementedError

    def _lacking(self) -> Floats:
        """Bytes that the fullest GPU of each point lacks. [B]"""
        raise NotImplementedError

    def members(self, counts: Ints) -> Iterator[tuple[Instance | SplitInstance, int]]:
        """The counts of ``choices`` as instances of a pool, at the rate that their links can feed."""
        for i in np.flatnonzero(counts):
            found = self.grid.instance(int(self.rows[i]), int(self.columns[i]))
            yield replace(found, request_rate_per_s=float(self.choices.rate[i])), int(counts[i])

    def refusal(self) -> PoolCounts:
        """The limit that leaves nothing, and the value of it that would leave something."""
        grid, (layout, configuration, latency) = self.grid, self.words
        if not grid.feasible.any():
            lacking = least(self._lacking(), ~grid.feasible)
            text, binds = f"no {layout} fits in memory; the closest lacks {lacking / GB:.3g} GB per GPU", "memory"
            nearest = grid.setup.memory_limit + lacking
        elif not self.in_time.any():
            nearest, binds = least(grid.latency, grid.feasible), latency.lower()
            text = f"no {configuration} meets the {latency} limit of {self.latency_limit:g} s"
            text += f"; the best {latency} is {nearest:.4g} s"
        else:
            nearest, binds = least(self.moved, self.in_time), "kv_link"
            text = f"no {configuration} stays below the KV-link limit of {self.kv_link_limit:g} B/s per GPU"
            text += f"; the least bandwidth needed is {nearest:.4g} B/s"
        return PoolCounts(status="infeasible", message=text, binds=binds, nearest=nearest)


class GridSide(_Side[PhaseGrid]):
    """Configurations of a grid that a prefill or decode pool may use: within the limits and not dominated."""

    def _moved(self) -> Floats:
        return kv_rate_per_gpu(self.grid)

    def _choose(self) -> None:
        grid = self.grid
        usable = self.in_time & (self.moved <= self.kv_link_limit) & grid.entered
        rows, columns = fastest_points(grid, self.rates, usable)
        gpus, rate = grid.gpus[rows], self.rates[rows, columns]
        keep = undominated(gpus, rate, np.arange(rows.size))
        self.rows, self.columns = rows[keep], columns[keep]
        self.choices = Choices(grid.phase, gpus[keep], rate[keep], grid.setup.system.name)
        latency = "FTL" if grid.phase == "prefill" else "TTL"
        self.words = f"{grid.phase} mapping", f"{grid.phase} configuration", latency

    def _lacking(self) -> Floats:
        return self.grid.memory_bytes - self.grid.memory_limit


class SplitSide(_Side[SplitGrid]):
    """Configurations of attention and feed-forward ranks that decode together."""

    words = ("split over attention and feed-forward GPUs", "split over attention and feed-forward GPUs", "TTL")

    def _moved(self) -> Floats:
        return np.asarray(self.rates * self.grid.kv_bytes_per_request / self.grid.unique_gpus[:, None])

    def _choose(self) -> None:
        grid = self.grid
        rows, columns = np.nonzero(self.in_time & (self.moved <= self.kv_link_limit))
        rate, order = self.rates[rows, columns], np.arange(rows.size)
        systems = grid.setup.system.name, grid.ffn_setup.system.name
        if systems[0] == systems[1]:
            keep = undominated(grid.gpus[rows], rate, order)
        else:  # prices differ: the fastest of each pair of sizes
            sizes = np.stack([grid.attention_gpus[rows], grid.ffn_gpus[rows]], axis=1)
            keep = best_per_size(np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1), rate, order)
        self.rows, self.columns = rows[keep], columns[keep]
        name = " and ".join(dict.fromkeys(systems))
        self.choices = Choices("attention-FFN", grid.gpus[self.rows], rate[keep], name)

    def _lacking(self) -> Floats:
        sides = ((self.grid.attention_bytes, self.grid.setup), (self.grid.ffn_bytes, self.grid.ffn_setup))
        return np.asarray(np.maximum(*(held - at.memory_limit for held, at in sides)))


class EncodeSide:
    """An encode pool: instances of one GPU."""

    def __init__(self, step: EncodeStep) -> None:
        self.step = step
        self.choices = Choices("encode", np.array([1]), np.array([step.request_rate]), step.setup.system.name)

    def refusal(self) -> PoolCounts:
        """There is always a choice."""
        raise InputError("an encode pool has a configuration")

    def members(self, counts: Ints) -> Iterator[tuple[EncodeStep, int]]:
        """The one choice."""
        yield self.step, int(counts[0])
