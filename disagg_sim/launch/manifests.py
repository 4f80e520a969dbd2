"""Write Kubernetes manifests: a DynamoGraphDeployment, or LeaderWorkerSets and router values for llm-d."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from disagg_sim.facts.launcher import LauncherSpec
from disagg_sim.launch.engines import BOOTSTRAP_PORT, ENGINES, HEAD_PORT, NIXL_PORT, ROUTER_PORT, environment_of
from disagg_sim.launch.scripts import arguments
from disagg_sim.launch.workers import Weights, Workers

#: Runtime images of Dynamo by engine.
RUNTIMES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
#: Port of vLLM behind llm-d's sidecar, and names of the secrets with a token of the model hub.
MODEL_PORT, HUB_SECRET, LLM_D_SECRET = 8200, "hf-token-secret", "llm-d-hf-token"

Pools = Sequence[tuple[Workers, Weights]]
Variables = list[dict[str, str]]  # of a container


def dynamo_manifest(engine: str, pools: Pools, spec: LauncherSpec) -> str:
    """Write a DynamoGraphDeployment, whose operator joins the nodes of an instance."""
    exports = environment_of(engine, [workers for workers, _ in pools])
    image = f"nvcr.io/nvidia/ai-dynamo/{RUNTIMES[engine]}:{spec.version}"
    main = {"name": "main", "image": image, "envFrom": [{"secretRef": {"name": HUB_SECRET}}]}
    front = main | {"command": ["python3", "-m", "dynamo.frontend"]}
    components = [
        {"name": "frontend", "type": "frontend", "replicas": 1, "podTemplate": {"spec": {"containers": [front]}}}
    ]
    for workers, weights in pools:
        nodes = workers.nodes()
        container = main | {
            "command": ["python3", "-m", f"dynamo.{engine}"],
            "args": arguments(_dynamo_flags(engine, workers, weights)),
            **({"env": _variables(exports)} if exports else {}),
            "resources": _gpus(workers.gpus // nodes),
        }
        role = "worker" if workers.role == "colocated" else workers.role
        component = {"name": workers.label, "type": role, "replicas": workers.instances}
        component |= {"multinode": {"nodeCount": nodes}} if nodes > 1 else {}
        components.append(component | {"podTemplate": {"spec": {"containers": [container]}}})
    document = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": _name(pools, engine)},
        "spec": {"components": components},
    }
    return _dump(document)


def _dynamo_flags(engine: str, workers: Workers, weights: Weights) -> dict[str, Any]:
    settings, name = ENGINES[engine].settings(workers, weights), weights.checkpoint
    mode = {} if workers.role == "colocated" else {"--disaggregation-mode": workers.role}
    if engine == "sglang":
        port = {"--disaggregation-bootstrap-port": BOOTSTRAP_PORT} if workers.role == "prefill" else {}
        return {"--model-path": name, "--served-model-name": name, "--host": "0.0.0.0", **settings, **port}
    own = {"--override-engine-args": settings} if engine == "trtllm" else settings
    return {"--model": name, "--served-model-name": name, **mode, **own}


def llm_d_manifests(pools: Pools, spec: LauncherSpec, image: str) -> dict[str, str]:
    """Write a LeaderWorkerSet for each pool of vLLM, and the values of the router that sends requests to them."""
    name = _name(pools, "vllm")
    env = _variables(environment_of("vllm", [workers for workers, _ in pools]))
    files = {f"{workers.label}.yaml": _dump(_group(name, workers, own, spec, image, env)) for workers, own in pools}
    disaggregated = any(workers.role == "prefill" for workers, _ in pools)
    return files | {"router.values.yaml": _dump(_router_values(name, disaggregated=disaggregated))}


def _group(
    name: str, workers: Workers, weights: Weights, spec: LauncherSpec, image: str, env: Variables
) -> dict[str, Any]:
    nodes, has_sidecar = workers.nodes(), workers.role == "decode"
    port = MODEL_PORT if has_sidecar else ROUTER_PORT
    flags = {"--port": str(port), **ENGINES["vllm"].settings(workers, weights)}
    if nodes > 1:
        flags |= {"--nnodes": nodes, "--node-rank": "$(LWS_WORKER_INDEX)", "--master-addr": "$(LWS_LEADER_ADDRESS)"}
        flags["--master-port"] = HEAD_PORT
    labels = {"llm-d.ai/inference-serving": "true", "llm-d.ai/guide": name}
    if workers.role != "colocated":
        labels["llm-d.ai/role"] = workers.role
    leader = _pod(weights, image, flags, workers.gpus // nodes, port, env)
    if has_sidecar:
        leader["initContainers"] = [_sidecar(spec.image)]
    template = {"size": nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    if nodes == 1:
        template["workerTemplate"] = {"metadata": {"labels": labels}, "spec": leader}
    else:  # followers answer no requests, so the router must not find them
        follower = _pod(weights, image, flags | {"--headless": True}, workers.gpus // nodes, None, env)
        template["leaderTemplate"] = {"metadata": {"labels": labels}, "spec": leader}
        template["workerTemplate"] = {"spec": follower}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"{name}-{workers.label}", "labels": labels},
        "spec": {"replicas": workers.instances, "leaderWorkerTemplate": template},
    }


def _pod(
    weights: Weights, image: str, flags: dict[str, Any], gpus: int, port: int | None, env: Variables
) -> dict[str, Any]:
    token = {"valueFrom": {"secretKeyRef": {"name": LLM_D_SECRET, "key": "HF_TOKEN"}}}
    address, sends = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}, "--kv-transfer-config" in flags
    side = [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", **address}] if sends else []
    main: dict[str, Any] = {
        "name": "modelserver",
        "image": image,
        "command": ["vllm", "serve"],
        "args": [weights.checkpoint, *arguments(flags)],
        "env": [{"name": "HF_TOKEN", **token}, *side, *env],
        "resources": _gpus(gpus),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if port is not None:
        main["ports"] = [{"name": "modelserver", "containerPort": port}]
        main["ports"] += [{"name": "nixl", "containerPort": NIXL_PORT}] if sends else []
        main["readinessProbe"] = {"httpGet": {"path": "/v1/models", "port": "modelserver"}, "periodSeconds": 10}
    return {"containers": [main], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


def _sidecar(image: str) -> dict[str, Any]:
    """Make the sidecar of a decode pod, which first has a prefill pod compute the prompt."""
    flags = {"--port": ROUTER_PORT, "--model-server-port": MODEL_PORT, "--kv-connector": "nixlv2"}
    args = [f"{flag}={value}" for flag, value in {**flags, "--secure-proxy": "false"}.items()]
    port = {"name": "sidecar", "containerPort": ROUTER_PORT}
    return {"name": "routing-proxy", "image": image, "restartPolicy": "Always", "args": args, "ports": [port]}


def _router_values(name: str, *, disaggregated: bool) -> dict[str, Any]:
    """Make the values of llm-d's router chart: which pods it finds, and that every prompt goes to a prefill pod."""
    router: dict[str, Any] = {"modelServers": {"matchLabels": {"llm-d.ai/guide": name}}}
    if disaggregated:
        roles = ("prefill", "decode")
        plugins = [
            {"type": "always-disagg-pd-decider"},
            {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}},
            *({"type": f"{role}-filter"} for role in roles),
            *({"type": each} for each in ("inflight-load-producer", *_SCORERS.values(), "max-score-picker")),
        ]
        profiles = [
            {"name": role, "plugins": [{"pluginRef": each} for each in (f"{role}-filter", scorer, "max-score-picker")]}
            for role, scorer in _SCORERS.items()
        ]
        config = {"apiVersion": "llm-d.ai/v1", "kind": "EndpointPickerConfig", "plugins": plugins}
        text = yaml.safe_dump(config | {"schedulingProfiles": profiles}, sort_keys=False)
        router["epp"] = {"pluginsConfigFile": "pd-config.yaml", "pluginsCustomConfig": {"pd-config.yaml": text}}
    return {"router": router}


#: How the router picks a pod: by queued prompt tokens, by running requests.
_SCORERS = {"prefill": "token-load-scorer", "decode": "active-request-scorer"}


def _variables(exports: dict[str, str]) -> Variables:
    return [{"name": name, "value": value} for name, value in exports.items()]


def _gpus(count: int) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(count)}}


def _name(pools: Pools, engine: str) -> str:
    plain = re.sub("[^a-z0-9]+", "-", pools[0][0].setup.model.name.lower()).strip("-") or "model"
    return f"{plain[:40]}-{engine}"


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, and writes texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - the base class's
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dump(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)
    return text
