"""Plan more pools than prefill and decode, by integer program within limits of FTL and TTL: no queues are counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError, above_zero, check_kinds, nearest, quoted
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_system
from disagg_sim.facts.model import ModelSpec
from disagg_sim.notebook import Shown
from disagg_sim.physics.encoder import EncodeStep, encode_step
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.plan import Plan, plan
from disagg_sim.planning.question import OBJECTIVES, PlanOptions, Size, systems_of, usable_systems, usual_precision
from disagg_sim.planning.sizing import mappings_of
from disagg_sim.search.deployment import Instance
from disagg_sim.search.grid import decode_grid, prefill_grid
from disagg_sim.search.splits import split_grid
from disagg_sim.serving.costs import Per
from disagg_sim.serving.filling import MatchOptions
from disagg_sim.serving.pool_names import POOLS, TWO, Images, pool_faults
from disagg_sim.serving.pools import Candidates, Member, PoolsPlan, plan_pools
from disagg_sim.workload.lengths import Lengths

USUAL = PlanOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsQuestion:
    """Which pools a request passes, within what latencies, and how much is to be served.

    Of ``prefill`` and ``decode`` alone, the plan is that of ``ds.plan``, with the same limits of requests.
    """

    pools: tuple[str, ...]  # of ``serving.pool_names.POOLS``
    size: Size  # a rate or GPUs
    images: Images | None = None  # of a request; None = no encode pool
    ftl_limit: float = 2.0  # of a configuration, encoding included, no queue [s]
    ttl_limit: float = 0.05  # of a configuration [s]
    ffn_system: str | None = None  # of the feed-forward pool; None = that of attention

    def __post_init__(self) -> None:
        """``InputError`` for a value out of range, or a pool that does not exist."""
        check_kinds(self)
        for name in self.pools:
            if name not in POOLS:
                raise InputError(f"pools: {quoted(name)}{nearest(name, POOLS)}; allowed: {', '.join(POOLS)}")
        above_zero("ftl_limit", self.ftl_limit, "s")
        above_zero("ttl_limit", self.ttl_limit, "s")

    @property
    def plain(self) -> bool:
        """Whether it asks for the pools of every plan."""
        return {*self.pools} == {*TWO} and self.images is None and self.ffn_system is None

    def check(self, models: Sequence[ModelSpec | str], lengths: Lengths, options: PlanOptions) -> None:
        """``InputError`` for what does not go together, one line a fault."""
        faults = list(pool_faults(self.pools, self.images, models, float(lengths.isl[0]), {}))
        split = "attention" in self.pools
        if self.ffn_system is not None and not split:
            faults.append("ffn_system: needs attention and ffn among the pools")
        if split and options.speculation is not None:
            faults.append("speculation: decode steps over attention and ffn pools have no drafts; use 'off'")
        if split and lengths.rank_imbalance:
            faults.append("rank_imbalance: decode steps over attention and ffn pools count DP ranks as even")
        told = {
            "users": self.size.users,
            "availability": options.availability,
            "popularity_drift": options.popularity_drift,
            "objective": None if options.objective != "joule" else "'joule'",
        }
        faults += [f"{name}: {value} is of plans of prefill and decode alone" for name, value in told.items() if value]
        if faults:
            raise InputError("; ".join(faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Equal instances of one pool; attention and feed-forward ranks of an instance are a pool each."""

    pool: str  # of ``serving.pool_names.POOLS``
    instances: int  # [1]
    gpus: int  # of all of them [1]
    setup: Setup = field(repr=False)
    mapping: Mapping | None  # of an instance; None = an encode pool, a request on one GPU
    batch: int  # requests of an instance [request]
    microbatches: int  # between attention and feed-forward ranks; 1 of other pools [1]
    rate: float  # of all instances at full rate [request/s]
    load: float  # that the plan asks of them [1]
    seconds: float  # a request: to encode it, FTL of prefill, or TTL [s]
    idle: float  # share of a step in which a rank waits for the other half; NaN of other pools [1]
    held_by: str  # limit that a larger batch of the instance would break, as ``PoolsPlan.held_by``


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MorePools(Shown):
    """Pools of a plan with what each does, and what other systems would do."""

    question: PoolsQuestion
    options: PlanOptions
    lengths: Lengths
    model: ModelSpec = field(repr=False)
    plan: PoolsPlan  # of the best systems
    stages: tuple[Stage, ...]  # in the order in which a request passes them; () of an infeasible plan
    others: tuple[tuple[str, PoolsPlan], ...]  # names of systems that are not the best, and their plan
    left_out: tuple[str, ...]  # systems that cannot be planned for, with the reason


def plan_more_pools(
    model: str | Path | ModelSpec,
    system: str | SystemSpec | Sequence[str | SystemSpec],
    lengths: Lengths,
    question: PoolsQuestion,
    options: PlanOptions = USUAL,
) -> MorePools | Plan:
    """Plan encode, attention and feed-forward pools beside prefill and decode.

    Every pool keeps up with one request rate; the integer program of ``plan_pools`` proves the counts. Requests come
    one after the other: limits hold for a configuration, and no queue is counted, unlike in ``plan``.

    Parameters
    ----------
    model : ModelSpec, str or Path
        Spec, name, or file.
    system : SystemSpec, str or sequence
        Of decode and attention pools: systems that compete.
    lengths : Lengths
        Of the requests; tokens of images are part of prompts.
    question : PoolsQuestion
        Pools, images, limits, size.
    options : PlanOptions
        System of encode and prefill pools, recipe, engine, objective, prices, mappings.

    Returns
    -------
    MorePools or Plan
        Infeasible limits are an answer, not an error. The ``Plan`` of ``ds.plan`` for prefill and decode alone.

    Raises
    ------
    InputError, UnknownNameError
        Pools that serve no request, options that are of two pools alone, unknown names.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> asked = PoolsQuestion(pools=("prefill", "attention", "ffn"), size=Size(gpus=64), ttl_limit=0.1)
    >>> found = plan_more_pools("deepseek_r1", "gb200_nvl72", ds.lengths(4096, 512), asked)
    >>> [stage.pool for stage in found.stages], found.plan.status, found.plan.ttl_s <= 0.1
    (['prefill', 'attention', 'ffn'], 'optimal', True)
    """
    if question.plain:
        size, limits = question.size, {"ttft": question.ftl_limit, "tpot": question.ttl_limit}
        options = replace(options, users=size.users)
        return plan(model, system, lengths, **limits, rate=size.rate, gpus=size.gpus, options=options)
    setups, left_out = usable_systems(model, systems_of(system), options)
    question.check([setups[0][0].model], lengths, options)
    found = [(_names(*pair), *_planned(*pair, lengths, question, options)) for pair in setups]
    feasible = [each for each in found if each[1].members] or found
    best = min(feasible, key=lambda each: _value(each[1], question))
    return MorePools(
        question=question,
        options=options,
        lengths=lengths,
        model=setups[0][0].model,
        plan=best[1],
        stages=best[2],
        others=tuple((names, plan) for names, plan, _ in found if plan is not best[1]),
        left_out=tuple(left_out),
    )


def _value(plan: PoolsPlan, question: PoolsQuestion) -> float:
    """What is least of the best plan: its cost, or what each request a second costs."""
    cost = plan.total_gpus if math.isnan(plan.cost) else plan.cost
    if question.size.gpus is None:
        return cost
    return -plan.request_rate if math.isnan(plan.cost) else cost / max(plan.request_rate, math.ulp(0.0))


def _names(decode: Setup, prefill: Setup) -> str:
    """Systems of the pools: ``h100_sxm``, or ``prefill a100_sxm_80gb, decode h100_sxm``."""
    if decode.system.name == prefill.system.name:
        return decode.system.name
    return f"prefill {prefill.system.name}, decode {decode.system.name}"


def _planned(
    decode: Setup, prefill: Setup, lengths: Lengths, question: PoolsQuestion, options: PlanOptions
) -> tuple[PoolsPlan, tuple[Stage, ...]]:
    """Plan for one pair of systems."""
    mappings = mappings_of((decode, prefill), options)
    given: list[Candidates] = []
    if question.images is not None:
        given.append(encode_step(prefill, **asdict(question.images)))
    given.append(prefill_grid(prefill, mappings[0], lengths))
    if "decode" in question.pools:
        given.append(decode_grid(decode, mappings[1], lengths))
    ffn = decode if question.ffn_system is None else _on(decode, question.ffn_system, options)
    if "attention" in question.pools:
        given.append(split_grid(decode, lengths, ffn=ffn, max_gpus=_most(decode, question.size.gpus)))
    plan = plan_pools(
        given,
        ftl_limit=question.ftl_limit,
        ttl_limit=question.ttl_limit,
        gpu_budget=question.size.gpus,
        required_rate=question.size.rate,
        per=_per(options),
        options=MatchOptions(kv_link_limit=options.max_nic),
    )
    return plan, tuple(_stages(plan, {"prefill": prefill, "decode": decode, "attention": decode, "ffn": ffn}))


def _on(decode: Setup, name: str, options: PlanOptions) -> Setup:
    """The setup on the system of the feed-forward pool, whose recipe writes no cache."""
    system = load_system(name)
    recipe = options.precision or usual_precision(decode.model, system)
    return setup(decode.model, system, recipe, decode.profile, options.engine)


def _most(at: Setup, budget: int | None) -> int | None:
    """Most GPUs of a split instance: no more than there are; None = as many as ``split_grid`` tries."""
    return None if budget is None or budget >= max(at.system.nvlink_domain, 64) else max(budget, 2)


def _per(options: PlanOptions) -> Per:
    return options.prices or "usd" if options.objective == "usd" else OBJECTIVES[options.objective]


def _stages(plan: PoolsPlan, setups: dict[str, Setup]) -> list[Stage]:
    """A row for each configuration of each pool."""
    rates: dict[str, float] = {}
    for member, count in plan.members:
        rates[_role(member)] = rates.get(_role(member), 0.0) + count * _rate(member)
    found: list[Stage] = []
    for (member, count), held in zip(plan.members, plan.held_by, strict=True):
        load = plan.request_rate / rates[_role(member)]
        for one in _one(member, held, setups):
            rate = count * _rate(member)
            found.append(replace(one, instances=count, gpus=count * one.gpus, rate=rate, load=load))
    return found


def _one(member: Member, held: str, setups: dict[str, Setup]) -> Iterator[Stage]:
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
    pool: str, at: Setup, mapping: Mapping | None, *, seconds: float, batch: int = 1, held_by: str = ""
) -> Stage:
    """One instance of a pool, whose rate and load are not known yet."""
    return Stage(
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


def _role(member: Member) -> str:
    if isinstance(member, EncodeStep):
        return "encode"
    return member.phase if isinstance(member, Instance) else "decode"


def _rate(member: Member) -> float:
    return member.request_rate if isinstance(member, EncodeStep) else member.request_rate_per_s
