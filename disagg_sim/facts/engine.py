"""Serving engines: the handful of named parameters in which vLLM, SGLang and TensorRT-LLM differ, and their schedulers.

One file per engine in ``hw_specs/engines/`` and per version of a scheduler in ``hw_specs/schedulers/``: what it admits,
what it keeps, and how much a step holds by default. Every value has its source there. Kernels are not told
here: their fits stand in ``hw_specs/efficiency/``, where ``name`` says whose are taken first. Of a server: what
it holds beside weights and cache, and the part of a GPU's memory that it may fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from disagg_sim.facts.faults import source_faults
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.schema import NOT_IN_FILE, Line, OneOf, Quantity, Range, faults_of_sources, sourced_spec, spec_of
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown
from disagg_sim.units import GB, TB

_Count = Annotated[int, Range(1, 10**7)]

#: What a prompt needs to be admitted: its own blocks at once, room for its first chunk, for the prompt, for the output.
ADMISSIONS = ("prompt", "first_chunk", "prompt_fits", "output_fits")

#: Which attention rank of an instance takes a request: that with the least waiting and running ones, the next in turn,
#: that with the fewest prompt tokens.
RANK_CHOICES = ("least_waiting", "in_turn", "fewest_tokens")

#: When a prompt finds the blocks of another: once these are taken for a step, or once the step has computed them.
PREFIX_FOUND = ("taken", "computed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefaults:
    """What a step holds where the operator says nothing, on GPUs of some memory and more."""

    memory: Annotated[float, Quantity("B", 0.0, 10 * TB)]  # from so much reported memory of a GPU on [B]
    token_budget: _Count  # decodes and prefill of one step [token]
    max_sequences: _Count  # running and in prefill together [1]


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec(Shown):
    """How an engine of some version forms its steps and uses its memory for KV blocks."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    admission: Annotated[str, OneOf(ADMISSIONS)]
    watermark: Annotated[float, Range(0.0, 0.5)]  # share of the blocks that an admission leaves free [1]
    prefix_found: Annotated[str, OneOf(PREFIX_FOUND)]  # what a prompt finds of those before it
    keeps_preempted: bool  # blocks of a preempted request stay in the prefix cache until others take them
    defaults: tuple[StepDefaults, ...]  # by memory, from 0 B on
    least_on: tuple[str, ...]  # words in names of systems whose defaults are the first ones, whatever their memory
    budget_per_rank: bool  # the token budget is that of each attention rank; else all of them share it
    rank_choice: Annotated[str, OneOf(RANK_CHOICES)]
    sources: Mapping[str, str]  # key -> where its value comes from

    def defaults_on(self, system: SystemSpec) -> StepDefaults:
        """What a step holds by default on a system: vLLM takes larger values on 70 GiB and more, but on the A100."""
        if any(word in system.name for word in self.least_on):
            return self.defaults[0]
        return [each for each in self.defaults if each.memory <= system.hbm_reported][-1]


def scheduler_of(path: Path, data: Mapping[str, Any], name: str) -> SchedulerSpec:
    """Read a scheduler from its file; every value needs a source."""
    spec = spec_of(SchedulerSpec, path, data, name)
    found = faults_of_sources(SchedulerSpec, spec.sources, data, ("title",))
    rows = [each.memory for each in spec.defaults]
    if not rows or rows[0] != 0.0 or any(low >= high for low, high in pairwise(rows)):
        found.append("defaults: memory must rise from 0 GB on, one line each")
    if found:
        raise spec_error(path, found)
    return spec


_Bytes = Annotated[float, Quantity("B", 0.0, 1000.0)]
_Memory = Annotated[float, Quantity("B", 0.0, 100 * GB)]
_Widths = Annotated[float, Range(0.0, 100.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of a server as its start-up log tells it; ``physics.memory`` counts with these numbers.

    The engine profiles one full step, of ``chunk_tokens`` tokens and ``max_running`` sequences, and leaves what the
    budget then still has to the KV cache. ``graphs`` and ``context`` lie outside the budget.
    """

    hidden_widths: _Widths  # hidden states of a token that a forward pass keeps at once [1]
    stage_widths: _Widths  # the same that a pipeline stage takes from and hands to others, on top [1]
    sampler_word: _Bytes  # of a word of the vocabulary and a sampled sequence [B]
    sampler_row: _Bytes  # of a word of the vocabulary and a streaming multiprocessor: buffers of top-k and top-p [B]
    activation_base: _Memory  # of activations, whatever the model [B]
    position_entry: _Bytes  # of an element of a table of rotary positions, of each kind of attention [B]
    non_torch: _Memory  # runtime and collective libraries of a single GPU [B]
    non_torch_tp2: _Memory  # the same from TP 2 on [B]
    non_torch_tp4: _Memory  # and from TP 4 on [B]
    non_torch_stages: _Memory  # the same of a pipeline without TP [B]
    graphs: _Memory  # CUDA graphs, captured after the KV pool was sized [B]
    context: _Memory  # what is in use before the server starts [B]
    fitted_on: tuple[str, ...]  # models whose rows the fitted numbers saw
    sources: Mapping[str, str]  # key -> where its value comes from

    def __post_init__(self) -> None:
        """``ValueError`` unless every number has a source."""
        told = [key for key in EngineMemory.__dataclass_fields__ if key not in ("sources", "fitted_on")]
        if found := source_faults(self.sources, told, needed=told):
            raise ValueError("; ".join(found))

    @property
    def outside(self) -> float:
        """What lies outside the budget of the server. [B]"""
        return self.graphs + self.context


_Time = Annotated[float, Quantity("s", 0.0, 1.0)]
_Steps = Annotated[int, Range(0, 10**6)]
_Ahead = Annotated[int, Range(0, 1)]
_Stretch = Annotated[float, Range(1.0, 10.0)]
_Share = Annotated[float, Range(1e-6, 1.0)]


class ContextExchange(NamedTuple):
    """How GPUs that share the tokens of a sequence send each other what they lack (``techniques.context.physics``)."""

    decode: str = "ag_rs"  # of ``DECODE_EXCHANGES``
    overlaps: bool = False  # whether the exchange of outputs hides behind scores, sequence by sequence
    prefill: str = "all_gather"  # of ``PREFILL_EXCHANGES``


#: Stages of a pipeline that have a layer more where layers do not divide: the first, the last, those before the last.
LONGER_STAGES = ("first", "last", "before_last")
#: Gather queries and reduce-scatter outputs; gather queries and send outputs with their sums; send outputs alone.
DECODE_EXCHANGES = ("ag_rs", "a2a", "helix")
PREFILL_EXCHANGES = ("all_gather", "ring")


def hold_settings(engine: str, steps: int) -> dict[str, Any]:
    """Find what tells an engine to hold prompts back until every rank of attention DP can take one, by flag or key.

    What plans, files of `launch` and their notes on what an engine cannot do go by; nothing where prompts do not wait,
    or where no setting of the engine that is written says so.
    """
    if steps and engine == "sglang":
        return {"--enable-prefill-delayer": True, "--prefill-delayer-max-delay-passes": steps + 1}
    if steps and engine == "trtllm":
        balance = {"enable_balance": True, "timeout_iters": steps + 1, "batching_wait_iters": 0}
        return {"attention_dp_config": balance}
    return {}


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Shown):
    """How an engine forms its steps, and what it adds to the time of its kernels."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    kernels: Annotated[str, OneOf(("vllm", "sglang", "trtllm"))]  # whose fitted kernels are taken first
    step_host: _Time  # host time of a step that the GPU waits for [s]
    sequence_host: _Time  # the same, for each sequence of the step: scheduling, sampling, detokenising [s]
    rank_host: _Time  # the same, for each doubling of the GPUs of an instance: synchronising its processes [s]
    prefill_stretch: _Stretch  # prefill over the sum of its kernels timed alone: gaps, clocks under lasting load [1]
    exchange_stretch: _Stretch  # of experts in decode, over its kernels between equal ranks: waits for the fullest [1]
    kernel_launch: _Time  # host time to launch one kernel outside a CUDA graph; a step cannot be faster [s]
    decode_graphs: bool  # steps of decodes alone run as CUDA graphs; steps with prefill never do
    request_host: _Time  # of a request before its prefill: HTTP, tokenising, scheduling [s]
    chunk_tokens: _Count  # most new tokens of an attention rank in a step [token]
    mixed_steps: bool  # chunks of prefill ride along with decodes; else a pass of prefill stops decode
    two_batch_overlap: bool  # prefill over expert ranks of several NVLink domains hides exchange behind work
    max_running: _Count  # most sequences of an attention rank in a step [request]
    ranks_wait: bool  # ranks of attention DP gather a prompt each before they prefill
    held_at_most: _Steps  # by default, where prompts are held back until every attention rank can take one [1]
    memory_utilisation: _Share  # share of the reported memory that weights, cache and activations may fill [1]
    cache_share: _Share  # share that the cache may fill of what weights and activations leave of it [1]
    reserves_output: bool  # admits a request when its whole cache fits; else more are admitted and some evicted
    cache_of_quantised: Annotated[str, OneOf(("bf16", "fp8"))]  # KV cache of a quantised checkpoint, by default
    #: Between GPUs that share cached tokens; whether that of a sequence hides behind the scores of the next (HOP-B).
    dcp_exchange: Annotated[str, OneOf(DECODE_EXCHANGES)] = ContextExchange().decode
    dcp_overlap: bool = ContextExchange().overlaps
    #: Between ranks that share prompts.
    pcp_exchange: Annotated[str, OneOf(PREFILL_EXCHANGES)] = ContextExchange().prefill
    longer_stages: Annotated[str, OneOf(LONGER_STAGES)] = LONGER_STAGES[0]  # that have the odd layers
    steps_ahead: _Ahead = 0  # that the scheduler forms before the one under way has ended; forecasts count them [1]
    exchange_wait: _Time = 0.0  # of a layer in decode, until ranks of attention DP that cut experts over them meet [s]
    expert_kernel: str = ""  # that multiplies experts where efficiency files have a row of it; "" = the fastest timed
    vendors: tuple[str, ...] = ()  # whose systems it runs on, and on no others; () = not limited to some
    captured_tokens: _Steps = 0  # of a rank in the largest decode step captured by default; 0 = no end known [token]
    uncaptured_launch: _Time | None = None  # host time to launch a kernel of a larger one; None = as any [s]
    captured: Annotated[int, NOT_IN_FILE] = 0  # as started; 0 = every step, as files of `launch` have it [token]
    memory: EngineMemory | None = None  # what a server holds beside weights and cache; None = as the profile assumes
    sources: Mapping[str, str]  # key -> where its value comes from

    @property
    def holds_prompts(self) -> bool:
        """Whether it is told to hold prompts back where a plan does so: see ``hold_settings``."""
        return bool(hold_settings(self.kernels, 1))

    def as_started(self, captured: int | None = None) -> EngineSpec:
        """The engine of a server that captures decode steps of so many tokens of a rank; None = its default."""
        return replace(self, captured=captured or self.captured_tokens)

    @property
    def sharing(self) -> ContextExchange:
        """How GPUs that share tokens exchange what they lack."""
        return ContextExchange(self.dcp_exchange, self.dcp_overlap, self.pcp_exchange)


#: Reads a serving engine from its file; every value needs a source.
engine_of = partial(sourced_spec, EngineSpec, ("title", "memory"))
