r"""What a GPU spends on a pass and on every operator in it, what designs draw, and what a token costs in joules.

.. math:: E = \sum_o P_o\,t_o + P_0\,\Big(t - \sum_o t_o\Big)

:math:`P_o` is the power of operator o (``physics.power``) while it runs, :math:`P_0` that of a GPU that waits, for its
host, for other pipeline stages or for work. The sum goes over what the slowest GPU of a stage runs; an operator that
hides behind another does not count, and all GPUs of a stage count alike. Where two halves of a pass run at once all
operators of both count, the second term is below 0, and the limit of the GPU is the most. With m micro-batches on p
stages a GPU runs m/p of the layers of a pass.

A deployment at its matched rate X draws what its pools draw, :math:`u` of the time at work and the rest waiting:

.. math:: W = \sum_{pools} n\,G\,\Big(u\,\frac{E}{t} + (1-u)\,P_0\Big), \qquad u = \frac{X}{n\,x}, \qquad J = W/X

with n instances of G GPUs that each reach x requests/s. Hosts, networks, supplies and cooling come on top where a
published model of the system's node says what they draw (``physics.power``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import (
    OperatorKey,
    adjusted,
    carries,
    contributions_in,
    derivative_of,
    shares_of,
    value_of,
)
from disagg_sim.certainty.designs import MODES, Designs, Prompt, times_of
from disagg_sim.certainty.passes import Pass, passes_of
from disagg_sim.certainty.rows import SHIPPED, Origin, design_of, designs_of, numbers
from disagg_sim.errors import InputError
from disagg_sim.facts.hardware import NodePower
from disagg_sim.physics.power import Power, facility_watts, power_at, watts_of
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.costs import DRAWN_WATTS, JOULE, PER_DRAWN_JOULE
from disagg_sim.serving.points import COST_COLUMNS, THROUGHPUT, Column

#: What is left of a pass beside its operators.
WAITING = "waiting"
#: Parts of a pass below this share of it are rounding. [1]
_ROUNDING = 1e-9


def spent_on(one: Pass) -> tuple[Floats, Floats]:
    """Find the time of a kind of pass, or between two starts of it [s], and the energy of a GPU for it [J], (rows,)."""
    times = times_of(one.designs)
    shared = one.designs.shared or one.field == 0
    seconds = np.asarray(times[one.field] if shared else times.busy + times.stall)
    at = one_by_one(one.at)
    route, share = one.routes[0], _share_of_path(one)
    with np.errstate(invalid="ignore"):  # of kernels that take infinitely long, which no pass chooses
        path = np.asarray(route.timed(adjusted(at, carries(watts_of(at))))[route.field])
    busy, joules = value_of(path) * share, derivative_of(path) * share
    power, rest = power_at(at), seconds - busy
    if at is one.at:
        return seconds, joules + power.idle * np.maximum(rest, 0.0)
    # halves of a pass at once: the GPU waits less than it works, and draws no more than it may
    return seconds, np.minimum(joules + power.idle * rest, power.limit * seconds)


def one_by_one(at: Setup) -> Setup:
    """The setup whose passes run no two halves at once, so that every operator counts; itself where none does."""
    engine = at.overheads
    if engine is None or not engine.two_batch_overlap:
        return at
    return replace(at, overheads=replace(engine, two_batch_overlap=False))


def _share_of_path(one: Pass) -> Any:
    """What a GPU runs of the path of one micro-batch through all stages: m/p of it. [1]"""
    designs = one.designs
    if one.phase == "prefill" and one.name != "mixed step":
        if designs.chunk_tokens[0]:
            return 1.0  # the path of all chunks through one stage
        stages = designs.prefill_mapping.pp
        return np.minimum(stages, np.ceil(designs.prefill_batch / designs.prefill_mapping.dp_attn)) / stages
    return np.minimum(designs.mapping.pp, np.maximum(designs.batch, 1.0)) / designs.mapping.pp


def operators_of(one: Pass) -> dict[OperatorKey, tuple[Floats, Floats]]:
    """Find the time [s] and energy [J] of one GPU for every operator of a kind of pass, over all its calls, (rows,)."""
    watts, route = watts_of(one.at), one.routes[0]
    keys = [each.key for each in contributions_in(one.phase, one.at, route.timed)]

    def carried(quantity: Callable[[Operator, Cost], Any]) -> Floats:
        shares = shares_of(keys, one.rows, one.at, route.timed, carries(quantity))[route.field]
        return np.asarray(shares * _share_of_path(one))

    times, joules = carried(lambda *_: 1.0), carried(watts)
    return {key: (times[place], joules[place]) for place, key in enumerate(keys)}


def energy_parts(points: pd.DataFrame | PhaseGrid, *, origin: Origin = SHIPPED) -> pd.DataFrame:
    """Take the energy of the passes of designs, or of the first point of a grid, apart by operator.

    Returns ``row``, ``step`` (the kind of pass), ``operator``, ``kind``, ``seconds``, ``watts`` and ``joules`` of one
    GPU in one pass, ``share`` of the joules of the pass [1]; the operator "waiting" is the rest of the pass; under a
    distribution of lengths a pass is the mean one.
    """
    if isinstance(points, PhaseGrid):
        groups, index = iter([design_of(points, 0, 0)]), pd.Index([0])
    else:
        groups, index = designs_of(points, origin), points.index
    frames = [part for designs in groups for part in _parts(designs, index[designs.rows])]
    parts = pd.concat(frames, ignore_index=True)
    keys = ["row", "step", "operator", "kind"]
    whole = parts.groupby(keys, sort=False, as_index=False)[["seconds", "joules"]].sum()
    whole["watts"] = whole["joules"] / whole["seconds"]
    whole["share"] = whole["joules"] / whole.groupby(["row", "step"], sort=False)["joules"].transform("sum")
    return whole[[*keys, "seconds", "watts", "joules", "share"]]


def _often(designs: Designs, prompt: Prompt) -> Any:
    """Share of a kind of pass in the pass that a prompt is in, or in the mean mixed step. [1]"""
    if designs.mode == "piggyback":
        return prompt.busy / (1.0 - designs.steps.plain)
    return prompt.fill if designs.mode == "colocated" else prompt.busy


def _parts(designs: Designs, labels: pd.Index[Any]) -> Iterator[pd.DataFrame]:
    """Operators of every kind of pass, each as often as its prompts count, and what is left of its time."""
    prompts = iter(designs.prompts)
    for one in passes_of(designs):
        often = 1.0 if one.name == "decode step" else _often(designs, next(prompts))
        seconds, joules = spent_on(one)
        parts = [(name, kind, *spent) for (name, kind, _), spent in operators_of(one).items()]
        rest = seconds - sum(time for *_, time, _ in parts), joules - sum(energy for *_, energy in parts)
        for name, kind, time, energy in [*parts, (WAITING, WAITING, *rest)]:
            columns = {"row": labels, "step": one.name, "operator": name, "kind": kind}
            frame = pd.DataFrame({**columns, "seconds": time * often, "joules": energy * often})
            yield frame[frame["seconds"] > _ROUNDING * seconds * often]


#: What a table has beside ``points.COLUMNS`` where energy was asked for; the last is what ``per: joule`` ranks by.
ENERGY_COLUMNS: tuple[Column, ...] = (
    *COST_COLUMNS["watt"],
    Column(DRAWN_WATTS, "float64", "W", "what all GPUs of the deployment draw at its rate: fitted power of kernels"),
    Column("drawn_watts_p10", "float64", "W", "10 % quantile of it: wider where the power is inherited"),
    Column("drawn_watts_p90", "float64", "W", "90 % quantile of it, at most the TDP"),
    Column("joules_per_request", "float64", "J", "of all GPUs for one request, waiting included"),
    Column("prefill_joules_per_prompt_token", "float64", "J/token", "of the GPUs at work on a pass of prefill"),
    Column("decode_joules_per_output_token", "float64", "J/token", "of the GPUs at work on decode steps"),
    Column("waiting_joules_per_request", "float64", "J", "of GPUs whose pool has nothing to do"),
    Column("transfer_joules_per_request", "float64", "J", "of NICs and switches between the pools; empty = unknown"),
    Column("facility_watts", "float64", "W", "with hosts, network, fans, supplies and PUE; empty = unknown"),
    Column("power_from", "category", "", "whose laws of power were taken: fitted or inherited"),
    Column(PER_DRAWN_JOULE, "float64", "token/J", "output tokens per second over what ALL GPUs draw"),
)
#: Columns that a table has beside ``points.COLUMNS``, by what its throughput is counted over.
COLUMNS_PER: dict[str, tuple[Column, ...]] = {**COST_COLUMNS, JOULE: ENERGY_COLUMNS}
#: What pools are matched over where points are ranked by something that follows from the match.
MATCHED_PER = {JOULE: "watt"}


class GpuEnergy(NamedTuple):
    """What one GPU of an instance spends on a kind of pass, (rows,)."""

    joules: Any  # waiting inside the pass included [J]
    seconds: Any  # of the pass, or between two starts of it [s]


@dataclass(frozen=True, eq=False, kw_only=True)
class Energy:
    """Energy of designs at their matched rate; arrays of shape (rows,)."""

    watts: Floats  # of all GPUs [W]
    least: Floats  # 10 % quantile [W]
    most: Floats  # 90 % quantile [W]
    prefill: Floats  # of the GPUs at work on the prompt of a request [J]
    decode: Floats  # on its output tokens [J]
    waiting: Floats  # of pools that wait, for a request [J]
    transfer: Floats  # of NICs and switches between the pools; NaN = unknown [J]
    facility: Floats  # NaN = unknown [W]


def with_energy(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> pd.DataFrame:
    """Add to a table of points what its deployments draw, and what a request and a token cost in joules.

    Parameters
    ----------
    points : DataFrame
        A table of points or a frontier (``points.COLUMNS``), any modes and cases.
    origin : Origin
        What its rows were made with: systems of one's own, a distribution of lengths.

    Returns
    -------
    DataFrame
        A copy with ``ENERGY_COLUMNS`` at the end [W, J]; their notes say what counts.

    Raises
    ------
    InputError
        A system whose power is not known; errors of ``designs_of``.

    Examples
    --------
    Llama-8B on one H200 draws less than its TDP, and a token of a large batch costs less than one of a small one:

    >>> import disagg_sim as ds
    >>> at, options = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ds.Colocation(batch=(8, 128), prefill_batch=(1,))
    >>> table = with_energy(ds.colocated(at, ds.Sharding(), ds.lengths(1024, 256), options=options))
    >>> joules = table["decode_joules_per_output_token"]
    >>> bool((table["drawn_watts"] < table["tdp_watts"]).all()), bool(joules[1] < joules[0] / 4)
    (True, True)
    """
    values = {column.name: np.full(len(points), np.nan) for column in ENERGY_COLUMNS if column.dtype == "float64"}
    words = np.full(len(points), "fitted", dtype=object)
    tokens = points[THROUGHPUT].to_numpy(dtype=float) * points["total_gpus"].to_numpy(dtype=float)
    for designs in designs_of(points, origin):
        rows, here = designs.rows, points.iloc[designs.rows]
        found, rate = energy_of(designs, numbers(here, "request_rate_per_s")), numbers(here, "request_rate_per_s")
        tdp = sum(gpus * at.system.tdp for at, gpus in _pools(designs))
        lengths = designs.lengths
        own = {
            "tdp_watts": tdp,
            "tokens_per_joule": tokens[rows] / tdp,
            "drawn_watts": found.watts,
            "drawn_watts_p10": found.least,
            "drawn_watts_p90": found.most,
            "joules_per_request": found.watts / rate,
            "prefill_joules_per_prompt_token": found.prefill / lengths.mean_isl,
            "decode_joules_per_output_token": found.decode / lengths.mean_osl,
            "waiting_joules_per_request": found.waiting,
            "transfer_joules_per_request": found.transfer,
            "facility_watts": found.facility,
            "tokens_per_drawn_joule": tokens[rows] / found.watts,
        }
        for name, each in own.items():
            values[name][rows] = each
        if any(power_at(at).spec.inherited for at, _ in _pools(designs)):
            words[rows] = "inherited"
    columns: dict[str, Any] = {**values, "power_from": pd.Categorical(words, categories=["fitted", "inherited"])}
    kept = points.drop(columns=[column.name for column in ENERGY_COLUMNS if column.name in points])
    return kept.assign(**{column.name: columns[column.name] for column in ENERGY_COLUMNS})


def _pools(designs: Designs) -> list[tuple[Setup, Floats]]:
    """Setup and GPUs of every pool, prefill first."""
    decode = designs.instances * designs.mapping.gpus
    if designs.shared:
        return [(designs.at, decode)]
    return [(designs.prefill_at, designs.prefill_instances * designs.prefill_mapping.gpus), (designs.at, decode)]


def energy_of(designs: Designs, rate: Floats) -> Energy:
    """Compute what designs of a deployment draw at the ``rate`` of their rows [request/s]."""
    if designs.mode not in MODES:
        raise InputError(f"energy of a request needs designs of both phases, not of {designs.mode} alone")
    steps, passes = step_and_pass(designs)
    gaps, batch = designs.lengths.gaps, designs.batch
    if designs.mode == "disaggregated":
        prefill = designs.prefill_mapping.gpus * passes.joules / designs.prefill_batch
        decode = designs.mapping.gpus * steps.joules * gaps / batch
        work = (prefill, decode)
        full = (designs.prefill_batch / passes.seconds, designs.lengths.request_rate(batch, steps.seconds))
        counts = (designs.prefill_instances, designs.instances)
        watts = []
        for (at, gpus), joules, most, count in zip(_pools(designs), work, full, counts, strict=True):
            busy = np.minimum(rate / (count * most), 1.0)
            watts.append(rate * joules + (1.0 - busy) * gpus * power_at(at).idle)
    else:  # instances that do both never wait at their own rate
        gpus = designs.mapping.gpus
        decode = gpus * steps.joules * gaps / batch
        if designs.mode == "colocated":
            prefill = gpus * passes.joules
        else:  # a mixed step is a step of decode, and what it takes more is prefill
            prefill = gpus * (passes.joules - (1.0 - designs.steps.plain) * steps.joules) * gaps / batch
        watts = [rate * (prefill + decode)]
    whole = np.asarray(sum(watts))
    ends = [_ends(power_at(at), gpus, each) for (at, gpus), each in zip(_pools(designs), watts, strict=True)]
    pools = [(at.system.node_power, gpus, each) for (at, gpus), each in zip(_pools(designs), watts, strict=True)]
    return Energy(
        watts=whole,
        least=np.asarray(sum(low for low, _ in ends)),
        most=np.asarray(sum(high for _, high in ends)),
        prefill=prefill + 0.0 * whole,
        decode=decode + 0.0 * whole,
        waiting=whole / rate - prefill - decode,
        transfer=_transfer(pools, rate) if len(pools) > 1 else 0.0 * whole,
        facility=np.asarray(sum(_facility(pool, designs.total_gpus) for pool in pools)),
    )


def _ends(power: Power, gpus: Floats, watts: Floats) -> tuple[Any, Any]:
    """Ends of the 80 % band of what GPUs draw. [W]"""
    above = watts - gpus * power.idle
    return gpus * power.idle + above / power.factor, np.minimum(
        watts + above * (power.factor - 1.0), gpus * power.limit
    )


def _facility(pool: tuple[NodePower | None, Floats, Floats], deployment: Floats) -> Any:
    """Watts of a pool with hosts, network, supplies and cooling; NaN where nothing is known of its node. [W]"""
    node, gpus, watts = pool
    if node is None:
        return watts * np.nan
    return gpus * facility_watts(node, watts / gpus, across=deployment > node.gpus)


def _transfer(pools: list[tuple[NodePower | None, Floats, Floats]], rate: Floats) -> Any:
    """Joules of a request in NICs and switches that a deployment inside one node would not use; NaN = unknown. [J]"""
    total = sum(gpus for _, gpus, _ in pools)
    found: Any = 0.0
    for node, gpus, _ in pools:
        more = np.nan if node is None else np.where(total > node.gpus, node.links / node.gpus, 0.0)
        found = found + gpus * more / rate
    return found


def step_and_pass(designs: Designs) -> tuple[GpuEnergy, GpuEnergy]:
    """Find what one GPU spends on a decode step, and on the mean pass of prefill or the mean mixed step.

    Of co-located passes it is what one prompt costs; of mixed steps their part of the mean step. Returns a step and a
    pass, (rows,); zeros of a phase that the designs do not do [J], [s].
    """
    step, found = GpuEnergy(0.0, 0.0), GpuEnergy(0.0, 0.0)
    prompts = iter(designs.prompts)
    for one in passes_of(designs):
        seconds, joules = spent_on(one)
        if one.name == "decode step":
            step = GpuEnergy(joules, seconds)
            continue
        often = next(prompts).busy
        found = GpuEnergy(found.joules + often * joules, found.seconds + often * seconds)
    return step, found
