"""Make the site of a run from the physics: step times, memory and links of its instances."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from disagg_sim.domain import Mapping, Slo
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.blocks import layer_of
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.passes.attention_ffn import half_setups
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.engine import Streams
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_memory import kv_blocks
from disagg_sim.simulation.placed import bare, ffn_of, placed, setup_of
from disagg_sim.simulation.site import Site, placed_slo
from disagg_sim.simulation.wishes import Limits
from disagg_sim.workload.request_columns import Tokens
from disagg_sim.workload.trace import Trace

if TYPE_CHECKING:
    from disagg_sim.simulation.run import RunOptions

Tables = Callable[[Mapping, int], StepTable]


def physical_site(
    trace: Trace, deployment: ServedDeployment, *, at: Setup, slo: Slo, seed: int, options: RunOptions
) -> Site:
    """Make the site at which a deployment serves a trace.

    Parameters
    ----------
    trace
        Lengths that policies expect, and that step tables have to hold.
    deployment
        Its instances; all of one model.
    at
        Setup of those that have none of their own, and of the site.
    slo
        Limits of requests from their arrival. [s]
    seed
        Of all random streams.
    options
        Network, scheduler and order of its queues, times of a start and of a change of role.

    Returns
    -------
    Site
        For ``serve``.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> from disagg_sim.simulation.run import RunOptions
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", engine="kernels")
    >>> parts = ServedDeployment(name="one", gpus=1, colocated=(ds.Replicas(mapping=Mapping(), instances=1),))
    >>> trace = Trace(arrival=[0.0], input_tokens=[100], output_tokens=[50])
    >>> site = physical_site(trace, parts, at=at, slo=Slo(ttft=1.0, tpot=0.1), seed=0, options=RunOptions())
    >>> site.prompt_tokens, site.link_bandwidth / 1e9
    (100.0, 378.0)
    """
    inputs, outputs = _servable(at, trace)
    wire = options.link.wire(at, deployment.link_gpus, shared_spine=True)
    return Site(
        setup=at,
        deployment=deployment,
        slo=placed_slo(slo, at),
        link=options.link,
        link_bandwidth=wire.bandwidth,
        link_latency_s=wire.latency_s,
        link_descriptor_s=wire.descriptor_s,
        tables=tables_of(at, inputs, outputs),
        blocks=cache(partial(_blocks, at, _saved_states(at, inputs, outputs) if options.prefix_cache else 0.0)),
        rng=Streams(seed),
        start_up_s=options.start_up_s,
        flip_s=options.flip_s,
        prompt_tokens=float(inputs.mean()),
        output_tokens=float(outputs.mean()),
        scheduler=load_scheduler(options.scheduler),
        scheduling=Scheduling[options.scheduling.upper()],
    )


#: Step tables of the last setups used; a setup is told apart by identity, and kept so that it stays so.
_KEPT: list[tuple[Setup, dict[Any, StepTable]]] = []
_KEEP = 4
#: Least range of step tables, so that most traces share them. [token]
_CONTEXT, _TOKENS = 131_072, 32_768


def _servable(at: Setup, trace: Trace) -> tuple[Tokens, Tokens]:
    """Input and output lengths of the requests that the model's context takes: the others are rejected, and shape
    nothing. Where there are none, of one request that fills it. [token]
    """
    longest = at.model.max_context
    rows = trace.input_tokens + trace.output_tokens <= longest
    if not rows.any():
        return np.array([longest - 1]), np.array([1])
    return trace.input_tokens[rows], trace.output_tokens[rows]


def _kept(at: Setup) -> dict[Any, StepTable]:
    """Step tables of a setup that runs before this one have built."""
    known = next((tables for kept, tables in _KEPT if kept is at), None)
    if known is None:
        known = {}
        _KEPT.append((at, known))
        del _KEPT[:-_KEEP]
    return known


def tables_of(usual: Setup, inputs: Tokens, outputs: Tokens) -> Tables:
    """Find step tables by mapping and sequences, each built once, for requests of such lengths.

    Parameters
    ----------
    usual
        Setup of mappings that have none of their own.
    inputs, outputs
        Lengths of the requests. [token]

    Returns
    -------
    callable
        Table of a mapping and its most sequences [1].

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> table = tables_of(at, np.array([100]), np.array([50]))
    >>> table(Mapping(), 256) is table(Mapping(), 256)
    True
    """
    request, prompt = int((inputs + outputs).max()), int(inputs.max())
    known: dict[int, dict[Any, StepTable]] = {}  # by setup, each of which a mapping holds

    def table(mapping: Mapping, max_sequences: int) -> StepTable:
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


def _saved_states(at: Setup, inputs: Tokens, outputs: Tokens) -> float:
    """Count the recurrent states that requests save in the KV memory for each of their tokens, on average. [1/token]"""
    if not at.model.recurrent_bytes:
        return 0.0
    whole = inputs + outputs
    return float((whole // checkpoint_tokens(at.model, at.precision)).sum() / whole.sum())


def _blocks(usual: Setup, saved_states: float, mapping: Mapping, limits: Limits) -> int:
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
    """Look up the dense peak of a GPU in the arithmetic of the model's feed-forward matrices.

    Parameters
    ----------
    at
        Model, system and recipe.

    Returns
    -------
    float
        Of one GPU. [FLOP/s]

    Examples
    --------
    >>> import disagg_sim as ds
    >>> peak_flops(ds.setup("llama_3_1_8b", "h100_sxm", "fp8")) / 1e12
    1978.9
    """
    form = layer_of(at.model.layers[-1]).ffn.format(at.precision)
    return at.system.peak_flops[form.arithmetic]
