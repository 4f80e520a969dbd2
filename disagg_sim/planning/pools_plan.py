"""Plan more pools than prefill and decode, with their queues and the hand-over of caches, as ``planning.plan`` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from disagg_sim.choices import POOLS, TUNED_DELAY, TWO
from disagg_sim.domain import MAPPING_COLUMNS, Sharding
from disagg_sim.errors import InputError, check_kinds, check_word
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_system
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.notebook import Shown
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.answer import NONE_HOLDS, Plan, choose
from disagg_sim.planning.assurance import holding, surer
from disagg_sim.planning.candidates import FurtherPools, candidates_of, mappings_of
from disagg_sim.planning.choices import Grids, grids_of
from disagg_sim.planning.design import Design
from disagg_sim.planning.limits import TPOT, TTFT, Demand, Limit, limit_of
from disagg_sim.planning.plan import availability_of, costs_of, demand_of, plan, played_if_flattered, source_of
from disagg_sim.planning.pools import DecodeChoice, PrefillChoice
from disagg_sim.planning.question import PlanOptions, Size, systems_of, usable_systems, usual_precision
from disagg_sim.search.deployment import Instance
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.costs import JOULE
from disagg_sim.serving.pool_names import Images, pool_faults
from disagg_sim.serving.pool_program import MatchOptions
from disagg_sim.serving.pools import Candidates, Member, PoolsPlan, plan_pools
from disagg_sim.simulation.instance_variants import FfnPool, bare, ffn_of
from disagg_sim.techniques.encode.physics import EncodeStep, encode_step
from disagg_sim.techniques.split.search import SplitGrid, setups_of, split_grid
from disagg_sim.workload.lengths import Lengths
from disagg_sim.workload.trace import Trace

USUAL = PlanOptions()
#: What requests are drawn from: a case, or one ISL and OSL [token]; None = neither is known.
Source = TrafficCase | tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsQuestion:
    """Which pools a request passes, within what latencies, and how much is to be served.

    Of ``prefill`` and ``decode`` alone, the plan is that of ``ds.plan``, with the same limits of requests.
    """

    pools: tuple[str, ...]  # of ``choices.POOLS``
    size: Size  # a rate or GPUs
    images: Images | None = None  # of a request; None = no encode pool
    ttft: Limit = TTFT  # of requests, encoding included; seconds, or "500 ms@p99"
    tpot: Limit = TPOT  # of requests; likewise
    ffn_system: str | None = None  # of the feed-forward pool; None = that of attention
    confidence: float | None = None  # probability of the limits for which headroom is added; None = as asked [1]

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range, or a pool that does not exist."""
        for name in ("ttft", "tpot"):
            object.__setattr__(self, name, limit_of(getattr(self, name), name))
        check_kinds(self)
        for name in self.pools:
            check_word("pools", name, POOLS)

    @property
    def plain(self) -> bool:
        """Whether it asks for the pools of every plan."""
        return {*self.pools} == {*TWO} and self.images is None and self.ffn_system is None

    def check(self, models: Sequence[ModelSpec | str], lengths: Lengths, options: PlanOptions) -> None:
        """``InputError`` for what does not go together, one line a fault."""
        faults = list(pool_faults(self.pools, self.images, models, float(lengths.isl[0]), {}))
        split = "attention" in self.pools
        if options.hold_prompts != TUNED_DELAY:
            faults.append("hold_prompts: only co-located instances hold prompts back; use 'tuned'")
        if self.ffn_system is not None and not split:
            faults.append("ffn_system: needs attention and ffn among the pools")
        if split and options.speculation is not None:
            faults.append("speculation: decode steps over attention and ffn pools have no drafts; use 'off'")
        if split and self.confidence is not None:
            faults.append("confidence: attention and ffn pools have no error bars, as nobody has measured them")
        if self.confidence is not None and self.size.gpus is not None:
            faults.append("confidence: needs a rate or users; with gpus, headroom leaves spare capacity")
        if faults:
            raise InputError("; ".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInstances:
    """Equal instances of one pool; attention and feed-forward ranks of an instance are a pool each."""

    pool: str  # of ``choices.POOLS``
    instances: int  # that the load needs [1]
    gpus: int  # of all of them, spares included [1]
    setup: Setup = field(repr=False)
    mapping: Sharding | None  # of an instance; None = an encode pool, a request on one GPU
    batch: int  # requests of an instance [request]
    microbatches: int  # between attention and feed-forward ranks; 1 of other pools [1]
    rate: float  # of all instances at full rate [request/s]
    load: float  # that the rate of the plan asks of them [1]
    seconds: float  # a request: to encode it, FTL of prefill, or TTL [s]
    idle: float  # share of a step in which a rank waits for the other half; NaN of other pools [1]
    held_by: str  # limit that a larger batch of the instance would break, as ``PoolsPlan.held_by``
    spares: int = 0  # instances beside these, for a stated availability [1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPools(Shown):
    """Pools of a plan with what each does, and what other systems would do."""

    question: PoolsQuestion
    options: PlanOptions
    lengths: Lengths
    model: ModelSpec = field(repr=False)
    plan: PoolsPlan  # of the best systems; what the integer program says without queues where nothing serves
    answer: Plan = field(repr=False)  # the same as every plan has it
    stages: tuple[PoolInstances, ...]  # in the order in which a request passes them; () of an infeasible plan
    others: tuple[tuple[str, PoolsPlan], ...]  # names of systems that are not the best, and their plan
    left_out: tuple[str, ...]  # systems that cannot be planned for, with the reason
    holds: float | None = None  # probability that the limits hold; None = not asked for [1]

    @property
    def design(self) -> Design | None:
        """Its pools with their queues, as requests pass them; None of an infeasible plan."""
        return self.answer.best


def plan_more_pools(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    lengths: Lengths | Trace | TrafficCase,
    question: PoolsQuestion,
    options: PlanOptions = USUAL,
) -> PlannedPools | Plan:
    """Plan encode, attention and feed-forward pools beside prefill and decode.

    As ``plan``, with the same sizing, spares, users and objectives: a limit holds for a share of the requests, which
    come at random. TTFT counts the queue and the time of the encode pool, the queue of prefill, the hand-over of the
    cache and a step of decode, and TPOT the sequences in service. Whole and split decode instances compete.

    >>> import disagg_sim as ds
    >>> asked = PoolsQuestion(pools=("prefill", "attention", "ffn"), size=Size(gpus=64), tpot="100 ms@p99")
    >>> found = plan_more_pools("deepseek_r1", "gb200_nvl72", ds.lengths(4096, 512), asked)
    >>> [stage.pool for stage in found.stages], found.plan.status, found.design.tpot["p99"] <= 0.1
    (['prefill', 'attention', 'ffn'], 'feasible', True)
    """
    size, limits = question.size, {"ttft": question.ttft, "tpot": question.tpot}
    options = replace(options, users=size.users)
    if question.plain:
        found = plan(model, system, lengths, **limits, rate=size.rate, gpus=size.gpus, options=options)
        return surer(found, question.confidence)

    def asked(*, options: PlanOptions) -> PlannedPools:
        return _more_pools(model, system, lengths, question, options)

    def again(*, options: PlanOptions) -> Plan:
        return replace(asked(options=options).answer, ask=again)

    pools = asked(options=options)
    if question.confidence is None or pools.design is None:
        return pools
    sure = surer(replace(pools.answer, ask=again), question.confidence)
    pools = asked(options=replace(options, headroom=sure.options.headroom))
    return pools if pools.design is None else replace(pools, holds=holding(pools.answer))


def _more_pools(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    lengths: Lengths | Trace | TrafficCase,
    question: PoolsQuestion,
    options: PlanOptions,
) -> PlannedPools:
    """Plan further pools with the headroom of the options."""
    limits = {"ttft": question.ttft, "tpot": question.tpot}
    work, options = demand_of(lengths, **limits, rate=question.size.rate, options=options)
    setups, left_out = usable_systems(model, systems_of(system), options)
    question.check([setups[0][0].model], work.lengths, options)
    source = source_of(lengths, work)
    found = [(_names(*pair), *_planned(pair, work, source, question, options)) for pair in setups]
    best = min(found, key=lambda each: (not each[1].members, _value(each[1], question)))
    return PlannedPools(
        question=question,
        options=options,
        lengths=work.lengths,
        model=setups[0][0].model,
        plan=best[1],
        answer=best[2],
        stages=() if best[2].best is None else tuple(_stages(best[1], best[2].best)),
        others=tuple((names, plan) for names, plan, _ in found if plan is not best[1]),
        left_out=tuple(left_out),
    )


def _value(plan: PoolsPlan, question: PoolsQuestion) -> float:
    """What is least of the best plan: its cost for a rate, else what each request a second costs."""
    cost = plan.total_gpus if math.isnan(plan.cost) else plan.cost
    if question.size.gpus is not None and math.isnan(plan.cost):
        return -plan.request_rate
    return cost / (1.0 if question.size.rate else max(plan.request_rate, math.ulp(0.0)))


def _names(decode: Setup, prefill: Setup) -> str:
    """Systems of the pools: ``h100_sxm``, or ``prefill a100_sxm_80gb, decode h100_sxm``."""
    if decode.system.name == prefill.system.name:
        return decode.system.name
    return f"prefill {prefill.system.name}, decode {decode.system.name}"


def _planned(
    setups: tuple[Setup, Setup], work: Demand, source: Source, question: PoolsQuestion, options: PlanOptions
) -> tuple[PoolsPlan, Plan]:
    """Plan for the setups of decode and of prefill."""
    grids = grids_of(*setups, mappings_of(setups, options), work)
    further = _further(setups, work, question, options)
    every = [*setups, *(() if further.split is None else setups_of(further.split))]
    costs = costs_of(every, options)
    case = candidates_of(setups, work, grids, costs, options.max_nic, further)
    case = replace(case, drawn=options.objective == JOULE, availability=availability_of(options))
    answer = Plan(size=question.size, options=options, cases=(case,), source=source)
    chosen = choose([case], question.size, partial(played_if_flattered, answer, {}), others=0)
    answer = answer if chosen is None else replace(answer, best=chosen[0])
    if answer.best is None and choose([case], question.size, lambda design: design, others=0) is not None:
        return PoolsPlan(status="infeasible", message=NONE_HOLDS, binds="queues"), answer
    if answer.best is None:
        return _infeasible(_scored(grids, further), work, question, options), answer
    priced = options.objective in ("usd", "watt", JOULE)
    return _members_of(grids, further, answer.best, priced=priced), answer


def _further(setups: tuple[Setup, Setup], work: Demand, question: PoolsQuestion, options: PlanOptions) -> FurtherPools:
    """The pools beside prefill and whole decode instances, encoding on the system of prefill."""
    decode, prefill = setups
    encode = split = None
    if question.images is not None:
        encode = encode_step(prefill, **asdict(question.images))
    if "attention" in question.pools:
        ffn = decode if question.ffn_system is None else _on(decode, question.ffn_system, options)
        budget = question.size.gpus  # an instance has no more GPUs than there are, nor than ``split_grid`` tries
        most = None if budget is None or budget >= max(decode.system.nvlink_domain, 64) else max(budget, 2)
        split = split_grid(decode, work.lengths, ffn=ffn, max_gpus=most)
    return FurtherPools(encode=encode, split=split, whole="decode" in question.pools)


def _scored(grids: Grids, further: FurtherPools) -> list[Candidates]:
    """What the pools may be, as the integer program takes it."""
    found = (further.encode, grids.prefill, grids.decode if further.whole else None, further.split)
    return [each for each in found if each is not None]


def _on(decode: Setup, name: str, options: PlanOptions) -> Setup:
    """The setup on the system of the feed-forward pool, whose recipe writes no cache."""
    system = load_system(name)
    recipe = options.precision or usual_precision(decode.model, system)
    return setup(decode.model, system, recipe, decode.profile, options.engine)


def _infeasible(grids: Sequence[Candidates], work: Demand, question: PoolsQuestion, options: PlanOptions) -> PoolsPlan:
    """What binds: a limit that no configuration alone meets, or else the queues."""
    size, ttft, tpot = question.size, work.ttft, work.tpot
    rate = size.rate if size.users is None else size.users / (ttft.seconds + work.lengths.gaps * tpot.seconds)
    alone = plan_pools(
        grids,
        ftl_limit=ttft.seconds,
        ttl_limit=tpot.seconds,
        gpu_budget=size.gpus,
        required_rate=rate,
        options=MatchOptions(kv_link_limit=options.max_nic),
    )
    if not alone.members:
        return alone
    text = (
        f"no pools keep TTFT {ttft.percentile} within {ttft.seconds:g} s and TPOT {tpot.percentile} within "
        f"{tpot.seconds:g} s with their queues and the hand-over of caches; without both they would serve "
        f"{alone.request_rate:.4g} requests/s on {alone.total_gpus} GPUs"
    )
    return PoolsPlan(status="infeasible", message=text, binds="queues")


def _stages(plan: PoolsPlan, design: Design) -> Iterator[PoolInstances]:
    """A row for each pool; attention and feed-forward ranks of an instance are a pool each."""
    prefill, decode = design.first, design.pools[-1]
    ffn = ffn_of(decode.mapping)
    theirs = decode.setup if ffn is None or ffn.setup is None else ffn.setup
    setups = {"prefill": prefill.setup, "decode": decode.setup, "attention": decode.setup, "ffn": theirs}
    for (member, count), held, pool in zip(plan.members, plan.held_by, design.pools, strict=True):
        each = member.request_rate if isinstance(member, EncodeStep) else member.request_rate_per_s
        rate = pool.instances * each
        for one in _one(member, held, setups):
            whole = replace(one, instances=pool.instances, spares=pool.spares, gpus=count * one.gpus)
            yield replace(whole, rate=rate, load=plan.request_rate / rate)


def _one(member: Member, held: str, setups: dict[str, Setup]) -> Iterator[PoolInstances]:
    """One instance, a row of it or of each of its halves."""
    if isinstance(member, EncodeStep):
        yield _stage("encode", member.setup, None, seconds=member.latency)
    elif isinstance(member, Instance):
        yield _stage(
            member.phase,
            setups[member.phase],
            member.mapping,
            seconds=member.latency_s,
            batch=member.batch,
            held_by=held,
        )
    else:
        halves = (("attention", member.attention, member.attention_idle), ("ffn", member.ffn, member.ffn_idle))
        for pool, mapping, idle in halves:
            whole = _stage(pool, setups[pool], mapping, seconds=member.latency_s, batch=member.batch)
            mine = held if (pool == "ffn") == (held == "ffn_memory") else ""
            yield replace(whole, microbatches=member.microbatches, idle=idle, held_by=mine)


def _stage(
    pool: str, at: Setup, mapping: Sharding | None, *, seconds: float, batch: int = 1, held_by: str = ""
) -> PoolInstances:
    """One instance of a pool, whose rate and load are not known yet."""
    return PoolInstances(
        pool=pool,
        instances=1,
        gpus=1 if mapping is None else int(mapping.gpus),
        setup=at,
        mapping=mapping,
        batch=batch,
        microbatches=1,
        rate=math.nan,
        load=math.nan,
        seconds=seconds,
        idle=math.nan,
        held_by=held_by,
    )


def _members_of(grids: Grids, further: FurtherPools, design: Design, *, priced: bool) -> PoolsPlan:
    """List the pools of a design as instances, spares included, in the order in which a request passes them."""
    prefill, decode = design.first.choice, design.pools[-1].choice
    assert isinstance(prefill, PrefillChoice)
    assert isinstance(decode, DecodeChoice)
    counts = [pool.instances + pool.spares for pool in design.pools]
    members: list[tuple[Member, int]] = [] if further.encode is None else [(further.encode, counts[0])]
    held = ["" for _ in members]
    added = 0.0 if further.encode is None else further.encode.latency
    row, column = _place(grids.prefill, prefill)
    ftl, ttl = float(grids.prefill.latency[row, column]), float(decode.step[-1])
    rates = 1.0 / prefill.utilisation(1.0, 1), decode.most * decode.work.spare
    members.append((replace(grids.prefill.instance(row, column), request_rate_per_s=rates[0]), counts[-2]))
    split, whole = ffn_of(decode.mapping), "memory" if decode.seats == decode.memory_seats else "ttl"
    if split is None:
        grid = grids.decode
        member: Member = replace(grid.instance(*_place(grid, decode)), request_rate_per_s=rates[1])
    else:
        halves = further.split
        assert halves is not None, "a split instance is of such a grid"
        place = _place_of_split(halves, decode, split)
        member = replace(halves.instance(*place), request_rate_per_s=rates[1])
        if whole != "ttl":  # the pool whose memory a larger batch would break
            beyond = halves.attention_bytes[place[0], place[1] + 1 :] > halves.setup.memory_limit
            whole = "attention_memory" if not beyond.size or beyond[0] else "ffn_memory"
    members.append((member, counts[-1]))
    rate, each = design.rate, design.tokens_per_s / design.gpus
    return PoolsPlan(
        status="feasible",
        message=f"{rate:.4g} requests/s, {each:,.4g} output tokens/s/GPU, with queues",
        members=tuple(members),
        held_by=(*held, "", whole),
        request_rate=rate,
        tokens_per_s_per_gpu=each,
        cost=design.cost if priced else math.nan,
        ftl_s=ftl + added,
        ttl_s=ttl,
    )


def _place(grid: PhaseGrid, choice: PrefillChoice | DecodeChoice) -> tuple[int, int]:
    """Row and column of a choice in the grid that it was taken from."""
    own = bare(choice.mapping)
    alike = np.ones(len(grid.mappings), dtype=bool)
    for name in MAPPING_COLUMNS:
        alike &= np.broadcast_to(getattr(grid.mappings, name), alike.shape) == getattr(own, name)
    batch = int(choice.batch[-1])
    return int(np.flatnonzero(alike)[0]), int(np.flatnonzero(grid.batch == batch)[0])


def _place_of_split(grid: SplitGrid, choice: DecodeChoice, ffn: FfnPool) -> tuple[int, int]:
    """The same in a grid of splits."""
    pools, own = grid.splits, bare(choice.mapping)
    alike = pools.microbatches == ffn.microbatches
    for table, one in ((pools.attention, own), (pools.ffn, ffn.mapping)):
        for name in MAPPING_COLUMNS:
            alike = alike & (np.asarray(getattr(table, name)) == getattr(one, name))
    row = int(np.flatnonzero(alike)[0])
    return row, int(np.flatnonzero(grid.batch[row] == choice.seats)[0])
