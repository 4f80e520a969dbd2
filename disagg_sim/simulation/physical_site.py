"""Make the site of a run from the physics; check what no schedule can change, memory and least latencies.

A grid asks how many bytes a batch needs; an engine fills what weights, activations and buffers leave. Both add up
``physics.memory.instance_bytes`` with the same live tokens, so a batch that a grid calls feasible has its blocks here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import InfeasibleError
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.cache_tiers import loaded_bytes, rank_bandwidth
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.memory import decode_bytes, instance_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.prompts import prompt_pass
from disagg_sim.physics.residents import Live, Residents, decode_live, decode_residents, prefill_live, prompt_residents
from disagg_sim.physics.setup import Setup
from disagg_sim.search.mappings import mappings_for, without_pcp
from disagg_sim.simulation.deployment import PARTS, Replicas, ServedDeployment, shares_of
from disagg_sim.simulation.engine import Streams
from disagg_sim.simulation.instance_variants import FfnPool, bare, ffn_of, placed, setup_of, split_of
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.metrics import ServiceClass, slo_of
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site, placed_slo
from disagg_sim.simulation.wishes import Limits
from disagg_sim.techniques.split.physics import half_setups, split_bytes, split_step
from disagg_sim.techniques.split.search import check_split
from disagg_sim.units import GB, GIB
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: Most tokens that the cache of one DP rank is taken to hold: 10,000 prompts of 100,000. [token]
LARGEST_CACHE = 2**30


def kv_blocks(
    at: Setup,
    mapping: Sharding,
    *,
    max_sequences: int = 256,
    max_tokens: int = 2048,
    prompts: int = 0,
    saved_states: float = 0.0,
) -> int:
    """Count the KV blocks of an instance: what its GPUs hold beside weights and the activations of a full step. [block]

    The blocks of all DP ranks form one pool, as if requests were spread evenly over them, and so do ``max_sequences``
    and ``max_tokens`` (of the largest step, drafts included). A layer with a sliding window keeps at most a window of
    each sequence. A step of no more tokens than sequences has decodes alone, which a pipeline works off in
    micro-batches; ``prompts`` 0 are steps of chunks.
    """
    ranks = float(np.max(mapping.dp_attn))
    queries = 1.0 + float(np.max(at.drafts(mapping)))
    live, imbalance = _live(at, mapping, max_sequences, max_tokens, prompts, queries)

    def fullest_bytes(blocks: int) -> float:
        tokens = float(blocks * BLOCK_TOKENS)
        residents = Residents(
            sequences=min(np.ceil(max_sequences / ranks), tokens),
            tokens=tokens,
            live=live.tokens,
            live_total=live.total,
            emitted=live.emitted,
            saved=tokens * saved_states,
            states=1.0 if prompts else queries,
        )
        return float(np.max(instance_bytes(at, mapping, residents, imbalance)))

    largest = LARGEST_CACHE // BLOCK_TOKENS
    falling = range(largest, 0, -1)
    low = largest - bisect_left(falling, True, key=lambda blocks: fullest_bytes(blocks) <= at.memory_limit)
    if low < 1:
        lacking = max(fullest_bytes(1) - at.memory_limit, 0.0)
        raise InfeasibleError(
            f"{at.model.name} on {at.system.name} leaves no memory for a KV cache: an instance of "
            f"{mapping.gpus:g} GPUs lacks {lacking / GIB:.1f} GiB per GPU with steps of {max_tokens} tokens; "
            "allowed: more GPUs an instance, or smaller steps"
        )
    if low == largest:  # windows alone: the cache of a sequence stops growing
        low = math.ceil(max_sequences / ranks * at.model.max_context / BLOCK_TOKENS)
    return int(ranks) * low


def _live(
    at: Setup, mapping: Sharding, max_sequences: int, max_tokens: int, prompts: int, queries: float
) -> tuple[Live, float]:
    """What the largest pass works on, and the imbalance of its experts."""
    profile, ranks = at.profile, mapping.dp_attn
    if prompts:
        law = prompt_residents(math.ceil(max_tokens / prompts))
        live = prefill_live(mapping, prompts, law, float(mapping.chunk_tokens), profile.resident_deviations)
        return live, profile.prefill_imbalance
    sampled = np.ceil(max_sequences / ranks) * queries
    if max_tokens <= max_sequences * queries:
        live = decode_live(mapping, float(max_sequences))
        every = Live(live.tokens * queries, live.total * queries, live.emitted * queries)
        return every, profile.decode_imbalance
    return Live(max_tokens / ranks, float(max_tokens), sampled), profile.prefill_imbalance


Tables = Callable[[Sharding, int], StepTable]


def physical_site(
    trace: Trace | TraceStream, deployment: ServedDeployment, *, at: Setup, slo: Slo, seed: int, options: RunOptions
) -> Site:
    """Make the site at which a deployment serves a trace."""
    traffic = expected_of(at, trace)
    wire = options.link.wire(at, deployment.link_gpus, shared_spine=True)
    return Site(
        setup=at,
        deployment=deployment,
        slo=placed_slo(slo, at),
        link=options.link,
        link_bandwidth=wire.bandwidth,
        link_latency_s=wire.latency_s,
        link_descriptor_s=wire.descriptor_s,
        tables=tables_of(at, traffic.longest, traffic.longest_prompt),
        blocks=cache(partial(_blocks, at, traffic.saved_states if options.prefix_cache else 0.0, trace.least[0])),
        rng=Streams(seed),
        start_up_s=options.start_up_s,
        flip_s=options.flip_s,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        scheduler=load_scheduler(options.scheduler),
        scheduling=Scheduling[options.scheduling.upper()],
        swap_s=partial(swap_times, at, traffic) if options.preemption == "swap" else None,
    )


def swap_times(usual: Setup, traffic: Expected, mapping: Sharding) -> tuple[float, float]:
    """Time a KV block to the host's memory or back, and what comes before the first one of a sequence. [s], [s]

    A token takes its share of the cache of a mean request. Each GPU moves its own part over its own link.
    """
    at, tokens = setup_of(mapping, usual), traffic.prompt_tokens + traffic.output_tokens
    dram = at.system.tier("dram")
    assert dram is not None
    each = loaded_bytes(at, tokens) / tokens / float(rank_bandwidth(at, bare(mapping), tokens, dram))
    return BLOCK_TOKENS * each, dram.latency_s


#: Least range of step tables, so that most traces share them. [token]
_CONTEXT, _TOKENS = 131_072, 32_768


class Expected(NamedTuple):
    """What the requests of a trace are like that the model's context takes; the others are rejected, and shape nothing.

    Where there are none, one request that fills it.
    """

    prompt_tokens: float  # mean [token]
    output_tokens: float  # mean [token]
    longest: int  # prompt and output [token]
    longest_prompt: int  # [token]
    saved_states: float  # recurrent states that requests save in the KV memory for each of their tokens [1/token]


def expected_of(at: Setup, trace: Trace | TraceStream) -> Expected:
    """Look through the lengths of a trace."""
    most, step = at.model.max_context, checkpoint_tokens(at.model, at.precision)
    count = prompts = outputs = longest = longest_prompt = states = 0
    for window in trace.windows():
        whole = window.input_tokens + window.output_tokens
        rows = whole <= most
        prompts += int(window.input_tokens.sum(where=rows))
        outputs += int(window.output_tokens.sum(where=rows))
        longest = max(longest, int(whole.max(where=rows, initial=0)))
        longest_prompt = max(longest_prompt, int(window.input_tokens.max(where=rows, initial=0)))
        states += int((whole // step).sum(where=rows))
        count += int(np.count_nonzero(rows))
    if not count:
        count, prompts, outputs, longest, longest_prompt, states = 1, most - 1, 1, most, most - 1, most // step
    saved = states / (prompts + outputs) if at.model.recurrent_bytes else 0.0
    return Expected(prompts / count, outputs / count, longest, longest_prompt, saved)


@lru_cache(maxsize=4)
def _kept(at: Setup) -> dict[Any, StepTable]:  # noqa: ARG001 - told apart by identity
    """Step tables of one of the last setups used, which runs before this one have built."""
    return {}


def tables_of(usual: Setup, request: int, prompt: int) -> Tables:
    """Find step tables by mapping and most sequences, each built once, for requests up to such lengths [token]."""
    known: dict[int, dict[Any, StepTable]] = {}  # by setup, each of which a mapping holds

    def table(mapping: Sharding, max_sequences: int) -> StepTable:
        at, longest, most = setup_of(mapping, usual), request, prompt
        cut = placed(mapping, None, ffn_of(mapping))
        tables = known[id(at)] if id(at) in known else known.setdefault(id(at), _kept(at))
        if longest > _CONTEXT or most > _TOKENS:  # no instance computes what it cannot hold
            holds = at if ffn_of(mapping) is None else half_setups(at, at)[0]
            held = kv_blocks(holds, bare(mapping), max_sequences=1, max_tokens=1) * BLOCK_TOKENS
            longest, most = min(longest, held), min(most, held)
        longest, most = _power_of_two(longest, _CONTEXT), _power_of_two(most, _TOKENS)
        key = (cut, max_sequences, longest, most)
        if key not in tables:
            tables[key] = StepTable.build(at, cut, max_sequences=max_sequences, max_context=longest, max_tokens=most)
        return tables[key]

    return table


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _blocks(usual: Setup, saved_states: float, shortest: int, mapping: Sharding, limits: Limits) -> int:
    """KV blocks of an instance, which must have room for the shortest prompt [token]."""
    planned = limits.mode == Mode.PREFILL_FIRST and limits.max_prompts < Limits().max_prompts
    at = setup_of(mapping, usual)
    found = kv_blocks(
        at if ffn_of(mapping) is None else half_setups(at, at)[0],
        bare(mapping),
        max_sequences=limits.max_sequences,
        max_tokens=limits.token_budget,
        prompts=limits.max_prompts if planned else 0,
        saved_states=saved_states,
    )
    if (held := found // int(mapping.dp_attn) * BLOCK_TOKENS) < shortest:
        raise InfeasibleError(
            f"the caches of {at.model.name} on {mapping.gpus:g} x {at.system.name} hold {held:,} tokens beside room "
            f"for {limits.max_sequences} sequences, fewer than the shortest prompt, {shortest:,}; allowed: a smaller "
            "'batch' of the instances, or more GPUs"
        )
    return found


def peak_flops(at: Setup) -> float:
    """Look up the dense peak of a GPU in the arithmetic of the model's feed-forward matrices. [FLOP/s]"""
    form = layer_of(at.model.layers[-1]).ffn.format(at.precision)
    return at.system.peak_flops[form.arithmetic]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLatency:
    """Latencies of the shortest request of a trace, served alone."""

    ttft: float  # [s]
    tpot: float  # 0 where a request has a single token [s]
    prompt: int  # of the shortest prompt [token]


def require_fit(at: Setup, deployment: ServedDeployment) -> None:
    """Raise when a mapping of the deployment is impossible, or the model with one token does not fit."""
    for part in PARTS:
        for replicas in getattr(deployment, part):
            own = replicas.setup or at
            if replicas.ffn is not None:
                _require_split(own, replicas, replicas.ffn, f"{deployment.name}.{part}")
                continue
            mappings_for(own, replicas.mapping if part == "prefill" else without_pcp(replicas.mapping))
            need = float(np.max(decode_bytes(own, replicas.mapping, 1, cached=decode_residents(1, 0))))
            if need > own.memory_limit:
                raise InfeasibleError(
                    f"{deployment.name}.{part}: {own.model.name} in {own.precision.name} does not fit on "
                    f"{replicas.mapping.gpus} x {own.system.name}: with a single cached token it needs "
                    f"{need / GB:.1f} GB a GPU and may use {own.memory_limit / GB:.1f} GB, "
                    f"{(need - own.memory_limit) / GB:.1f} GB too few"
                )


def _require_split(at: Setup, replicas: Replicas, ffn: FfnPool, where: str) -> None:
    """See ``require_fit``; of instances with a feed-forward pool."""
    theirs, split = ffn.setup or at, split_of(replicas.mapping, ffn)
    check_split(at, split)
    held = split_bytes(at, theirs, split, sequences=1, cached=decode_residents(1, 0))
    for name, need, own in zip(("attention", "feed-forward"), held, (at, theirs), strict=True):
        if (most := float(np.max(need))) > own.memory_limit:
            raise InfeasibleError(
                f"{where}: the {name} part of {at.model.name} in {own.precision.name} does not fit: with a sequence a "
                f"micro-batch of a single cached token each it needs {most / GB:.1f} GB a GPU of {own.system.name} and "
                f"may use {own.memory_limit / GB:.1f} GB, {(most - own.memory_limit) / GB:.1f} GB too few"
            )


def least_latencies(at: Setup, replicas: Iterable[Replicas], trace: Trace | TraceStream) -> LeastLatency:
    """What the fastest instance needs for the trace's shortest prompt, host included, and first decode step, alone.

    Of a step that verifies drafts all may be accepted.
    """
    prompt, output = trace.least
    computed = 1 if trace.prefix is not None else prompt
    pairs = [(each.setup or at, each.mapping) for each in replicas]
    first = [
        prompt_pass(own, cut, batch=1, isl=computed, past=0, chunk_tokens=cut.chunk_tokens).ftl
        for own, cut in pairs
        if ffn_of(cut) is None
    ]
    steps = []
    for own, mapping in pairs:
        if (ffn := ffn_of(mapping)) is None:
            time = decode_step(own, mapping, batch=1, context=prompt).time
        else:
            alone = split_of(mapping, ffn)._replace(microbatches=1)
            time = split_step(own, ffn.setup or own, alone, sequences=1.0, context=float(prompt)).ttl
        steps.append(float(np.min(time)) / (1 + mapping.draft_tokens))
    single = output == 1
    ttft, tpot = at.request_host + float(np.min(first)), 0.0 if single else float(np.min(steps))
    return LeastLatency(ttft=ttft, tpot=tpot, prompt=prompt)


def require_possible(
    at: Setup,
    deployment: ServedDeployment,
    parts: tuple[str, ...],
    trace: Trace | TraceStream,
    slo: Slo,
    classes: Sequence[ServiceClass] = (),
) -> None:
    """Raise when not even the shortest request of a trace, or of one of its models, meets the SLO alone."""
    for share in shares_of(trace, deployment, parts, at):
        own, limits = share.deployment, slo_of(share.model, slo, classes)
        least = least_latencies(share.setup, [each for part in parts for each in own.part(part)], share.trace)
        for name, found, most, where in (
            ("TTFT", least.ttft, limits.ttft, "of"),
            ("TPOT", least.tpot, limits.tpot, "behind"),
        ):
            if found > most:
                raise InfeasibleError(
                    f"slo: no request of {share.trace.name} can meet {name.lower()}_s {most:g}; the least {name} on "
                    f"deployment {own.name!r} with no other request is {found:.4g} s, {where} a prompt of "
                    f"{least.prompt} tokens"
                )
