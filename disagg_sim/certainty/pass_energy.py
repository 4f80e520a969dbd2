r"""Energy of one GPU in a pass of a design, and of every operator in it.

.. math:: E = \sum_o P_o\,t_o + P_0\,\Big(t - \sum_o t_o\Big)

:math:`P_o` is the power of operator o (``physics.power``) while it runs, :math:`P_0` that of a GPU that waits, for its
host, for other pipeline stages or for work. The sum goes over what the slowest GPU of a stage runs; an operator that
hides behind another does not count, and all GPUs of a stage count alike. Where two halves of a pass run at once all
operators of both count, the second term is below 0, and the limit of the GPU is the most. With m micro-batches on p
stages a GPU runs m/p of the layers of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.contributions import STEP, OperatorKey, adjusted, contributions_in, shares_of
from disagg_sim.certainty.designs import Designs, Prompt, times_of
from disagg_sim.certainty.grid_points import design_of
from disagg_sim.certainty.passes import Pass, passes_of
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of
from disagg_sim.physics.power import power_at, watts_of
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator
from disagg_sim.search.phase_grid import PhaseGrid

#: What is left of a pass beside its operators.
WAITING = "waiting"
#: Parts of a pass below this share of it are rounding. [1]
_ROUNDING = 1e-9


def spent_on(one: Pass) -> tuple[Floats, Floats]:
    """Find the time and the energy of one GPU for a kind of pass.

    Returns time of the pass, or between two starts of it where an instance does nothing else [s], and energy [J],
    (rows,).
    """
    times = times_of(one.designs)
    shared = one.designs.shared or one.field == 0
    seconds = np.asarray(times[one.field] if shared else times.busy)
    at = one_by_one(one.at)
    busy, joules = _of_operators(one, at)
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


def _of_operators(one: Pass, at: Setup) -> tuple[Floats, Floats]:
    """Time and energy of the operators of one GPU in a pass under a setup, (rows,). [s], [J]"""
    watts = watts_of(at)

    def drawn(op: Operator, cost: Cost) -> Cost:
        return replace(cost, time=cost.time * (1.0 + STEP * 1j * watts(op, cost)))

    route = one.routes[0]
    with np.errstate(invalid="ignore"):  # of kernels that take infinitely long, which no pass chooses
        path = np.asarray(route.timed(adjusted(at, drawn))[route.field])
    share = _share_of_path(one)
    return np.real(path) * share, np.imag(path) / STEP * share


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
    """Find the time and the energy of every operator of one GPU in a kind of pass.

    Returns key of an operator -> time over all its calls [s], energy [J]; both (rows,).
    """
    watts, route = watts_of(one.at), one.routes[0]
    keys = [each.key for each in contributions_in(one.phase, one.at, route.timed)]

    def carried(quantity: Callable[[Operator, Cost], Any]) -> Floats:
        def marked(op: Operator, cost: Cost) -> Cost:
            return replace(cost, time=cost.time * (1.0 + STEP * 1j * quantity(op, cost)))

        shares = shares_of(keys, one.rows, one.at, route.timed, marked)[route.field]
        return np.asarray(shares * _share_of_path(one))

    times, joules = carried(lambda *_: 1.0), carried(watts)
    return {key: (times[place], joules[place]) for place, key in enumerate(keys)}


def energy_parts(
    points: pd.DataFrame | PhaseGrid, *, at: tuple[int, int] = (0, 0), origin: Origin = SHIPPED
) -> pd.DataFrame:
    """Take the energy of the passes of designs apart by operator.

    Returns ``row``, ``step`` (the kind of pass), ``operator``, ``kind``, ``seconds``, ``watts`` and ``joules`` of one
    GPU in one pass, ``share`` of the joules of the pass [1]; the operator "waiting" is the rest of the pass; under a
    distribution of lengths a pass is the mean one.
    """
    if isinstance(points, PhaseGrid):
        groups, index = iter([design_of(points, *at)]), pd.Index([0])
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
        found: dict[tuple[str, str], tuple[Any, Any]] = {}
        for (name, kind, _), (time, energy) in operators_of(one).items():
            before = found.get((name, kind), (0.0, 0.0))
            found[name, kind] = (before[0] + time, before[1] + energy)
        rest = (seconds - sum(time for time, _ in found.values()), joules - sum(each for _, each in found.values()))
        found[WAITING, WAITING] = rest
        for (name, kind), (time, energy) in found.items():
            columns = {"row": labels, "step": one.name, "operator": name, "kind": kind}
            frame = pd.DataFrame({**columns, "seconds": time * often, "joules": energy * often})
            yield frame[frame["seconds"] > _ROUNDING * seconds * often]
