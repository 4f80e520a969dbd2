r"""Say what the GPUs of a plan draw at its rate, which is below what its pools could do.

.. math:: W = \sum_{pools} n\,G\,P_0 + n\,G\,(1 - e^{-m})\,(P_d - P_0)\,(1 - f) + X\,(J_p - t_p\,G\,P_0)

An instance of n, of G GPUs each, holds m sequences on average; :math:`P_d` is the power of a GPU in decode steps of so
many, and at least one is there in :math:`1 - e^{-m}` of the time. A prompt costs :math:`J_p` joules in a pass that
takes :math:`t_p` of an instance's time, f of the time at the rate X. :math:`P_0` is the power of a GPU that waits, as
spare ones do. The halves of a split decode instance and encoders: ``certainty.pool_parts``.
Source: ``certainty.energy``. The price of a million tokens, in, cached and out, goes by what works on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.certainty.designs import Designs, times_of
from disagg_sim.certainty.energy import step_and_pass
from disagg_sim.certainty.pool_parts import encode_spent, split_spent
from disagg_sim.certainty.rows import designs_at_points
from disagg_sim.certainty.token_prices import TokenPrices, check_utilisation, token_prices
from disagg_sim.domain import Sharding
from disagg_sim.physics.power import facility_watts, power_at
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.simulation.instance_variants import FfnPool, ffn_of, split_of
from disagg_sim.techniques.encode.plan import EncodeChoice
from disagg_sim.workload.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a design draws at its rate."""

    watts: float  # of all GPUs [W]
    band: tuple[float, float]  # 80 % of the cases lie between [W]
    facility: float  # with hosts, network, fans, supplies and PUE; NaN = not known [W]
    inherited: bool  # whether the power of any kernel was measured on another system


def drawn(design: Design) -> Drawn:
    """Compute what the GPUs of a design draw at its rate."""
    lengths = design.work.lengths
    parts = [(pool.parts, watts_of_parts(pool, lengths)) for pool in design.pools]
    return added_up((*part, own) for each, watts in parts for part, own in zip(each, watts, strict=True))


def added_up(pools: Iterable[tuple[Setup, int, float]]) -> Drawn:
    """Add up what the pools of one deployment draw. [W]"""
    given = list(pools)
    total = sum(gpus for _, gpus, _ in given)
    watts, facility, inherited, least, most = 0.0, 0.0, False, 0.0, 0.0
    for at, gpus, own in given:
        power, node = power_at(at), at.system.node_power
        above = own - gpus * power.idle
        watts += own
        least += own - above * (1.0 - 1.0 / power.factor)
        most += min(own + above * (power.factor - 1.0), gpus * power.limit)
        inherited |= power.spec.inherited
        if node is None:
            facility = math.nan
        else:
            facility += gpus * float(facility_watts(node, own / gpus, across=total > node.gpus))
    return Drawn(watts=watts, band=(least, most), facility=facility, inherited=inherited)


def watts_of_parts(pool: PlannedPool, lengths: Lengths) -> list[float]:
    """Compute what the GPUs of a pool draw, those of each of its ``parts``. [W]"""
    if isinstance(pool.choice, EncodeChoice):
        spent, idle = encode_spent(pool.choice.step), power_at(pool.setup).idle  # at work only while it encodes
        work = pool.rate * (1.0 - pool.choice.step.cached) * (float(spent.joules) - idle * float(spent.seconds))
        return [pool.gpus * idle + work]
    ffn = ffn_of(pool.mapping)
    return [float(_whole_watts([pool], lengths)[0])] if ffn is None else _split_watts(pool, ffn, lengths)


def _split_watts(pool: PlannedPool, ffn: FfnPool, lengths: Lengths) -> list[float]:
    """Attention and feed-forward ranks draw what those of a step do while at least one sequence is there. [W]"""
    split, sequences = split_of(pool.mapping, ffn), pool.sequences
    each = max(1.0, sequences) / (int(pool.mapping.dp_attn) * ffn.microbatches)
    spent = split_spent(pool.setup, ffn.setup or pool.setup, split, lengths, each)
    busy = -math.expm1(-sequences) * pool.instances / (pool.instances + pool.spares)
    watts = []
    for (at, gpus), one in zip(pool.parts, spent, strict=True):
        idle = power_at(at).idle
        watts.append(gpus * (idle + busy * (float(one.joules / one.seconds) - idle)))
    return watts


def watts_of_pools(pools: Sequence[PlannedPool], lengths: Lengths) -> Floats:
    """Compute what the GPUs of pools draw, of one role and setup, which stand beside each other in no deployment.

    The result is of shape (pools,) [W].
    """
    whole = np.array([pool.role != "encode" and ffn_of(pool.mapping) is None for pool in pools])
    watts = np.zeros(len(pools))
    if whole.any():
        watts[whole] = _whole_watts([pools[place] for place in np.flatnonzero(whole).tolist()], lengths)
    for place in np.flatnonzero(~whole).tolist():
        watts[place] = math.fsum(watts_of_parts(pools[place], lengths))
    return watts


def _whole_watts(pools: Sequence[PlannedPool], lengths: Lengths) -> Floats:
    """The same of pools without feed-forward ranks of their own."""
    first = pools[0]
    idle = power_at(first.setup).idle
    numbers = [(pool.gpus, int(pool.mapping.gpus), pool.instances, pool.rate) for pool in pools]
    gpus, each, instances, rate = np.array(numbers, dtype=np.float64).T
    watts, left = gpus * idle, np.ones(len(pools))
    if first.role != "decode":
        for designs in _passes(pools, lengths):
            some, prompts = designs.rows, designs.prefill_batch
            joules, seconds = step_and_pass(designs)[1]
            watts[some] += rate[some] * each[some] / prompts * (joules - idle * seconds)
            left[some] = np.maximum(1.0 - rate[some] * seconds / prompts / instances[some], 0.0)
    if first.role != "prefill":
        held = -np.expm1(-np.array([pool.sequences for pool in pools]))
        for designs in _steps(pools, lengths):
            some = designs.rows
            joules, seconds = step_and_pass(designs)[0]
            watts[some] += (instances * each * held * left)[some] * (joules / seconds - idle)
    return np.asarray(watts)


def _passes(pools: Sequence[PlannedPool], lengths: Lengths) -> Iterator[Designs]:
    """Passes of prefill: as large as a prefill pool takes them, beside decodes of one prompt a rank."""
    plain = [replace(pool.mapping, chunk_tokens=0) for pool in pools]
    alone = pools[0].role == "prefill"
    own = [pool.mapping for pool in pools]
    batch = np.array([pool.batch if alone else int(pool.mapping.dp_attn) for pool in pools])
    grid = prefill_grid(
        pools[0].setup,
        Sharding.stack(list(dict.fromkeys(plain))),
        lengths,
        batch=np.unique(batch),
        chunk_tokens=sorted({int(each.chunk_tokens) for each in own}),
    )
    place = {each: row for row, each in enumerate(grid.mappings)}
    rows = [place.get(each, place[whole]) for each, whole in zip(own, plain, strict=True)]
    yield from designs_at_points(grid, np.array(rows), np.searchsorted(grid.batch, batch))


def _steps(pools: Sequence[PlannedPool], lengths: Lengths) -> Iterator[Designs]:
    """Decode steps with as many sequences as there are on average, of one at least."""
    plain = [replace(pool.mapping, chunk_tokens=0) for pool in pools]
    batch = np.array([max(1, round(pool.sequences)) for pool in pools])
    distinct = {each: row for row, each in enumerate(dict.fromkeys(plain))}
    grid = decode_grid(pools[0].setup, Sharding.stack(list(distinct)), lengths, batch=np.unique(batch))
    rows = np.array([distinct[each] for each in plain])
    yield from designs_at_points(grid, rows, np.searchsorted(grid.batch, batch))


def planned_prices(design: Design, prices: Mapping[str, float], utilisation: float) -> TokenPrices:
    """Compute what a million tokens of a design cost at its rate.

    Prompts pay for the pools before decode. The price of a co-located pool is split by the time that an instance spends
    on the prompt of a request alone, and on its output tokens. Takes ``prices`` (price of a GPU by system, in place of
    the middle of its market range [USD/h]). Returns numbers [USD].
    """
    check_utilisation(utilisation)
    lengths, first, last = design.work.lengths, design.first, design.pools[-1]
    hour = [sum(gpus * usd_per_gpu_hour(at.system, prices) for at, gpus in pool.parts) for pool in design.pools]
    (fill,) = _passes([first], lengths)
    if len(hour) == 1:
        (step,) = _steps([last], lengths)
        prompt = float(times_of(fill, step=False).busy[0] / fill.prefill_batch[0])
        tokens = float(times_of(step, fill=False).step[0]) * lengths.gaps / float(step.batch[0])
        hour = [hour[0] * part / (prompt + tokens) for part in (prompt, tokens)]
    found = token_prices(fill, *(np.array([each]) for each in (sum(hour[:-1]), hour[-1], design.rate)))
    return TokenPrices(*(np.squeeze(np.asarray(each)) / utilisation for each in found))
