"""Write commands or manifests that start a deployment, with notes on differences from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg_sim.atomic import require_own, write_text
from disagg_sim.choices import LAUNCHERS
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_launcher
from disagg_sim.facts.yaml_files import canonical_name
from disagg_sim.launch.engines import (
    BOOTSTRAP_PORT,
    CACHE_DIRECTORY,
    ENGINES,
    GATHERED,
    HEAD_PORT,
    MOST_DISPATCHED,
    NIXL_PORT,
    ROUTER_PORT,
    SERVE_PORT,
    drafts_of,
    lacking,
    step_tokens,
    tier_bytes,
    vllm_exchange,
)
from disagg_sim.launch.expressible import backend_of, degrees_of, expressible
from disagg_sim.launch.manifests import MODEL_PORT, dynamo_manifest, llm_d_manifests
from disagg_sim.launch.scripts import arguments, scripts_of
from disagg_sim.launch.workers import Weights, Workers, longest_of, weights_of, workers_of
from disagg_sim.units import GB

#: Notes on untested chunked prefill over pipeline stages, by engine.
_CHUNKS_OVER_STAGES = {
    "vllm": "vLLM starts the next chunk of a prompt while others are in the pipeline; no run has checked it",
    "trtllm": "chunked prefill over pipeline stages is untested in the feature matrix of TensorRT-LLM",
}
#: Line in every written file; files without it are never replaced.
_MARK = "Written by disagg-sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Files that start a deployment, with notes."""

    engine: str  # of ``LAUNCHERS``
    version: str  # of the engine whose options the files use
    files: dict[str, str]  # name -> text
    notes: tuple[str, ...]  # a line each

    def require_own(self, directory: str | Path) -> None:
        """Raise ``StoreError`` if the directory has links, or files that a launch did not write."""
        require_own(Path(directory), [*self.files, "notes.txt"], _MARK)

    def write(self, directory: str | Path) -> tuple[Path, ...]:
        """Write the files and ``notes.txt`` into a directory; return their paths, scripts ready to run."""
        self.require_own(directory)
        texts = {**self.files, "notes.txt": "".join(f"{line}\n" for line in self.notes)}
        paths = tuple(Path(directory) / name for name in texts)
        for path, text in zip(paths, texts.values(), strict=True):
            write_text(path, text)
            if path.suffix == ".sh":
                path.chmod(0o755)
        return paths


def launch(
    deployment: Any, *, engine: str = "vllm", backend: str = "", checkpoint: str = "", node_gpus: int | None = None
) -> Launch:
    """Turn a deployment into commands or manifests of a serving engine.

    Parameters
    ----------
    deployment : Design, Deployment, ServedDeployment, DataFrame or sequence of Workers
        Such as ``ds.plan(...).best``, ``PoolsPlan.deployment``, one row of a frontier, or parts by hand.
    engine : str
        ``"vllm"``, ``"sglang"`` or ``"trtllm"``: shell scripts, one for each pool, and a router; ``"dynamo"``,
        ``"llm-d"``: Kubernetes manifests.
    backend : str
        Engine of the workers of Dynamo; empty = the one that the deployment was planned for, else vLLM.
    checkpoint : str
        Name or path of the model; empty = a published checkpoint in the formats of the recipe.
    node_gpus : int, optional
        GPUs of a node; None = 8, on racks of one NVLink domain 4. [1]

    Returns
    -------
    Launch
        Files by name, and notes.

    Raises
    ------
    InputError
        Reasons why the engine cannot start it, one per line, with the engines that can.
    UnknownNameError
        An engine that is not known.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8", engine="vllm")
    >>> prefill = ds.Replicas(mapping=ds.Sharding(tp_attn=2, tp_ffn=2), instances=2, batch=4, token_budget=8192)
    >>> decode = ds.Replicas(mapping=ds.Sharding(tp_attn=4, tp_ffn=4), instances=1, batch=64)
    >>> parts = ds.ServedDeployment(name="mine", gpus=8, prefill=(prefill,), decode=(decode,), setup=at)
    >>> made = launch(parts, engine="vllm")
    >>> sorted(made.files)
    ['decode.sh', 'prefill.sh', 'router.sh']
    >>> "--tensor-parallel-size 4" in made.files["decode.sh"], made.version
    (True, '0.31.0')
    """
    workers = workers_of(deployment)
    if node_gpus is not None:
        workers = tuple(replace(each, node_gpus=node_gpus) for each in workers)
    name, own = canonical_name(engine), backend_of(engine, workers, backend)
    reasons = expressible(workers, engine, backend=own)
    if reasons:
        able = [each for each in LAUNCHERS if not expressible(workers, each)]
        lines = [*reasons, f"engines that can: {', '.join(able) or 'none'}"]
        raise InputError("; ".join(lines) if len(reasons) == 1 else "\n".join(lines))
    weights = [weights_of(each.setup, checkpoint, quantises=ENGINES[own].quantises) for each in workers]
    spec, serves = load_launcher(name), load_launcher(own)
    if name == "dynamo":
        files = {"deployment.yaml": dynamo_manifest(own, list(zip(workers, weights, strict=True)), spec)}
    elif name == "llm_d":
        files = llm_d_manifests(list(zip(workers, weights, strict=True)), spec, serves.image)
    else:
        files = scripts_of(own, workers, weights, spec.version)
    version = spec.version if name == own else f"{spec.version}, {serves.title} {serves.version}"
    notes = dict.fromkeys(_notes(workers, weights, own, name))
    versions = f"{_MARK}: options of {spec.title} {version}; other versions may name them differently"
    files = {name: _marked(text) for name, text in files.items()}
    return Launch(engine=engine, version=version, files=files, notes=(versions, *notes))


def flags_of(deployment: Any) -> Iterator[tuple[str, str]]:
    """Yield each pool with the settings of its engine that match the plan, or the reason why it cannot start."""
    workers = workers_of(deployment)
    name = backend_of("dynamo", workers)
    reasons = expressible(workers, name)
    for each in workers:
        if reasons:
            yield each.label, f"{ENGINES[name].title} cannot start it: {'; '.join(reasons)}"
            return
        settings = ENGINES[name].settings(each, weights_of(each.setup, quantises=ENGINES[name].quantises))
        plain = {flag: value for flag, value in settings.items() if not isinstance(value, dict)}
        words = [f"{flag}: {value}" for flag, value in plain.items()] if name == "trtllm" else arguments(plain)
        yield each.label, f"{ENGINES[name].title}: {(', ' if name == 'trtllm' else ' ').join(words)}"


def _marked(text: str) -> str:
    head, line, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    return f"{head}{line}# {_MARK}.\n{rest}"


def lines_of(made: Launch, directory: Path | None = None) -> Iterator[str]:
    """Write notes and files for a screen: paths in ``directory``, or whole texts without one."""
    yield from (f"# {line}" for line in made.notes)
    for name, text in made.files.items():
        yield f"\n# --- {name}\n{text.rstrip()}" if directory is None else str(directory / name)


#: Steps of co-located SGLang, without and with a drafter.
_MIXED_CHUNKS = (
    "SGLang puts prompts into the steps of decodes, as planned (--enable-mixed-chunk; without it, the default, whole "
    "prompts stop decodes): no served run has judged the forecast of such steps",
    "SGLang starts no mixed chunks with a drafter: prompts have passes of their own, decodes wait",
)


def _notes(workers: Sequence[Workers], weights: Sequence[Weights], engine: str, launcher: str) -> Iterator[str]:
    title = ENGINES[engine].title
    for each, own in zip(workers, weights, strict=True):
        nodes = each.nodes()
        size = f"{each.gpus} GPU{'s' * (each.gpus > 1)}, {nodes} node{'s' * (nodes > 1)}"
        yield f"{each.label}: {each.instances} x {degrees_of(each)} ({size}) of {each.setup.system.name}"
        yield from (some.note for some in (own, own.drafter) if some is not None and some.note)
        if each.role == "encode":
            yield "encode pools: options of SGLang's documentation; no run has checked them, or timed an encoder"
        if each.role == "colocated" and each.token_budget is not None and engine == "sglang":
            yield _MIXED_CHUNKS[drafts_of(each) > 0]
        planned = each.setup.engine
        if planned and planned != engine:
            yield f"planned with the times of {planned}, started with {title}: expect other latencies"
        if each.role == "colocated" and each.token_budget is None and engine == "vllm":
            yield "vLLM puts prompts into the steps of decodes; the plan has passes of their own for them"
        if each.mapping.chunk_tokens and each.mapping.pp > 1 and engine in _CHUNKS_OVER_STAGES:
            yield _CHUNKS_OVER_STAGES[engine]
        if engine != "vllm" and (each.tokens or 0) > each.mapping.chunk_tokens > 0:
            yield (
                f"{each.label}: planned with a chunk of each of several prompts in a pass; {title} fills it with whole "
                "prompts and cuts the last: expect other latencies"
            )
        for tier in each.tiers:
            room = tier_bytes(each, tier) / GB
            where = f", in {CACHE_DIRECTORY} of each node" if tier == "ssd" else ""
            yield f"{each.label}: prompts are kept in {tier}, {room:,.0f} GB for each GPU{where}"
        if "ssd" in each.tiers and engine == "sglang":
            yield "SGLang's files of prompts grow until SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE, which is not set"
        if each.mapping.redundant_slots:
            yield f"{each.label}: {title} places copies of experts by load, so it needs some steps to settle"
        if each.mapping.ep > 1 and each.mapping.dp_attn > 1:
            yield from _exchange(each, engine)
    yield _accepted(workers)
    yield from _reached(workers, engine, launcher)
    yield f"nodes of {workers[0].local_gpus} GPUs {'as given' if workers[0].node_gpus else 'are assumed'}"


def _exchange(workers: Workers, engine: str) -> Iterator[str]:
    """Note differences in the all-to-all of experts."""
    if lacks := lacking(engine, workers):
        yield (
            f"{ENGINES[engine].title} has no {' and no '.join(lacks)} on {workers.setup.system.name}: experts are sent "
            "tokens in its default way, so expect other latencies"
        )
    elif engine == "sglang" and step_tokens(workers) > MOST_DISPATCHED:
        yield (
            f"DeepEP takes {MOST_DISPATCHED:,} tokens of a rank at most: experts get those of all ranks, so expect "
            "other latencies"
        )
    elif engine == "sglang" or (engine == "vllm" and vllm_exchange(workers) != GATHERED):
        yield "the exchange between experts needs DeepEP, or FlashInfer over NVLink of a rack, in the image"


def _accepted(workers: Sequence[Workers]) -> str:
    """Note the longest accepted request; the last pool decodes."""
    last = workers[-1]
    if last.lengths is None or last.context is None:
        most = last.setup.model.max_context
        return f"no lengths are known: requests are accepted up to the model's own limit, {most:,} tokens"
    longest = min(longest_of(last.lengths), last.setup.model.max_context)
    return f"requests are accepted up to {last.context:,} tokens, input and output; the longest planned: {longest:,.0f}"


#: Which servers require the API key; tested with the routers.
_KEYS = {
    "vllm": "API_KEY: instances ask for it on some routes, the router on none: put a proxy before it that does",
    "sglang": "API_KEY: instances and the router ask for it; all users of a machine see it in its list of processes",
    "trtllm": "nothing asks for a key: put a proxy before it that does",
}


def _reached(workers: Sequence[Workers], engine: str, launcher: str) -> Iterator[str]:
    """Note open ports and how they are protected."""
    scripts = launcher == engine
    apart = any(each.role in ("prefill", "decode") for each in workers)
    several = any(each.nodes() > 1 for each in workers)
    ports = [f"{SERVE_PORT} and up: instances"] if scripts else []
    ports += [f"{MODEL_PORT}: decode behind its sidecar"] if apart and launcher == "llm_d" else []
    if apart or engine != "trtllm" or not scripts:
        ports.append(f"{ROUTER_PORT}: clients")
    if apart and engine == "vllm":
        ports.append(f"{NIXL_PORT} and up: side channel of NIXL")
    if apart and engine == "sglang":
        ports.append(f"{BOOTSTRAP_PORT} and up: bootstrap of prefill")
    if several and engine != "trtllm":
        ports.append(f"{HEAD_PORT}: nodes of an instance")
    yield f"ports: {'; '.join(ports)}; and those that NIXL and NCCL choose"
    if apart or several:
        yield "caches, and what nodes of an instance exchange, travel unencrypted and unasked: use a private network"
    if scripts:
        yield f"HOST: address on which an instance listens; ROUTER_HOST: of the router, 127.0.0.1; {_KEYS[engine]}"
        yield "TRUSTED_NETWORK=1: needed where others reach an address that no key guards; CHECKPOINT: another one"
    else:
        yield "pods listen on all of their addresses and ask for no key: keep others out with a NetworkPolicy"
