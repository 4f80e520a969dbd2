"""Serve several models in one cluster: each has instances, a policy and requests of its own, on one clock.

What models share: the clock, the GPUs that autoscalers may take, and the nodes that fail. An instance's links are its
own, so that transfers of one model do not slow those of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.errors import InputError, UnknownNameError, nearest, quoted
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace


class ModelShare(NamedTuple):
    """One model of a cluster, and what of a trace asks for it."""

    model: str  # its name
    rows: NDArray[np.intp]  # of the trace, ascending; none = all of them
    trace: Trace | TraceStream  # of these rows
    deployment: ServedDeployment  # instances that serve it
    setup: Setup  # of the first of those that a policy takes


def shares_of(
    trace: Trace | TraceStream, deployment: ServedDeployment, parts: Sequence[str], at: Setup | None = None
) -> tuple[ModelShare, ...]:
    """Share requests and instances of a cluster out among its models.

    The result is in the order in which the deployment names them.

    >>> import disagg_sim as ds
    >>> from disagg_sim.workload.request_columns import Labels
    >>> small, large = (ds.setup(name, "h100_sxm", "fp8") for name in ("llama_3_1_8b", "llama_3_1_70b"))
    >>> cut = {"llama_3_1_8b": (small, ds.Sharding()), "llama_3_1_70b": (large, ds.Sharding(tp_attn=2, tp_ffn=2))}
    >>> each = tuple(ds.Replicas(mapping=mapping, instances=1, setup=at) for at, mapping in cut.values())
    >>> asked = Labels(names=tuple(cut), number=[0, 1, 0])
    >>> trace = ds.Trace(arrival=[0.0, 1.0, 2.0], input_tokens=[10] * 3, output_tokens=[5] * 3, models=asked)
    >>> shares = shares_of(trace, ServedDeployment(name="pool", gpus=3, colocated=each), ("colocated",))
    >>> [(share.model, share.rows.tolist(), share.deployment.gpus) for share in shares]
    [('llama_3_1_8b', [0, 2], 1), ('llama_3_1_70b', [1], 2)]
    """
    home = deployment.first_setup(tuple(parts)) or deployment.setup or at
    if home is None:
        raise InputError(
            f"deployment {deployment.name!r} does not say what it serves: give it "
            f"setup=ds.setup(model, system, precision)"
        )
    models = deployment.models or (home.model.name,)
    if isinstance(trace, Trace):
        _require_served(trace, deployment, models)
    if len(models) < 2:
        return (ModelShare(models[0], np.zeros(0, np.intp), trace, deployment, home),)
    if isinstance(trace, TraceStream) or trace.models is None:
        raise InputError(
            f"trace {trace.name} does not say which model its requests ask for, and deployment {deployment.name!r} "
            f"serves {', '.join(models)}; allowed: a column 'model', or 'models' with their shares (with_models)"
        )
    asked = np.array(trace.models.names)[trace.models.number]
    return tuple(_share(model, trace, deployment, np.flatnonzero(asked == model), tuple(parts)) for model in models)


def _share(
    model: str, trace: Trace, deployment: ServedDeployment, rows: NDArray[np.intp], parts: tuple[str, ...]
) -> ModelShare:
    if not rows.size:
        raise InputError(
            f"trace {trace.name} never asks for {model}, which deployment {deployment.name!r} serves; allowed: one "
            f"request or more of each model"
        )
    own = deployment.of_model(model)
    at = own.first_setup(parts) or own.setup
    if at is None:
        raise InputError(f"deployment {deployment.name!r} has no {' and no '.join(parts)} instances of {model}")
    return ModelShare(model, rows, trace.take(rows), own, at)


def _require_served(trace: Trace, deployment: ServedDeployment, models: tuple[str, ...]) -> None:
    """Raise where a request asks for what nothing serves, or a session for several models."""
    if trace.models is None:
        return
    for number in np.unique(trace.models.number).tolist():
        name = trace.models.names[number]
        if name not in models:
            raise UnknownNameError(
                f"trace {trace.name} asks for model {quoted(name)}{nearest(name, models)}; deployment "
                f"{deployment.name!r} serves {', '.join(models)}"
            )
    if trace.sessions is not None and np.any(trace.models.number != trace.models.number[trace.sessions.first()]):
        raise InputError(f"trace {trace.name} has a session that asks for several models; allowed: one a session")
