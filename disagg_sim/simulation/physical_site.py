"""Make the site of a run from the physics: step times, memory and links of its instances."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.kv_tiers import loaded_bytes, rank_bandwidth, tier_of
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.passes.attention_ffn import half_setups
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import Streams
from disagg_sim.simulation.instance_variants import bare, ffn_of, placed, setup_of
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_memory import kv_blocks
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site, placed_slo
from disagg_sim.simulation.wishes import Limits
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

Tables = Callable[[Sharding, int], StepTable]


def physical_site(
    trace: Trace | TraceStream, deployment: ServedDeployment, *, at: Setup, slo: Slo, seed: int, options: RunOptions
) -> Site:
    """Make the site at which a deployment serves a trace.

    Takes ``slo`` (limits of requests from their arrival [s]).
    """
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
        blocks=cache(partial(_blocks, at, traffic.saved_states if options.prefix_cache else 0.0)),
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
    dram = tier_of(at.system, "dram")
    assert dram is not None
    each = loaded_bytes(at, tokens) / tokens / float(rank_bandwidth(at, bare(mapping), tokens, dram))
    return BLOCK_TOKENS * each, dram.latency_s


#: Step tables of the last setups used; a setup is told apart by identity, and kept so that it stays so.
_KEPT: list[tuple[Setup, dict[Any, StepTable]]] = []
_KEEP = 4
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
    """Look through the lengths of a trace.

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> trace = Trace(arrival=[0.0, 1.0], input_tokens=[100, 10**6], output_tokens=[50, 1])
    >>> expected_of(at, trace)
    Expected(prompt_tokens=100.0, output_tokens=50.0, longest=150, longest_prompt=100, saved_states=0.0)
    """
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


def _kept(at: Setup) -> dict[Any, StepTable]:
    """Step tables of a setup that runs before this one have built."""
    known = next((tables for kept, tables in _KEPT if kept is at), None)
    if known is None:
        known = {}
        _KEPT.append((at, known))
        del _KEPT[:-_KEEP]
    return known


def tables_of(usual: Setup, request: int, prompt: int) -> Tables:
    """Find step tables by mapping and sequences, each built once, for requests up to such lengths.

    Takes ``request`` and ``prompt`` [token]. Returns table of a mapping and its most sequences [1].
    """
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


def _blocks(usual: Setup, saved_states: float, mapping: Sharding, limits: Limits) -> int:
    planned = limits.mode == Mode.PREFILL_FIRST and limits.max_prompts < Limits().max_prompts
    at = setup_of(mapping, usual)
    return kv_blocks(
        at if ffn_of(mapping) is None else half_setups(at, at)[0],
        bare(mapping),
        max_sequences=limits.max_sequences,
        max_tokens=limits.token_budget,
        prompts=limits.max_prompts if planned else 0,
        saved_states=saved_states,
    )


def peak_flops(at: Setup) -> float:
    """Look up the dense peak of a GPU in the arithmetic of the model's feed-forward matrices. [FLOP/s]"""
    form = layer_of(at.model.layers[-1]).ffn.format(at.precision)
    return at.system.peak_flops[form.arithmetic]
