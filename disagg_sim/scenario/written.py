"""Write a simulation as a scenario: a YAML file and a trace that ``disagg-sim simulate`` runs to the same records.

What is written is read back and compared, so that a file that says something else is never left unnoticed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from disagg_sim.atomic import write_text
from disagg_sim.domain import Slo
from disagg_sim.errors import InputError
from disagg_sim.facts.schema import PLAIN_NAME
from disagg_sim.physics.setup import Setup
from disagg_sim.scenario.deployments import ENCODES, NO_SPECULATION, PART_LIMITS, SERVES
from disagg_sim.scenario.failures import written_failures
from disagg_sim.scenario.spec import Scenario, load_scenario
from disagg_sim.simulation.admission import ADMISSIONS, AdmissionKind
from disagg_sim.simulation.classes import CLASS, MODEL, ServiceClass
from disagg_sim.simulation.deployment import PARTS, Replicas, ServedDeployment
from disagg_sim.simulation.encoders import Encoders
from disagg_sim.simulation.instance_variants import FfnPool, bare
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.options import options_of
from disagg_sim.simulation.policies.registry import policies
from disagg_sim.simulation.policy import Policy
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.simulate import SimulationResult
from disagg_sim.workload.stream import in_memory
from disagg_sim.workload.trace import Trace

#: Where the classes of the shipped policies stand; others come from files of the user.
SHIPPED = "disagg_sim."


def write_scenario(result: SimulationResult, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a simulation as a scenario, with its trace as a CSV file in the same directory.

    ``disagg-sim simulate PATH --out DIR`` gives the same records, but for the last bit of an arrival where the first
    is not at 0. The trace is written at the rate at which it was simulated. Other policies, rates and deployments
    can be added to the file by hand.

    Parameters
    ----------
    result : SimulationResult
        Of ``simulate``: deployment with its batches, trace, SLO, policy, options and seed are taken from it.
    path : str or Path
        Of the YAML file, such as ``plan.yaml``; the trace becomes ``plan.csv``.
    overwrite : bool
        Whether files that are there already may be replaced.

    Returns
    -------
    Path
        Of the YAML file.

    Raises
    ------
    InputError
        What a scenario cannot say: a policy that is not shipped, a network of one's own, block ids of a trace, a
        model that differs from the spec of its name; or files that are there.
    StoreError
        The directory cannot be written.
    """
    path = Path(path)
    trace_path = path.with_suffix(".csv")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: a scenario is a YAML file; allowed: .yaml, .yml")
    for each in (path, trace_path):
        if each.exists() and not overwrite:
            raise InputError(f"{each} is there already; give another path, or overwrite=True")
    document = _document(result, path.stem, trace_path.name)
    write_text(trace_path, _table(in_memory(result.trace)))
    write_text(path, _heading(result, path) + _dump(document))
    _compare(load_scenario(str(path)), result, path)
    return path


def _document(result: SimulationResult, name: str, trace: str) -> dict[str, Any]:
    what, source = result.setup, in_memory(result.trace)
    if source.prefix is not None:
        raise InputError(f"trace {source.name} has block ids, which a CSV file cannot hold; name its own file by hand")
    start = float(source.arrival[0])
    return {
        "name": name,
        **{key: value for key, value in _serves(what).items() if value},
        "trace": {
            "path": trace,
            "name": source.name if PLAIN_NAME.fullmatch(source.name) else "trace",
            **({"start_s": start} if start else {}),
        },
        "slo": {**_limits(result.slo), **_classes(result.options.classes)},
        "deployments": {result.deployment.name: _deployment(result.deployment, _serves(what))},
        "policies": [_policy(result.policy)],
        "seed": result.records.seed,
        "run": _run(result.options),
        **_admission(result.options.admission),
    }


def _serves(at: Setup) -> dict[str, str]:
    """Names of what instances serve, and on what, by ``SERVES``."""
    drafter = "" if at.speculation is None else at.speculation.name
    names = (at.model.name, at.system.name, at.precision.name, at.profile.name, at.engine, drafter)
    return dict(zip(SERVES, names, strict=True))


def _deployment(deployment: ServedDeployment, usual: dict[str, str]) -> dict[str, Any]:
    """Its GPUs and parts; instances say what they serve where that is not the usual."""

    def group(each: Replicas) -> dict[str, Any]:
        own = _serves(each.setup) if each.setup is not None else usual
        said = {key: name for key, name in own.items() if name != usual[key]}
        if said.get("speculation") == "":
            said["speculation"] = NO_SPECULATION
        return {**said, **_replicas(each), **({} if each.ffn is None else {"ffn": _ffn(each.ffn, own)})}

    parts = {part: [group(each) for each in getattr(deployment, part)] for part in PARTS}
    encode = {} if deployment.encode is None else {"encode": _encode(deployment.encode, usual)}
    return {"gpus": deployment.gpus, **encode, **{part: entries for part, entries in parts.items() if entries}}


def _ffn(pool: FfnPool, own: dict[str, str]) -> dict[str, Any]:
    """GPUs of a feed-forward part, its groups, and its system where that is not the one of attention."""
    mapping = pool.mapping
    groups = {"tp": mapping.tp_attn} if mapping.tp_attn > 1 else {}
    theirs = own if pool.setup is None else _serves(pool.setup)
    said = {key: theirs[key] for key in ENCODES if theirs[key] != own[key]}
    return {"gpus": int(mapping.gpus), **groups, "microbatches": pool.microbatches, **said}


def _encode(pool: Encoders, usual: dict[str, str]) -> dict[str, Any]:
    """The encode pool with its images, and its system where that is not the usual one."""
    step, own = pool.step, _serves(pool.step.setup)
    said = {key: own[key] for key in ENCODES if own[key] != usual[key]}
    images = {"images": step.images, "height": step.height, "width": step.width}
    return {"instances": pool.instances, **images, **({"cached": step.cached} if step.cached else {}), **said}


def _replicas(replicas: Replicas) -> dict[str, int]:
    """Degrees above 1, slots and limits that are given."""
    mapping = replicas.mapping
    ep = mapping.ep if replicas.ffn is None else 1
    degrees = {"tp": mapping.tp_attn, "dp": mapping.dp_attn, "ep": ep, "pp": mapping.pp}
    degrees |= {"dcp": mapping.dcp, "pcp": mapping.pcp}
    limits = dict(zip(PART_LIMITS, (*replicas.limits, mapping.chunk_tokens), strict=True))
    return {
        **{key: degree for key, degree in degrees.items() if degree > 1},
        **({"redundant_slots": mapping.redundant_slots} if mapping.redundant_slots else {}),
        **({"draft_tokens": int(mapping.draft_tokens)} if mapping.draft_tokens else {}),
        "instances": replicas.instances,
        **{key: limit for key, limit in limits.items() if limit},
    }


def _policy(policy: Policy) -> Any:
    """Its name, with the options that are not the default."""
    name = next((name for name, kind in policies().items() if kind is type(policy)), None)
    if name is None or not type(policy).__module__.startswith(SHIPPED):
        raise InputError(
            f"policy {name or type(policy).__name__!r} is not shipped, and a scenario finds it by its file alone; "
            "write the scenario of a shipped one and add its file under policy_file:"
        )
    options = _changed(policy)
    return {"kind": name, **options} if options else name


def _limits(slo: Slo) -> dict[str, float]:
    return {"ttft_s": slo.ttft, "tpot_s": slo.tpot}


def _classes(classes: Sequence[ServiceClass]) -> dict[str, Any]:
    said = {each.name: {**_limits(each.slo), "priority": each.priority} for each in classes if each.of == CLASS}
    models = {each.name: _limits(each.slo) for each in classes if each.of == MODEL}
    return {**({"classes": said} if said else {}), **({"models": models} if models else {})}


def _admission(kind: AdmissionKind | None) -> dict[str, Any]:
    """Its name with the options that are not the default."""
    if kind is None:
        return {}
    name = next((name for name, each in ADMISSIONS.items() if each is type(kind)), None)
    if name is None:
        raise InputError(f"admission {type(kind).__name__!r} is not shipped; allowed: {', '.join(ADMISSIONS)}")
    return {"admission": {"kind": name, **_changed(kind)}}


def _run(options: RunOptions) -> dict[str, Any]:
    """Options that are not the default, and the period of the samples, whose default is another in a scenario."""
    if options.link != LinkSpec():
        raise InputError("a scenario has no key for a network of one's own (options.link); allowed: the default")
    if options.reuse is not None:
        raise InputError("a scenario has no key for stated pasts (options.reuse); allowed: a trace with block ids")
    failures = {} if options.failures is None else {"failures": written_failures(options.failures)}
    tiers = {"tiers": list(options.tiers)} if options.tiers else {}
    return {"sample_s": options.sample_s, **_changed(options), **failures, **tiers}


def _changed(chosen: Any) -> dict[str, Any]:
    pairs = ((name, getattr(chosen, name), known.default) for name, known in options_of(chosen).items())
    return {name: value for name, value, default in pairs if value != default}


def _table(trace: Trace) -> str:
    """The plain form, arrivals from the first on, every digit of them. [s], [token]"""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    columns = trace.frame().assign(arrival_s=trace.arrival - trace.arrival[0])
    rows.writerow(columns)
    rows.writerows(zip(*(columns[name].tolist() for name in columns), strict=True))
    return text.getvalue()


def _heading(result: SimulationResult, path: Path) -> str:
    lines = [f"# As simulated: disagg-sim simulate {path.name} --out DIR gives the same requests."]
    if (plan := result.plan) is not None:
        lengths = f"{plan.lengths.mean_isl:g}/{plan.lengths.mean_osl:g} tokens"
        lines.append(f"# Planned for {lengths}: {plan.tokens_per_s_per_gpu:.4g} tokens/s/GPU.")
    return "".join(f"{line}\n" for line in lines)


def _dump(document: dict[str, Any]) -> str:
    """YAML with a line for each innermost mapping, in the order given."""

    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    return text


def _compare(scenario: Scenario, result: SimulationResult, path: Path) -> None:
    """``InputError`` unless the scenario reads back as what was simulated."""
    trace, own = in_memory(scenario.traces[0].load(scenario.seed)), in_memory(result.trace)
    what, said = result.setup, scenario.setup
    drafters = [at.speculation and at.speculation.trying(()) for at in (said, what)]  # whatever a search may try
    same = {
        "model": said.model == what.model,
        "system": said.system == what.system,
        "precision": said.precision == what.precision,
        "profile": said.profile == what.profile,
        "speculation": drafters[0] == drafters[1],
        "deployments": list(map(_deployment_key, scenario.deployments)) == [_deployment_key(result.deployment)],
        "policies": scenario.policies[0].policy == result.policy,
        "run": scenario.run == result.options,
        "trace": np.array_equal(trace.input_tokens, own.input_tokens)
        and np.array_equal(trace.output_tokens, own.output_tokens)
        and np.allclose(trace.arrival, own.arrival, rtol=1e-15, atol=0.0)
        and _same_turns(trace, own),
    }
    for key, equal in same.items():
        if not equal:
            raise InputError(f"{path}: {key} reads back differently from what was simulated; its runs would differ")


def _deployment_key(deployment: ServedDeployment) -> tuple[Any, ...]:
    """What tells a deployment from others, its setups by the names of their specs."""
    parts = [
        (
            part,
            bare(each.mapping),
            each.instances,
            each.limits,
            each.setup and _serves(each.setup),
            each.ffn and _ffn(each.ffn, dict.fromkeys(SERVES, "")),
        )
        for part in PARTS
        for each in getattr(deployment, part)
    ]
    pool = deployment.encode
    encode = None if pool is None else _encode(pool, dict.fromkeys(SERVES, ""))
    return deployment.name, deployment.gpus, parts, encode


def _same_turns(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same sessions, however numbered."""
    if one.sessions is None or other.sessions is None:
        return one.sessions is other.sessions
    return np.array_equal(one.sessions.previous(), other.sessions.previous()) and np.array_equal(
        one.sessions.think_s, other.sessions.think_s
    )
