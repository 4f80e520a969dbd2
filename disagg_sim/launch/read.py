"""Read the pools of a deployment from what starts them: commands, shell scripts, configurations of TensorRT-LLM.

vLLM and TensorRT-LLM count sequences and tokens by attention rank; SGLang, and ``Replicas``, over all ranks.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, quoted
from disagg_sim.reading import read_file
from disagg_sim.simulation.deployment import Replicas

#: What starts an instance of each engine, by itself or as a worker of Dynamo.
_STARTS = {
    "vllm": r"\bvllm serve\b|-m (?:vllm\.entrypoints\.openai\.api_server|dynamo\.vllm)\b"
    r"|\bvllm/vllm-openai(?:[:@]\S+)?(?=\s)(?!\s+vllm\s)",  # an image that starts it
    "sglang": r"\bsglang serve\b|-m (?:sglang\.launch_server|dynamo\.sglang)\b",
    "trtllm": r"\btrtllm-serve\b(?! disaggregated)|-m dynamo\.trtllm\b",
}
#: Settings of each engine -> what they say of an instance; short forms stand beside long ones.
_VLLM = {
    **dict.fromkeys(("tensor-parallel-size", "tp"), "tp"),
    **dict.fromkeys(("pipeline-parallel-size", "pp"), "pp"),
    **dict.fromkeys(("data-parallel-size", "dp"), "dp"),
    **dict.fromkeys(("decode-context-parallel-size", "dcp"), "dcp"),
    **dict.fromkeys(("prefill-context-parallel-size", "pcp"), "pcp"),
    **dict.fromkeys(("enable-expert-parallel", "ep"), "experts"),
    "max-model-len": "longest",
    "max-num-seqs": "sequences",
    "max-num-batched-tokens": "tokens",
    "long-prefill-token-threshold": "chunk",
    **dict.fromkeys(("max-cudagraph-capture-size", "compilation-config"), "captured"),
    "kv-cache-dtype": "cache",
    "eplb-config": "copies",
    "speculative-config": "drafts",
    "kv-transfer-config": "transfer",
    "is-prefill-worker": "prefill",
    "is-decode-worker": "decode",
}
_SGLANG = {
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "tp"), "tp"),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size"), "pp"),
    **dict.fromkeys(("data-parallel-size", "dp-size", "dp"), "dp"),
    **dict.fromkeys(("expert-parallel-size", "ep-size", "ep"), "ep"),
    "dcp-size": "dcp",
    "attn-cp-size": "pcp",
    "enable-dp-attention": "ranks",
    "context-length": "longest",
    "max-running-requests": "sequences",
    **dict.fromkeys(("cuda-graph-max-bs-decode", "cuda-graph-max-bs"), "captured"),
    "chunked-prefill-size": "tokens",
    "enable-mixed-chunk": "mixed",
    "kv-cache-dtype": "cache",
    "ep-num-redundant-experts": "copies",
    "speculative-num-steps": "drafts",
    "prefill-delayer-max-delay-passes": "hold",
    "disaggregation-mode": "mode",
}
_TRTLLM = {
    **dict.fromkeys(("tensor-parallel-size", "tp-size"), "tp"),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size"), "pp"),
    **dict.fromkeys(("moe-expert-parallel-size", "ep-size"), "ep"),
    "context-parallel-size": "dcp",
    "enable-attention-dp": "ranks",
    "max-seq-len": "longest",
    "max-batch-size": "sequences",
    "max-num-tokens": "tokens",
    "cuda-graph-config": "captured",
    "kv-cache-config": "cache",
    "speculative-config": "drafts",
    "attention-dp-config": "hold",
    "disable-overlap-scheduler": "alone",
    "cache-transceiver-config": "transfer",
    "disaggregation-mode": "mode",
    **dict.fromkeys(("config", "extra-llm-api-options", "extra-engine-args"), "file"),
}
_SETTINGS = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM}
#: Settings of the same things inside of JSON or YAML.
_INNER = {
    "copies": ("num_redundant_experts",),
    "drafts": ("num_speculative_tokens", "num_nextn_predict_layers", "max_draft_len"),
    "cache": ("dtype",),
    "captured": ("max_batch_size", "batch_sizes", "max_cudagraph_capture_size", "cudagraph_capture_sizes"),
    "hold": ("timeout_iters",),
    "transfer": ("kv_role", "backend"),
}
#: Settings that change no time: names, addresses and keys.
_PLUMBING = re.compile(
    "host|port|model|model-path|api-key|served-model-name|trust-remote-code|"
    ".*bootstrap-port|nnodes|node-rank|dist-init-addr|master-addr|master-port|gpus-per-node|moe-tensor-parallel-size|"
    "max-prefill-tokens|enable-chunked-prefill|disaggregation-transfer-backend|enable-eplb|"
    "moe-dense-tp-size|enable-prefill-delayer|enable-prefill-cp|enable-flashinfer-autotune"
)
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True, kw_only=True)
class Started:
    """Equal instances, as a launch says them."""

    engine: str  # vllm, sglang or trtllm
    role: str  # colocated, prefill or decode
    replicas: Replicas
    cache: str  # format of the KV cache; "" = as the checkpoint or the engine says
    longest: int  # request that it takes, input and output; 0 = as the checkpoint says [token]
    unread: tuple[str, ...]  # settings that were not read


def read_launch(given: str) -> list[Started]:
    """Read what a launch starts.

    ``given`` is ``[ROLE:] [N x] FILE|COMMAND``: a command such as ``vllm serve MODEL -tp 4``, a shell script that has
    one, a configuration of TensorRT-LLM (.yaml), or a directory of scripts that ``disagg-sim launch`` wrote. Without a
    role it is that of the settings; without a count the one in the heading of a written script, else 1.
    """
    head = re.match(r"(?:(colocated|prefill|decode)\s*:)?\s*(?:(\d{1,7}) ?x(?:\s+|$))?", given := given.strip())
    assert head is not None
    role, count, what = head[1], head[2], given[head.end() :]
    if not what:
        raise InputError(f"--launch {quoted(given)} is empty; allowed: [ROLE:] [N x] FILE|COMMAND")
    found = [
        _started(f"--launch {quoted(where)}", engine, settings, role, int(count or written))
        for where, engine, settings, written in _commands(what)
    ]
    if not found:
        named = "vllm serve, sglang.launch_server or trtllm-serve"
        raise InputError(f"--launch {quoted(what)}: no file, and no command of {named}")
    return found


def _commands(what: str) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield where a command stands, its engine and settings, and the count in the heading above it."""
    path = Path(what)
    if any(re.search(start, what) for start in _STARTS.values()):
        yield from _in_text(what, what, Path())
    elif path.is_dir():
        for each in sorted([*path.glob("*.sh"), *path.glob("start/*.sh")]):  # as plan --emit leaves them in --out
            yield from _in_text(str(each), _text(each), each.parent)
    elif path.suffix in (".yaml", ".yml"):
        yield what, "trtllm", _of_file(path), "1"
    else:
        yield from _in_text(what, _text(path), path.parent)


def _in_text(where: str, text: str, beside: Path) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    heading = re.search(r"^# [\w-]+: (\d+) instances? of ", text, re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        for engine, start in _STARTS.items():
            if not line.lstrip().startswith("#") and (found := re.search(start, line)):
                try:
                    words = shlex.split(line[found.end() :])
                except ValueError as error:
                    raise InputError(f"--launch {quoted(where)}: {error}") from None
                settings = _flags(words)
                files = [name for name in settings if _TRTLLM.get(name) == "file"] if engine == "trtllm" else []
                for name in files:
                    own = str(settings.pop(name)).removeprefix("$(dirname $0)/")
                    settings |= _of_file(beside / own)
                yield where, engine, settings, heading[1] if heading else "1"


def _flags(words: list[str]) -> dict[str, Any]:
    """Settings of a command by name, without dashes in front; switches are true."""
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        if re.match("--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            after = words[place + 1 : place + 2]
            switch = not after or re.match("--?[A-Za-z]", after[0])
            found[name.replace("_", "-")] = value if equals else True if switch else after[0]
    return found


def _text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "is no text"
        allowed = "[ROLE:] [N x] and a file, or a command of vllm serve, sglang.launch_server or trtllm-serve"
        raise InputError(f"--launch {quoted(str(path))}: {said}; allowed: {allowed}") from None


def _of_file(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError):
        document = None
    if not isinstance(document, dict) or "tensor_parallel_size" not in document:
        raise InputError(f"--launch {path}: no configuration of TensorRT-LLM, which has tensor_parallel_size")
    return {str(name).replace("_", "-"): value for name, value in document.items()}


def _started(where: str, engine: str, settings: dict[str, Any], role: str | None, count: int) -> Started:
    """Bring the settings of an engine into the words of a pool."""
    names = _SETTINGS[engine]
    told = {names[name]: _inner(names[name], value) for name, value in settings.items() if name in names}

    def number(key: str, default: int | None = None) -> int | None:
        value = told.get(key, default)
        if value is None or str(value) == "-1":
            return None
        if re.fullmatch("[0-9]{1,9}", str(value)):
            return int(value)
        name = next(name for name in settings if names.get(name) == key)
        said = "has no value" if value is True else f"{quoted(str(value))} is no whole number"
        raise InputError(f"{where}: {name} {said}")

    def degree(key: str) -> int:
        return number(key, 1) or 1

    mode = told.get("mode") or told.get("transfer")
    role = role or next((key for key in ("prefill", "decode") if key in told), None) or _ROLES.get(str(mode))
    if role is None and engine == "trtllm" and mode:
        role = "prefill" if told.get("alone") is True else "decode"
    if role is None and engine == "vllm" and mode:
        raise InputError(f"{where}: kv_role {mode} may be prefill or decode; say which before it, such as prefill: ...")
    tp, dp, pp, ep, dcp, pcp = map(degree, ("tp", "dp", "pp", "ep", "dcp", "pcp"))
    if engine == "trtllm":
        tp *= dcp  # Helix shares the cache among GPUs beside those of its tensor parallelism
        dp = tp if str(told.get("ranks")).lower() == "true" else 1
    if engine == "sglang" and "ranks" not in told:
        count, dp = count * dp, 1  # data parallelism without DP attention is whole copies
    if engine != "vllm":
        if tp % (dp * pcp):
            raise InputError(f"{where}: {dp * pcp} attention ranks do not divide {tp} GPUs of tensor parallelism")
        tp //= dp * pcp
    stage = tp * dp * pcp
    if "experts" in told:
        ep = stage
    if stage % ep:
        raise InputError(f"{where}: ep {ep} does not divide the {stage} GPUs of a stage")
    ranks = 1 if engine == "sglang" else dp
    sequences, tokens, hold = number("sequences"), number("tokens"), number("hold")
    captured, drafts = (None, 0) if role == "prefill" else (number("captured") or None, number("drafts") or 0)
    of_request = 1 if engine == "vllm" else 1 + drafts  # tokens; the others count captured requests
    batch = sequences and sequences * ranks
    budget = tokens and tokens * ranks
    if role == "prefill" and batch:
        batch = max(batch // pp, 1)  # each stage has a pass of its own
    elif budget and engine == "sglang" and "mixed" not in told:
        budget += batch or 0  # prompts have the chunk to themselves; mixed, decodes of a step are part of it
    try:
        mapping = Sharding(
            tp_attn=tp,
            dp_attn=dp,
            tp_ffn=stage // ep,
            ep=ep,
            pp=pp,
            dcp=dcp,
            pcp=pcp,
            redundant_slots=number("copies", 0),
            chunk_tokens=number("chunk", 0),
            draft_tokens=drafts,
        )
        replicas = Replicas(
            mapping=mapping,
            instances=count,
            batch=batch,
            token_budget=None if role == "decode" else budget,
            hold_steps=hold and hold - 1,
            captured=captured and captured * of_request,
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    cache = {"fp8": "fp8", "fp8_e4m3": "fp8", "bf16": "bf16", "bfloat16": "bf16"}.get(str(told.get("cache")), "")
    silent = [name for name, key in names.items() if key == "captured" and told.get(key) is None]  # says no size
    unread = (name for name in settings if name in silent or (name not in names and not _PLUMBING.fullmatch(name)))
    return Started(
        engine=engine,
        role=role or "colocated",
        replicas=replicas,
        cache=cache,
        longest=_whole(told.get("longest")),
        unread=tuple(unread),
    )


def _whole(value: Any) -> int:
    """A whole number; 0 where it is none, such as auto."""
    return int(value) if re.fullmatch("[0-9]{1,9}", str(value)) else 0


def _inner(key: str, value: Any) -> Any:
    """The part of JSON or of a mapping that says it; None where it has none, other values as they are."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if not isinstance(value, dict):
        return value
    found = next((value[name] for name in _INNER.get(key, ()) if name in value), None)
    return max(found, default=None) if isinstance(found, list) else found
