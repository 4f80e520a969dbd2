r"""Write a pass of a design as a sum: the operators on the path of one micro-batch, and its waiting.

.. math:: T = \sum_o t_o + t_{hop} + t_{host} + t_{waiting}

* :math:`t_o`, an operator on the way of one micro-batch through all pipeline stages, layers and repetitions included;
  in chunked pipelined prefill (CPP), on the way of all chunks of a prompt through the slowest stage. An operator that
  hides behind another, as dispatch behind the shared expert, counts only where it is the longer one;
* :math:`t_{hop}`, the hand-over between stages;
* :math:`t_{host}`, host work: of the profile, or of the engine for every micro-batch, with launches that the GPU
  waits for;
* :math:`t_{waiting}`, what is left where there are stages: other micro-batches of the same step or pass at the slowest
  stage, or, in CPP, the other stages while the pipeline fills and drains.

Under a distribution of lengths there is a pass of prefill, or a mixed step, for every length that stands for it
(``designs.timed_prompts``); a latency holds each as often as its derivative by the time of that pass says.

The time of an operator is split over what it waits for: :math:`t_o = \sum_r r\,\partial t_o/\partial r + t_{latency}`
over the inverse rates r of compute, HBM, NVLink and NIC. Where compute and memory traffic overlap fully, the longer one
has all of the time. What no rate speeds up, such as kernel launches and the latency of links, is latency.

Source: physics page, sections 5, 7 and 8; ``certainty.contributions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.certainty.batching import Member, PassBatch, batch_passes, pass_times
from disagg_sim.certainty.contributions import (
    FACTOR,
    Contribution,
    OperatorKey,
    Timed,
    Wanted,
    contributions_in,
    derivative_of,
    shares_of,
    with_derivative,
)
from disagg_sim.certainty.designs import Designs, Prompt, Times, scores_of, times_of
from disagg_sim.certainty.elasticity import scaled
from disagg_sim.facts.load import load_profile
from disagg_sim.physics.passes.engine_time import without_host
from disagg_sim.physics.roofline import Cost
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator

#: Latencies of a design and the fields of ``Scores`` that hold them.
LATENCIES = ("ttl", "ftl")
#: What time goes by for: a rate of the hardware each, then what no rate speeds up.
RESOURCES = ("compute", "hbm", "nvlink", "nic", "latency", "host", "waiting")
#: Resource -> number of the hardware (``elasticity.PARAMETERS``) that it stands for.
_RATES = {"compute": "flops", "hbm": "hbm_bandwidth", "nvlink": "nvlink_bandwidth", "nic": "nic_bandwidth"}
#: Parts of a pass below this share of it are rounding. [1]
_ROUNDING = 1e-12


class CountedOperators(NamedTuple):
    """Operators that count in a pass, in passes that hold nothing else of it."""

    timed: Timed
    field: int  # of ``Times``
    hops: bool  # whether hand-over between stages is meant, or all other operators


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """A kind of pass whose time is part of a latency of designs."""

    name: str
    phase: str  # whose setup it runs under: "decode" or "prefill"
    designs: Designs  # timed at prompts of one length; in a decode step at none
    field: int  # of ``Times``: its time
    routes: tuple[CountedOperators, ...]

    @property
    def at(self) -> Setup:
        """What its kernels run under, on a host that takes no time."""
        return self.bare.at if self.phase == "decode" else self.bare.prefill_at

    @cached_property
    def time(self) -> Floats:
        """Of the pass, (rows,). [s]"""
        return np.asarray(times_of(self.designs)[self.field])

    @property
    def rows(self) -> int:
        """Designs. [1]"""
        return self.designs.rows.size

    @cached_property
    def bare(self) -> Designs:
        """The designs on hosts that take no time."""
        return _unhosted(self.designs)

    @cached_property
    def faster(self) -> dict[str, Setup]:
        """The setup with the step of a derivative on each rate of the hardware, by resource."""
        return {resource: scaled(self.at, parameter, FACTOR) for resource, parameter in _RATES.items()}


def weights_of(member: Member, whole: Designs, times: Times) -> dict[str, Floats]:
    """Passes of a kind in each latency of some designs, (rows,), from their times. [1]"""
    prompt = member.prompt
    counts = Times(1.0, 0.0, 0.0)
    if prompt is not None:
        counts = Times(0.0, prompt.fill, prompt.busy if whole.shared else 0.0, prompt.long, own=prompt.own)
    marked = [with_derivative(part, count) for part, count in zip(times, counts, strict=True)]
    scores = scores_of(whole, Times(*marked))
    return {name: derivative_of(getattr(scores, name)) + np.zeros(whole.rows.size) for name in LATENCIES}


def _unhosted(designs: Designs) -> Designs:
    return designs.under(decode=without_host(designs.at), prefill=without_host(designs.prefill_at))


def passes_of(designs: Designs) -> Iterator[Pass]:
    """Kinds of passes, one for each length of prompts; operators are those of a stage that runs one micro-batch."""
    if "decode" in designs.phases:
        yield _decode_step(designs)
    if "prefill" in designs.phases:
        yield from (_prefill(designs, prompt) for prompt in designs.prompts)


def batched_passes(designs: Sequence[Designs]) -> Iterator[tuple[PassBatch, Pass, Pass]]:
    """Kinds of passes of several designs, those of one kind in one, whose members follow; each also at light speed."""
    ideal = load_profile("ideal")
    for unit in batch_passes(designs):
        own, at, prefill_at = unit.designs, unit.designs.at, unit.designs.prefill_at
        same = own, own.under(decode=at.changed(profile=ideal), prefill=prefill_at.changed(profile=ideal))
        one, light = (_decode_step(each) if unit.phase == "decode" else _prefill(each, *each.prompts) for each in same)
        yield unit, one, light


def _apart(designs: Designs) -> Designs:
    """One stage with one micro-batch of decodes and of prefill tokens."""
    stages = designs.mapping.pp
    micro = np.minimum(stages, np.maximum(designs.batch, 1.0))
    return replace(
        designs,
        mapping=replace(designs.mapping, pp=np.ones_like(stages)),
        batch=np.ceil(designs.batch / micro),
        mixed_chunk=designs.mixed_chunk / micro,
    )


def _pass(name: str, phase: str, designs: Designs, apart: Designs, *, time: int, work: int) -> Pass:
    """A kind of pass: places in ``Times`` of its own time, and of that in which its operators stand ``apart``."""
    routes = tuple(
        CountedOperators(partial(pass_times, _unhosted(of), phase), field, hops)
        for of, field, hops in ((apart, work, False), (designs, time, True))
    )
    return Pass(name=name, phase=phase, designs=designs, field=time, routes=routes)


def _decode_step(whole: Designs) -> Pass:
    designs = whole.of_prompts()
    return _pass("decode step", "decode", designs, _apart(designs), time=0, work=0)


def _prefill(whole: Designs, prompt: Prompt) -> Pass:
    """The pass, or mixed step, of prompts of one length."""
    alone = Prompt(prompt.isl, prompt.past, tier=prompt.tier, lone=prompt.lone)
    designs, field, mixed = whole.of_prompts(alone), 1, whole.mode == "piggyback"
    if prompt.batch is not None:
        designs = replace(designs, prefill_batch=prompt.batch)
    mapping, batch = designs.prefill_mapping, designs.prefill_batch
    if mixed:
        apart = _apart(designs)
    elif designs.chunk_tokens[0]:
        apart, field = designs, 2  # the slowest stage is busy with its layers of all chunks
    else:
        prompts = np.ceil(batch / mapping.dp_attn)
        microbatches = np.minimum(mapping.pp, prompts)
        together = np.minimum(np.ceil(prompts / microbatches) * mapping.dp_attn, batch)
        one_stage = replace(mapping, pp=np.ones_like(mapping.pp))
        together = batch / microbatches if prompt.lone else together
        apart = replace(designs, prefill_mapping=one_stage, prefill_batch=together)

    name = "mixed step" if mixed else "prefill pass"
    return _pass(name, "prefill", designs, apart, time=1, work=field)


@dataclass(frozen=True, eq=False, kw_only=True)
class Summand:
    """One part of a pass; arrays have shape (rows,)."""

    key: tuple[str, str, str]  # name, kind, and format or kind of attention
    seconds: Floats
    operator: tuple[Contribution, CountedOperators] | None = None  # None = no operator: host, waiting


def summands_of(one: Pass) -> list[Summand]:
    """Parts of a pass, which add up to its time: operators, host, waiting."""
    at, total = one.at, one.time
    found = [
        Summand(key=each.key, seconds=each.seconds[route.field], operator=(each, route))
        for route in one.routes
        for each in contributions_in(one.phase, at, route.timed, _only(hops=route.hops))
        if np.any(each.seconds[route.field])
    ]
    rest = {"host": total - times_of(one.bare)[one.field]}
    left = total - sum(each.seconds for each in found) - sum(rest.values())
    rest["waiting"] = np.where(np.abs(left) < _ROUNDING * total, 0.0, left)
    return [*found, *(Summand(key=(name, name, ""), seconds=part) for name, part in rest.items() if np.any(part))]


def _only(*, hops: bool) -> Wanted:
    """Hand-over between stages, or all other operators."""
    return lambda operator: (operator.kind == "hop") == hops


class OperatorTotals(NamedTuple):
    """What an operator does in a pass, over all its calls, each as often as it counts; arrays of shape (rows,)."""

    by: dict[str, Floats]  # resource -> seconds that go by for it
    calls: Floats  # [1]
    flops: Floats
    hbm_bytes: Floats


def spent_of(summands: Sequence[Summand], one: Pass) -> dict[OperatorKey, OperatorTotals]:
    """What every operator of a pass spends its time on, by its key."""
    found: dict[OperatorKey, OperatorTotals] = {}
    for route in one.routes:
        mine = [each for each in summands if each.operator and each.operator[1] is route]
        calls, flops, hbm_bytes = (
            _carried(mine, one, route, quantity)
            for quantity in (lambda _: 1.0, lambda op: op.work.flops, lambda op: op.work.hbm_bytes)
        )
        resources = _resources(mine, one, route)
        for index, each in enumerate(mine):
            found[each.key] = OperatorTotals(resources[index], calls[index], flops[index], hbm_bytes[index])
    return found


def _resources(operators: Sequence[Summand], one: Pass, route: CountedOperators) -> list[dict[str, Floats]]:
    """Seconds of operators by what they go by for."""
    found: list[dict[str, Floats]] = [{} for _ in operators]
    left = [each.seconds for each in operators]
    for resource, faster in one.faster.items():
        keys = [each.key for each in operators]
        shares = shares_of(keys, one.rows, faster, route.timed, lambda _, cost: cost)[route.field]
        for index, share in enumerate(shares):
            found[index][resource] = 0.0 - share
            left[index] = left[index] + share
    for by, rest, each in zip(found, left, operators, strict=True):
        by["latency"] = np.where(np.abs(rest) < _ROUNDING * each.seconds, 0.0, rest)
    return found


def _carried(
    operators: Sequence[Summand], one: Pass, route: CountedOperators, quantity: Callable[[Operator], Any]
) -> Floats:
    """A quantity of operators over all their calls in a pass, (operators, rows)."""

    def marked(op: Operator, spent: Cost) -> Cost:
        return replace(spent, time=with_derivative(spent.time, quantity(op)))

    keys = [each.key for each in operators]
    return np.asarray(shares_of(keys, one.rows, one.at, route.timed, marked)[route.field])
