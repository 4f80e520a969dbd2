r"""Energy of a simulated run: what its instances draw while they work, and while they wait.

.. math:: E = G\,\big(N\,e_p + \max(b - N\,t_p, 0)\,P_d + (h - b)\,P_0\big)

of an instance of G GPUs that was held for h and in steps for b, and that computed N prompts: a pass of one takes
:math:`t_p` and :math:`e_p` joules of a GPU, and the rest of its steps decode, at the power :math:`P_d` of steps with
the mean number of sequences that it had. An instance of a prefill pool is in passes all of its busy time. A GPU that
waits, starts or drains draws :math:`P_0`. GPUs of an encode pool draw what the kernels of the tower do while they
encode; of an instance over attention and feed-forward GPUs each draws what its half and the crossings do. Lengths are
the means of the trace. Source: ``certainty.energy``, ``certainty.pool_parts``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from disagg_sim.certainty.energy import step_and_pass
from disagg_sim.certainty.pool_parts import encode_spent, split_spent
from disagg_sim.certainty.rows import design_of
from disagg_sim.errors import InputError
from disagg_sim.physics.power import power_at
from disagg_sim.physics.setup import Setup
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.instance_variants import bare
from disagg_sim.simulation.records import EncodeUse, Instances
from disagg_sim.simulation.simulate import SimulationResult
from disagg_sim.simulation.wishes import Role
from disagg_sim.techniques.split.physics import Split
from disagg_sim.workload.lengths import Lengths, lengths
from disagg_sim.workload.stream import in_memory

#: Parts of a deployment that instances of a role come from, the first that it has.
_PARTS = {
    Role.PREFILL: ("prefill", "colocated"),
    Role.DECODE: ("decode", "colocated"),
    Role.BOTH: ("colocated", "pairs", "decode"),
}


def run_energy(result: SimulationResult) -> pd.DataFrame:
    """Compute what the instances of a simulated run drew.

    Parameters
    ----------
    result : SimulationResult
        Of ``ds.simulate``; one model, and one layout a role.

    Returns
    -------
    DataFrame
        A row an instance, and one of the GPUs of an encode pool: ``role``, ``gpus`` [1], ``held_s``, ``busy_s``,
        ``joules`` of all of its GPUs, of them ``waiting_joules`` [J], ``watts`` while held [W].

    Raises
    ------
    InputError
        Several models, or several layouts of one role; a system whose power is not known.

    Examples
    --------
    One request at a time on one GPU, which waits between them:

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h200_sxm", "fp8")
    >>> one = (ds.Replicas(mapping=ds.Sharding(), instances=1),)
    >>> alone = ds.ServedDeployment(name="one", gpus=1, colocated=one, setup=at)
    >>> found = run_energy(ds.simulate(alone, ds.synthetic_trace(rate=0.1, lengths=(1024, 128), requests=20), "vllm"))
    >>> bool(134 < found["watts"][0] < 200)
    True
    """
    if result.records.models is not None:
        raise several_models(result.deployment)
    records, law = result.records, lengths(in_memory(result.trace))
    return instances_energy(records.instances, result.deployment, result.setup, law, records.encode)


def several_models(deployment: ServedDeployment) -> InputError:
    """Make the error for a deployment of several models.

    >>> from types import SimpleNamespace
    >>> print(several_models(SimpleNamespace(name="two")))
    deployment 'two' serves several models; energy is told of one
    """
    return InputError(f"deployment {deployment.name!r} serves several models; energy is told of one")


def instances_energy(
    held: Instances, deployment: ServedDeployment, setup: Setup, law: Lengths, encode: EncodeUse | None = None
) -> pd.DataFrame:
    """Compute what instances drew over a run.

    Returns the columns of ``run_energy``.
    """
    rows, known = [], {}
    for place in range(held.role.size):
        role, gpus = Role(int(held.role[place])), int(held.gpus[place])
        replicas = _replicas(deployment, role, gpus)
        at = replicas.setup or setup
        span, busy = float(held.stop_s[place] - held.start_s[place]), float(held.busy_s[place])
        steps, tokens = float(held.decode_steps[place]), float(held.decode_tokens[place])
        emitted = at.accepted_length(replicas.mapping.draft_tokens)
        sequences = max(1, round(float(tokens / steps / emitted))) if steps else 1
        prompts = (replicas.batch or 1) if role == Role.PREFILL else 1
        key = (id(replicas), prompts, sequences)
        if key not in known:
            split = replicas.ffn is not None
            known[key] = (
                _spent_split(at, replicas, law, sequences) if split else _spent(at, replicas, law, prompts, sequences)
            )
        filled, decoded = known[key]
        passes = float(held.prefill_tokens[place]) / law.mean_new / prompts
        in_passes = busy if role == Role.PREFILL and not steps else min(passes * filled[1], busy)
        work = in_passes * filled[0] / filled[1] + (busy - in_passes) * decoded[0] / decoded[1]
        waiting = sum(count * power_at(one).idle for one, count in _sides(at, replicas)) * max(span - busy, 0.0)
        rows.append((role.name.lower(), gpus, span, busy, gpus * work + waiting, waiting))
    if encode is not None and deployment.encode is not None:
        step = deployment.encode.step  # GPUs draw what the tower draws while they encode, and wait else
        spent, waiting = encode_spent(step), power_at(step.setup).idle * (encode.gpu_s - encode.busy_s)
        work = encode.busy_s * spent.joules / spent.seconds
        rows.append(("encode", encode.gpus, encode.held_s, encode.busy_s / encode.gpus, work + waiting, waiting))
    table = pd.DataFrame(rows, columns=["role", "gpus", "held_s", "busy_s", "joules", "waiting_joules"])
    return table.assign(watts=table["joules"] / table["held_s"])


def _replicas(deployment: ServedDeployment, role: Role, gpus: int) -> Replicas:
    """The entry of the deployment that an instance comes from."""
    name = deployment.name
    for part in _PARTS[role]:
        found = {each.mapping: each for each in deployment.part(part) if int(each.mapping.gpus) == gpus}
        if len(found) > 1:
            raise InputError(f"deployment {name!r}: {part} has several layouts of {gpus} GPUs; energy is told of one")
        if found:
            return next(iter(found.values()))
    raise InputError(f"deployment {name!r} has no {role.name.lower()} instances of {gpus} GPUs")


def _spent(
    at: Setup, replicas: Replicas, law: Lengths, prompts: int, sequences: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Energy and time of one GPU for a pass of prefill, and for a decode step. [J], [s]"""
    mapping, drafter = replace(bare(replicas.mapping), chunk_tokens=0), at.speculation
    if drafter is not None:
        at = replace(at, speculation=drafter.trying((int(mapping.draft_tokens),)))
    grids = (
        prefill_grid(at, mapping, law, batch=[prompts], allow_long_context=True),
        decode_grid(at, mapping, law, batch=[sequences], allow_long_context=True),
    )
    found = [step_and_pass(design_of(grid, 0, 0))[1 - place] for place, grid in enumerate(grids)]
    filled, decoded = ((float(np.squeeze(each.joules)), float(np.squeeze(each.seconds))) for each in found)
    return filled, decoded


def _sides(at: Setup, replicas: Replicas) -> list[tuple[Setup, int]]:
    """Setups of the GPUs of an instance, and how many there are: those with caches, those of a feed-forward pool."""
    ffn = replicas.ffn
    own = [(at, int(bare(replicas.mapping).gpus))]
    return own if ffn is None else [*own, (ffn.setup or at, int(ffn.mapping.gpus))]


def _spent_split(
    at: Setup, replicas: Replicas, law: Lengths, sequences: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The same of an instance over attention and feed-forward GPUs, which does no prefill: of its mean GPU."""
    (_, first), (theirs, second) = _sides(at, replicas)
    ffn, mapping = replicas.ffn, bare(replicas.mapping)
    assert ffn is not None
    each = sequences / (int(mapping.dp_attn) * ffn.microbatches)
    found = split_spent(at, theirs, Split(mapping, ffn.mapping, ffn.microbatches), law, each)
    joules = (first * float(found[0].joules) + second * float(found[1].joules)) / (first + second)
    return (0.0, 1.0), (joules, float(found[0].seconds))
