"""Write shell scripts: one for each pool, run once on every node of an instance, and one for the router before them.

Flags of a command become text for a shell, or a list of arguments.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from disagg_sim.launch.engines import (
    BOOTSTRAP_PORT,
    ENCODER_TRANSFER,
    ENGINES,
    HEAD_PORT,
    NIXL_PORT,
    ROUTER_PORT,
    SERVE_PORT,
    environment_of,
)
from disagg_sim.launch.expressible import degrees_of
from disagg_sim.launch.workers import UNKNOWN, Weights, Workers

#: Flags in their order: True = a switch, a mapping = JSON, a tuple = the flag once for each.
Flags = Mapping[str, Any]


class Shell(str):
    """Text that the shell expands: quoted, but with its variables."""

    __slots__ = ()


def arguments(flags: Flags) -> list[str]:
    """List the arguments of flags, as a program receives them."""
    return [word for pair in _pairs(flags) for word in pair]


def lines(command: str, flags: Flags) -> str:
    """Write a command for a shell, a flag a line."""
    rows = [
        " ".join(f'"{word}"' if isinstance(word, Shell) else shlex.quote(word) for word in pair)
        for pair in _pairs(flags)
    ]
    return " \\\n  ".join([command, *rows])


def _pairs(flags: Flags) -> Iterator[tuple[str, ...]]:
    for flag, value in flags.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield (flag,) if each is True else (flag, _text(each))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


#: First words of the command that starts a worker.
COMMANDS = {
    "vllm": 'vllm serve "$CHECKPOINT"',
    "sglang": "python3 -m sglang.launch_server",
    "trtllm": 'trtllm-serve "$CHECKPOINT"',
}
#: What values from outside may be; they stand in arithmetic, which runs commands, behind options, and in YAML.
_NUMBER = "0|[1-9][0-9]{0,3}"
_ADDRESS = "[0-9A-Za-z:][0-9A-Za-z.:_-]*"
_LOOPBACK = r"127(\.[0-9]{1,3}){3}|::1|localhost"
_NAMES = "a name on the hub, or a path"
_NAME = "[0-9A-Za-z_./~][0-9A-Za-z_ ./~@:+=,-]*"
#: How scripts begin: Python, from 3.11 on, takes no modules from the working directory; a blank key is none.
_START = """set -feuo pipefail
export PYTHONSAFEPATH=1
[[ "${API_KEY:-}" =~ [^[:space:]] ]] || API_KEY=''"""
#: Ends a script with one line where a variable is something else.
_REQUIRE = """require() {
  local LC_ALL=C
  [[ "${!1:-}" =~ ^($2)$ ]] && return
  printf '%s=%q; allowed: %s\\n' "$1" "${!1:-}" "$3" >&2
  exit 1
}"""

#: Of SGLang's prefill instances that have their embeddings from encoders.
_LANGUAGE_ONLY = {"--language-only": True, "--encoder-transfer-backend": ENCODER_TRANSFER}


def scripts_of(engine: str, workers: Sequence[Workers], weights: Sequence[Weights], version: str) -> dict[str, str]:
    """Write the files that start a deployment by hand: scripts of pools and router, for TensorRT-LLM configurations."""
    files, exports = {}, environment_of(engine, workers)
    alone = sum(each.gpus * each.instances for each in workers) <= workers[0].local_gpus  # one node holds all
    for each, own in zip(workers, weights, strict=True):
        nodes = each.nodes()
        settings = ENGINES[engine].settings(each, own)
        parts = [_heading(engine, each, nodes, version), _variables(engine, each, own, nodes, alone=alone)]
        parts += [f"export {name}={value}" for name, value in exports.items()]
        if engine == "vllm":
            parts.append('export VLLM_API_KEY="${API_KEY:-}"  # asked for below /v1, /v2 and /inference')
        if engine == "vllm" and each.role != "colocated":
            parts += ['export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST"']
            parts += [f"export VLLM_NIXL_SIDE_CHANNEL_PORT=$(({NIXL_PORT} + SLOT * {each.gpus}))"]
        if engine == "trtllm":
            files[f"{each.label}.yaml"] = yaml.safe_dump(settings, sort_keys=False)
        command = _command(engine, each, settings, nodes)
        if engine == "sglang":
            command += f" \\\n  {_KEY}"
        if each.role == "prefill" and any(one.role == "encode" for one in workers):
            parts += _urls(engine, "ENCODE_URLS")
            command = f"{lines(command, _LANGUAGE_ONLY)} \\\n  --encoder-urls $ENCODE_URLS"
        parts.append(command)
        files[f"{each.label}.sh"] = "\n".join(parts) + "\n"
    router = _router(engine, workers)
    return files | ({"router.sh": router} if router else {})


#: Asks for a key, or sends it, where there is one.
_KEY = '${API_KEY:+--api-key "$API_KEY"}'


def _heading(engine: str, workers: Workers, nodes: int, version: str) -> str:
    count = f"{workers.instances} instance{'s' * (workers.instances > 1)}"
    size = f"{workers.gpus} GPU{'s' * (workers.gpus > 1)} on {nodes} node{'s' * (nodes > 1)}"
    where = "once for each instance, on its node"
    if nodes > 1:
        where = "on every node of each instance"
        if engine == "trtllm":
            where = f"once for each instance, in an allocation of Slurm over {nodes} nodes"
    return (
        "#!/usr/bin/env bash\n"
        f"# {workers.label}: {count} of {degrees_of(workers)}, {size} each. {ENGINES[engine].title} {version}.\n"
        f"# Run it {where}.\n" + _START
    )


def _variables(engine: str, workers: Workers, weights: Weights, nodes: int, *, alone: bool) -> str:
    rows, other = [_REQUIRE], _required("CHECKPOINT", _NAME, _NAMES)
    if weights.checkpoint == UNKNOWN:
        rows.append(other)
    else:
        rows += [f"PLANNED={shlex.quote(weights.checkpoint)}", 'CHECKPOINT="${CHECKPOINT:-$PLANNED}"']
        rows += ['if [ "$CHECKPOINT" != "$PLANNED" ]; then', f"  {other}"]
        rows += ['  echo "starting CHECKPOINT=$CHECKPOINT in place of $PLANNED" >&2', "fi"]
    if alone:
        rows.append('HOST="${HOST:-127.0.0.1}"  # where it listens; the whole deployment fits on one node')
    rows += _address("HOST", "address of this node in a private network, where it listens", engine)
    if nodes > 1 and engine != "trtllm":
        rows.append(_required("NODE_RANK", _NUMBER, "number of this node in its instance, from 0"))
        rows.append(_required("HEAD", _ADDRESS, "address of node 0 of the instance"))
    if nodes > 1:
        rows.append("SLOT=0")
    else:
        rows.append('SLOT="${SLOT:-0}"')
        rows.append(_required("SLOT", _NUMBER, "number of the instance on this node, from 0"))
        first, last = f"SLOT * {workers.gpus}", f"SLOT * {workers.gpus} + {workers.gpus - 1}"
        rows.append(f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES:-$(seq -s, $(({first})) $(({last})))}}"')
    return "\n".join(rows)


def _required(name: str, pattern: str, said: str) -> str:
    return f"require {name} {shlex.quote(pattern)} {shlex.quote(said)}"


def _address(name: str, said: str, engine: str) -> list[str]:
    """What others reach is opened where all routes ask for a key, or where the user trusts the network."""
    asks = engine == "sglang"
    key, or_key = '[ -n "${API_KEY:-}" ] || ' * asks, "; or give API_KEY, which clients must send" * asks
    trusted = _required("TRUSTED_NETWORK", "1", f"1, where nobody else reaches {name}{or_key}")
    return [_required(name, _ADDRESS, said), f'[[ "${name}" =~ ^({_LOOPBACK})$ ]] || {key}{trusted}']


def _urls(engine: str, *names: str) -> list[str]:
    """Lists of addresses, apart by spaces."""
    scheme = "(https?://)?" if engine == "trtllm" else "https?://"
    rows = [rf"URL='{scheme}([0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{{0,4}}'"]
    said = f"instances, such as http://HOST:{SERVE_PORT}, apart by spaces"
    for name in names:
        whose = name.removesuffix("_URLS").lower()
        rows.append(f"require {name} \" *$URL( +$URL)* *\" 'addresses of all {whose} {said}'")
    return rows


def _command(engine: str, workers: Workers, settings: dict[str, Any], nodes: int) -> str:
    port = Shell(f"$(({SERVE_PORT} + SLOT))")
    ends: dict[str, Any] = {"--host": Shell("$HOST"), "--port": port}
    if engine == "trtllm":
        flags = {"--config": Shell(f'$(dirname "$0")/{workers.label}.yaml'), **ends}
        if nodes == 1:
            return lines(f"exec {COMMANDS[engine]}", flags)
        local = workers.gpus // nodes
        start = f"srun --nodes {nodes} --ntasks {workers.gpus} --ntasks-per-node {local} --mpi pmix"
        return lines(f"exec {start} trtllm-llmapi-launch {COMMANDS[engine]}", flags)
    if engine == "sglang":
        flags = {"--model-path": Shell("$CHECKPOINT"), **ends, **settings}
        if workers.role == "prefill":
            flags["--disaggregation-bootstrap-port"] = Shell(f"$(({BOOTSTRAP_PORT} + SLOT))")
        if nodes > 1:
            flags |= {
                "--nnodes": nodes,
                "--node-rank": Shell("$NODE_RANK"),
                "--dist-init-addr": Shell(f"$HEAD:{HEAD_PORT}"),
            }
        return lines(f"exec {COMMANDS[engine]}", flags)
    flags = {**ends, **settings}
    if nodes == 1:
        return lines(f"exec {COMMANDS[engine]}", flags)
    flags |= {"--nnodes": nodes, "--node-rank": Shell("$NODE_RANK"), "--master-addr": Shell("$HEAD")}
    command = lines(f"exec {COMMANDS[engine]}", flags | {"--master-port": HEAD_PORT})
    return f'FOLLOWER=()\nif [ "$NODE_RANK" -gt 0 ]; then FOLLOWER=(--headless); fi\n{command} \\\n  "${{FOLLOWER[@]}}"'


def _router(engine: str, workers: Sequence[Workers]) -> str:
    """The script of what clients talk to; empty where an instance of TensorRT-LLM answers them itself."""
    apart = any(each.role == "prefill" for each in workers)
    if engine == "trtllm" and not apart:
        return ""
    names = ("PREFILL_URLS", "DECODE_URLS") if apart else ("WORKER_URLS",)
    rows = [_ROUTER, *_address("ROUTER_HOST", "where it listens", engine)]
    rows += _urls(engine, *names)
    if engine == "trtllm":
        return "\n".join([*rows, _TRTLLM_ROUTER])
    if engine == "vllm":  # it asks nobody
        rows.append('export OPENAI_API_KEY="${API_KEY:-}"  # for its instances')
    flags: dict[str, Any] = {"--host": Shell("$ROUTER_HOST"), "--port": ROUTER_PORT, "--prometheus-host": "127.0.0.1"}
    start = "exec vllm-router" if engine == "vllm" else f"exec python3 -m sglang_router.launch_router {_KEY}"
    if not apart:
        rows.append(f"{lines(start, flags)} \\\n  --worker-urls $WORKER_URLS")
        return "\n".join(rows) + "\n"
    rows.append("ARGUMENTS=()")
    behind = f' "$(({BOOTSTRAP_PORT} + ${{url##*:}} - {SERVE_PORT}))"' if engine == "sglang" else ""  # as by its slot
    rows.append(f'for url in $PREFILL_URLS; do ARGUMENTS+=(--prefill "$url"{behind}); done')
    rows.append('for url in $DECODE_URLS; do ARGUMENTS+=(--decode "$url"); done')
    mode = {"--vllm-pd-disaggregation": True, "--kv-connector": "nixl"}
    command = lines(start, flags | (mode if engine == "vllm" else {"--pd-disaggregation": True}))
    rows.append(f'{command} \\\n  "${{ARGUMENTS[@]}}"')
    return "\n".join(rows) + "\n"


#: sglang-router 0.3.2 answers clients without the key with 401 and hands it on; vllm-router 0.1.17 never asks, and
#: sends OPENAI_API_KEY to prefill and decode, and to co-located instances the key of the client. Both were tried.
_ROUTER = f"""#!/usr/bin/env bash
# Answers clients, and sends their requests to the instances.
{_START}
{_REQUIRE}
ROUTER_HOST="${{ROUTER_HOST:-127.0.0.1}}"
"""[:-1]
_TRTLLM_ROUTER = f"""CONFIG="$(mktemp --suffix .yaml)"
servers() {{
  printf '%s:\\n  num_instances: %d\\n  urls:\\n' "$1" $(($# - 1))
  printf '    - "%s"\\n' "${{@:2}}"
}}
{{
  printf 'hostname: "%s"\\nport: {ROUTER_PORT}\\n' "$ROUTER_HOST"
  servers context_servers $PREFILL_URLS
  servers generation_servers $DECODE_URLS
}} > "$CONFIG"
exec trtllm-serve disaggregated --config "$CONFIG"
"""
