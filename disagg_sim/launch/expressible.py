"""List why an engine cannot start a deployment: rules of roles, and of pairs of pools that transfer caches.

The rules of a single layout are in ``search.layouts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from disagg_sim.choices import LAUNCHERS
from disagg_sim.errors import UnknownNameError, nearest
from disagg_sim.facts.engine import hold_settings
from disagg_sim.facts.load import load_launcher
from disagg_sim.facts.yaml_files import canonical_name
from disagg_sim.launch.engines import ENGINES, drafts_of, tier_bytes
from disagg_sim.launch.workers import Workers, format_of, workers_of
from disagg_sim.report.words import text_of
from disagg_sim.search.layouts import broken_rules

#: Orchestrators -> engines whose workers they start.
ORCHESTRATORS = {"dynamo": tuple(ENGINES), "llm_d": ("vllm",)}
#: Kinds of attention whose caches are latents.
LATENT = ("mla", "dsa")
#: Formats of weights whose checkpoints may state the format of the KV cache (``kv_cache_quant_algo`` of ModelOpt).
OWN_CACHES = ("fp8", "nvfp4")


def expressible(deployment: Any, engine: str, *, backend: str = "") -> tuple[str, ...]:
    """List what an engine cannot express of a deployment.

    Parameters
    ----------
    deployment : Design, Deployment, ServedDeployment, DataFrame or sequence of Workers
        As in ``workers_of``.
    engine : str
        Of ``LAUNCHERS``.
    backend : str
        Engine of the workers of an orchestrator; empty = as in ``backend_of``.

    Returns
    -------
    tuple of str
        One line a reason; empty where the engine can start it all.

    Raises
    ------
    UnknownNameError
        An engine that is not known, or that the orchestrator does not start.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at = ds.setup("qwen3_235b_a22b", "h200_sxm", "bf16")
    >>> cut = Workers(role="colocated", mapping=ds.Sharding(tp_attn=8, tp_ffn=2, ep=4), instances=1, setup=at)
    >>> expressible([cut], "vllm")
    ('colocated TP8 FFN-TP2 EP4 of vLLM: EP over groups of GPUs',)
    >>> expressible([cut], "sglang")
    ()
    >>> tpu = ds.setup("qwen3_32b", "tpu7x", "bf16")
    >>> expressible([Workers(role="colocated", mapping=ds.Sharding(), instances=1, setup=tpu)], "trtllm")
    ('TensorRT-LLM on tpu7x: it starts systems of NVIDIA; this one is of Google',)
    """
    workers = workers_of(deployment)
    own = backend_of(engine, workers, backend)
    for name in (canonical_name(engine), own):
        if refused := tuple(dict.fromkeys(_systems(workers, name))):
            return refused
    return tuple(dict.fromkeys((*_encoders(workers, engine), *_alone(workers, own), *_reasons_of_pairs(workers, own))))


def backend_of(engine: str, workers: Sequence[Workers], backend: str = "") -> str:
    """Find the engine that serves: itself, or that of the workers of an orchestrator."""
    allowed = engines_of(engine)
    if backend and canonical_name(backend) not in allowed:
        raise UnknownNameError(
            f"backend {backend!r} of {engine}{nearest(backend, allowed)}; allowed: {', '.join(allowed)}"
        )
    planned = workers[-1].setup.engine if workers else ""
    return canonical_name(backend) if backend else planned if planned in allowed else allowed[0]


def engines_of(launcher: str) -> tuple[str, ...]:
    """List the engines whose workers a launcher starts."""
    name = canonical_name(launcher)
    if name not in (*ENGINES, *ORCHESTRATORS):
        near = nearest(launcher, LAUNCHERS)
        raise UnknownNameError(f"unknown engine {launcher!r}{near}; known: {', '.join(LAUNCHERS)}")
    return ORCHESTRATORS.get(name, (name,))


def _systems(workers: Sequence[Workers], launcher: str) -> Iterator[str]:
    """Systems that a launcher, or the engine of its workers, does not start."""
    spec = load_launcher(launcher)
    for system in (each.setup.system for each in workers):
        if system.vendor not in spec.vendors:
            allowed = ", ".join(spec.vendors)
            yield f"{spec.title} on {system.name}: it starts systems of {allowed}; this one is of {system.vendor}"


def _alone(workers: Sequence[Workers], engine: str) -> Iterator[str]:
    """Reasons of each pool by itself."""
    for each in workers:
        where = f"{each.label} {degrees_of(each)} of {ENGINES[engine].title}"
        if each.role == "pairs":
            yield f"{where}: requests that are split between the two instances of a pair"
        held = replace(each.mapping, draft_tokens=drafts_of(each))
        rule = str(broken_rules(each.setup, held)[engine][0])
        if rule:
            yield f"{where}: {rule}"
        if each.hold_steps and not hold_settings(engine, each.hold_steps):
            yield f"{where}: prefill delay of {each.hold_steps} steps at most, until every rank can take a prompt"
        if each.mapping.dcp > 1 and engine == "trtllm" and each.role != "decode":
            yield f"{where}: Helix outside of decode pools"
        if each.mapping.pcp > 1 and each.role != "prefill":
            yield f"{where}: PCP outside of prefill pools"
        if engine == "trtllm" and each.setup.precision.cache.name == "bf16" and format_of(each.setup) in OWN_CACHES:
            said = "kv_cache_config.dtype has no bf16, and its auto is the format that the checkpoint names"
            yield f"{where}: a bf16 KV cache of a checkpoint in {format_of(each.setup)}: {said}, such as fp8"
        for said in _refused_tiers(each, engine):
            yield f"{where}: {said}"
        if each.mapping.dp_attn > 1 and not each.setup.model.is_moe:
            yield f"{where}: attention DP of a dense model; instances of fewer GPUs do the same"


def _encoders(workers: Sequence[Workers], engine: str) -> Iterator[str]:
    """Why a launcher starts no encode pools: SGLang alone has options for them, and a router that needs none."""
    if canonical_name(engine) != "sglang" and any(each.role == "encode" for each in workers):
        yield f"encode pools of {engine}: {_NO_ENCODERS.get(canonical_name(engine), 'none of its options is known')}"


#: Launchers whose encode pools are known, and why they are not written.
_NO_ENCODERS = {
    "vllm": "its encoder disaggregation has an example connector over shared storage, and a proxy script in place of a "
    "router that is stable for one instance of each pool (docs.vllm.ai, examples/disaggregated/disaggregated_encoder)",
    "llm_d": "encoder-cache transfer asks for a build of vLLM of its own (llm-d guides, multimodal-serving)",
    "dynamo": "its workers for E/P/D take media through a processor of their own (docs.nvidia.com/dynamo, multimodal)",
}


def _refused_tiers(workers: Workers, engine: str) -> Iterator[str]:
    """Reasons why workers cannot keep prompts in tiers below HBM."""
    for tier in workers.tiers:
        if tier not in ENGINES[engine].tiers:
            yield f"prompts in {tier}; allowed: {', '.join(ENGINES[engine].tiers)}, as other stores are services apart"
        elif not tier_bytes(workers, tier):
            yield f"prompts in {tier}, whose size kv_tiers of {workers.setup.system.name} does not state"
    if "ssd" in workers.tiers and engine == "sglang" and workers.mapping.dcp > 1:
        yield "prompts in ssd under DCP, which its storage back ends refuse"
    if workers.tiers == ("ssd",) and "ssd" in ENGINES[engine].tiers:
        yield "prompts in ssd without dram, through which it moves them"


def _reasons_of_pairs(workers: Sequence[Workers], engine: str) -> Iterator[str]:
    """Reasons of pairs of pools that send each other caches."""
    sides = ([each for each in workers if each.role == role] for role in ("prefill", "decode"))
    for prefill, decode in product(*sides):
        ends = f"{prefill.label} {degrees_of(prefill)} to {decode.label} {degrees_of(decode)}"
        where = f"{ends} of {ENGINES[engine].title}"
        for said in _refused(prefill, decode, engine):
            yield f"{where}: {said}"


def _refused(prefill: Workers, decode: Workers, engine: str) -> Iterator[str]:
    send, take = int(prefill.mapping.tp_attn), int(decode.mapping.tp_attn)
    caches = [each.setup.precision.cache.name for each in (prefill, decode)]
    if caches[0] != caches[1]:
        yield f"caches in {caches[0]} and {caches[1]}"
    if engine == "trtllm":
        return  # it maps blocks of any TP and PP onto any other (docs/source/features/disagg-serving.md)
    if max(send, take) % min(send, take):
        yield f"attention TP {send} and {take}, of which none divides the other"
    if engine == "sglang" and decode.mapping.pp not in (1, prefill.mapping.pp):
        yield f"{decode.mapping.pp} decode stages; allowed: 1, or as many as prefill, {prefill.mapping.pp}"
    if engine == "vllm" and decode.mapping.pp > 1:
        yield "pipeline stages in decode, which its NIXL connector refuses to receive into"
    if engine == "vllm" and prefill.mapping.pp > 1 and prefill.setup.model.has_windows:
        yield "pipeline stages in prefill of a model with windows, which its NIXL connector refuses to send from"
    heads = [getattr(kind.attention, "kv_heads", 0) for kind in prefill.setup.model.kinds]
    if engine == "vllm" and send > take and 0 < min(heads) < send:
        yield f"attention TP {send} above {take} with {min(heads)} KV heads: its NIXL connector refuses copied heads"
    if engine == "vllm" and send != take and prefill.setup.model.state_bytes:  # nixl_connector_compatibility, note 5
        yield f"attention TP {send} and {take}: its NIXL connector moves recurrent states between equal TP alone"
    yield from _refused_shares(prefill, decode, engine)


def _refused_shares(prefill: Workers, decode: Workers, engine: str) -> Iterator[str]:
    """Reasons why a cache cannot be sent to, or by, GPUs that share its tokens.

    vLLM: pull request 50611 (latents; the whole TP group or none). SGLang: docs/advanced_features/dcp.mdx.
    """
    first, second = prefill.mapping, decode.mapping
    if first.dcp == second.dcp == 1:
        return
    kinds = [kind.attention for kind in prefill.setup.model.kinds if kind.attention.shared_rows is not None]
    if not all(spec.kind in LATENT for spec in kinds):
        yield "shared caches that are no latents"
    if engine == "vllm":
        for each in (first, second):
            if each.dcp not in (1, each.tp_attn):
                yield f"DCP{each.dcp} of TP{each.tp_attn}; allowed: 1, or all of a TP group"
    if engine == "sglang" and first.dcp not in (1, second.dcp):
        yield f"DCP{first.dcp} and DCP{second.dcp}; allowed: 1 in prefill, or as in decode"
    if engine == "sglang" and first.pcp > 1:
        yield f"PCP{first.pcp} in prefill beside DCP in decode"


def degrees_of(workers: Workers) -> str:
    """Name the mapping of workers in short, such as ``DP8 EP8``."""
    return text_of(workers.mapping)
