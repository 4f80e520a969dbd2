"""Describe the site of a run to a policy: what it may know before the run, limits of steps, and what instances serve.

Policies weigh the loads of unequal instances by the prompts a second that each prefills and the sequences that it
decodes in time, so that none of them is late while another idles. Both are taken from the step table at the mean
lengths of the expected traffic, as an operator measures them before a start.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.engine import SchedulerSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_scheduler
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.kv_transfer import post_share
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment, stage_tokens
from disagg_sim.simulation.instance_variants import own_setup, setup_of
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS, Mode, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import LinkSpec, Wire, instance_bandwidth
from disagg_sim.simulation.options import MOST_SEQUENCES, MOST_TOKENS
from disagg_sim.simulation.wishes import MAX_SEQUENCES, Limits, Role

#: Scheduler of the engines of a site unless a run names another.
SCHEDULER = "vllm_v1_2026"
#: Share of a TTFT limit that is left where the host takes all of it: a policy divides by what is left. [1]
LEAST_TTFT_SHARE = 1e-3


def placed_slo(slo: Slo, at: Setup) -> Slo:
    """Take the host time of a request off its TTFT limit, of which a thousandth is left at least."""
    return replace(slo, ttft=max(slo.ttft - at.request_host, LEAST_TTFT_SHARE * slo.ttft))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a policy may know before its run.

    Where instances have setups of their own, of unlike GPUs say, a mapping says which it is (``PlacedMapping``).
    """

    setup: Setup  # where all instances have one; else that of the first, and of the model
    deployment: ServedDeployment
    slo: Slo  # TTFT counts from when a request is placed: see ``placed_slo``
    link: LinkSpec
    link_bandwidth: float  # of one GPU, one way [B/s]
    link_latency_s: float  # [s]
    tables: Callable[[Sharding, int], StepTable]  # step times of an instance and its most sequences
    blocks: Callable[[Sharding, Limits], int]  # KV blocks that it holds [block]
    rng: Callable[[str], np.random.Generator]  # random stream of that name
    start_up_s: float  # from the wish to the first token served [s]
    flip_s: float  # a change of role takes the instance out of service that long [s]
    prompt_tokens: float  # mean of the traffic that is expected [token]
    output_tokens: float  # mean of the traffic that is expected [token]
    scheduler: SchedulerSpec = field(default_factory=partial(load_scheduler, SCHEDULER))  # of the engines here
    link_descriptor_s: float = 0.0  # posting a block of a tensor of a layer [s]
    scheduling: Scheduling = Scheduling.FCFS  # the order in which engines serve what waits
    swap_s: Callable[[Sharding], tuple[float, float]] | None = None  # see ``physical_site.swap_times``; None = no swap

    @property
    def request_host_s(self) -> float:
        """See ``Setup.request_host``. [s]"""
        return self.setup.request_host

    def table(self, mapping: Sharding, max_sequences: int = MAX_SEQUENCES) -> StepTable:
        """Step times of an instance that decodes up to ``max_sequences`` [1]."""
        return self.tables(mapping, max_sequences)

    def setup_of(self, mapping: Sharding) -> Setup:
        """What instances of a mapping serve, and on what."""
        return setup_of(mapping, self.setup)

    @property
    def handed_model(self) -> ModelSpec:
        """Layers whose caches instances hand over: those of a drafter, too."""
        return self.setup.cached_layers

    def wire(self, mapping: Sharding) -> Wire:
        """Links of a GPU of an instance: the network, where instances stand on several systems."""
        if (at := own_setup(mapping)) is not None:
            return self.link.wire(at, self.deployment.link_gpus)
        return Wire(self.link_bandwidth, self.link_latency_s, self.link_descriptor_s)

    def instance_bandwidth(self, mapping: Sharding) -> float:
        """Into or out of an instance, one way. [B/s]"""
        return instance_bandwidth(self.setup, mapping, self.wire(mapping).bandwidth)

    def kv_bytes(self, tokens: int) -> float:
        """Cache of ``tokens`` of one request, each element once, with what a drafter takes of it. [B]"""
        return self.setup.handed_bytes(tokens)

    def post_share_s(self, sender: Sharding, receiver: Sharding) -> float:
        """``kv_transfer.post_share`` over the links of the receiver. [s]"""
        return self.wire(receiver).descriptor_s * float(post_share(self.setup.model, sender, receiver))

    def instances(self, *parts: tuple[str, Role]) -> tuple[tuple[Sharding, Role], ...]:
        """Instances of parts of the deployment, one entry each: ``site.instances(("prefill", Role.PREFILL))``."""
        return tuple(
            (replicas.mapping, role)
            for part, role in parts
            for replicas in self.deployment.part(part)
            for _ in range(replicas.instances)
        )


def with_defaults(limits: Limits, scheduler: SchedulerSpec, system: SystemSpec, ranks: int) -> Limits:
    """Fill in what a policy leaves to the scheduler of its engine: a budget of 0 tokens, 0 sequences.

    Limits are of one attention rank (some schedulers share a budget among ``ranks``), with no more sequences by default
    than tokens.
    """
    usual = scheduler.defaults_on(system)
    shared = usual.token_budget if scheduler.budget_per_rank else max(usual.token_budget // ranks, 1)
    budget = limits.token_budget or shared
    return replace(limits, token_budget=budget, max_sequences=limits.max_sequences or min(usual.max_sequences, budget))


def of_ranks(limits: Limits, ranks: int) -> Limits:
    """Limits of an instance of which each attention rank has ``limits``, as those of vLLM hold for each."""
    if ranks == 1:
        return limits
    return replace(
        limits,
        token_budget=min(limits.token_budget * ranks, MOST_TOKENS),
        max_sequences=min(limits.max_sequences * ranks, MOST_SEQUENCES),
        max_prompts=min(limits.max_prompts * ranks, Limits().max_prompts),
        least_prefill=min(limits.least_prefill * ranks, MOST_TOKENS),
    )


#: Role of the instances of a part when they start.
ROLE_OF = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH, "pairs": Role.BOTH}


class StepLimits(Protocol):
    """Decode scheduling: how the instances of a role fill their steps."""

    def limits(self, mapping: Sharding, role: Role) -> Limits:
        """Rules and bounds of an instance, when it starts or takes the role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsPlanned:
    """Step limits as the parts of the deployment say, as usual for the policy where these are silent.

    The options of a policy count for each attention rank, as those of an engine do: an instance of n ranks has n times
    the sequences, tokens and prompts. What a part says counts for the whole instance, and holds before an option of the
    policy. ``batch`` of a part that decodes is the most sequences that run together, ``token_budget`` the most tokens
    of a step; the budget of the policy grows to a token and its drafts a sequence. ``batch`` of a prefill part means
    passes of so many whole prompts, of at most ``token_budget`` tokens, or of what they have at the expected lengths.
    A pipeline has what enters a stage at once (``stage_tokens``) packed from prompts, as engines chunk them there.
    A policy that prefills in chunks, or forms batches by a rule of its own, has no such passes: it keeps to its own
    limits there.
    """

    site: Site
    usual: StepLimits
    parts: tuple[str, ...]  # that the policy takes
    alone: bool = False  # one phase an instance: passes of whole prompts, no room for prefill in decode steps

    def limits(self, mapping: Sharding, role: Role) -> Limits:
        """See ``StepLimits``."""
        ranks, site = int(mapping.dp_attn), self.site
        own = with_defaults(self.usual.limits(mapping, role), site.scheduler, site.setup_of(mapping).system, ranks)
        usual = of_ranks(own, ranks)
        part = self._part(mapping, role)
        if part is None:
            return usual
        if part.hold_steps is not None:
            usual = replace(usual, hold_steps=part.hold_steps)
        if part.batch is None:
            return replace(usual, token_budget=part.token_budget or usual.token_budget)
        if role != Role.PREFILL:
            tokens = part.batch * (1 + int(mapping.draft_tokens))
            budget = part.token_budget or max(tokens, 1 if self.alone else usual.token_budget)
            staged = bool(mapping.chunk_tokens) and usual.mode == Mode.PREFILL_FIRST  # in chunks
            most = part.batch if staged else usual.max_prompts
            return replace(usual, token_budget=budget, max_sequences=part.batch, max_prompts=most)
        if not self.alone:
            return usual
        budget = part.token_budget or math.ceil(part.batch * self.site.prompt_tokens)
        resident = min(2 * mapping.pp * part.batch, MOST_SEQUENCES)  # in the pipeline and leaving, as in memory
        if mapping.pp > 1:  # engines leave chunked prefill on: passes are packed
            return Limits(token_budget=stage_tokens(mapping, part.batch, budget), max_sequences=resident)
        return Limits(mode=Mode.PREFILL_FIRST, token_budget=budget, max_prompts=part.batch, max_sequences=resident)

    def _part(self, mapping: Sharding, role: Role) -> Replicas | None:
        """Limits of the deployment for instances of a mapping; two entries of one mapping have equal limits."""
        own = (self.site.deployment.part(part) for part in self.parts if ROLE_OF[part] == role)
        return next((each for replicas in own for each in replicas if each.mapping == mapping), None)


#: Modes whose steps mix pieces of prompts with decodes.
MIXED = (Mode.CHUNKED, Mode.SLO_AWARE)


class ExpectedTraffic(NamedTuple):
    """Mean lengths of the traffic that is expected, and the limit that its tokens should keep."""

    prompt: float  # [token]
    output: float  # [token]
    tpot: float  # [s]

    @property
    def context(self) -> float:
        """Mean cache of a sequence in steady decode: ages are uniform. [token]"""
        return self.prompt + self.output / 2


def prefill_rate(table: StepTable, limits: Limits, traffic: ExpectedTraffic) -> float:
    """Compute the prompts of mean length that an instance prefills when its queue is full. [request/s]

    Whole prompts: those of a full pass over the time after which the next pass may start. Chunks: the token budget
    over a step without decodes, at the mean past of a chunk, ``(prompt - chunk)/2``.
    """
    prompt = max(round(traffic.prompt), 1)
    if limits.mode in MIXED:
        chunk = min(limits.token_budget, prompt)
        ranks = min(table.ranks, limits.token_budget)  # a prompt lives on one DP rank
        pieces = max(limits.token_budget // prompt, ranks)
        pieces = min(pieces, limits.max_prompts)
        tokens = min(limits.token_budget, pieces * chunk)
        if table.stages > 1:
            past = round((prompt - chunk) / 2)
            return tokens / table.pass_time(max(tokens // pieces, 1), past, pieces, packed=True)[1] / prompt
        return tokens / table.step_time(0, 0.0, tokens, (prompt - chunk) / 2, pieces) / prompt
    prompts = max(min(limits.max_prompts, limits.token_budget // prompt), 1)
    return prompts / table.pass_time(prompt, prompts=prompts)[1]


def decode_slots(table: StepTable, limits: Limits, blocks: int, traffic: ExpectedTraffic, *, shared: bool) -> int:
    """Count the sequences that an instance decodes at once within TPOT limit, memory and batch; at least 1. [1]"""
    beside = 1.0 / (prefill_rate(table, limits, traffic) * max(traffic.output, 1.0)) if shared else 0.0
    held = int(blocks * BLOCK_TOKENS / traffic.context)
    most = max(1, min(limits.max_sequences, table.max_sequences, held))

    def in_time(sequences: int) -> bool:
        return table.token_time(sequences, traffic.context) + sequences * beside <= traffic.tpot

    return most - bisect_left(range(most, 1, -1), True, key=in_time)
