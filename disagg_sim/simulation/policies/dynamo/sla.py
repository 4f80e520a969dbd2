"""NVIDIA Dynamo's planner, SLA-based: sizes both pools for the load forecast for the next window.

The planner follows its public source and issue threads of 2026. In every window it forecasts the number of requests
and their input and output lengths, and divides by what one instance serves inside the SLO: a prefill instance serves
one prompt after the other; a decode instance serves the largest batch whose steps are inside the TPOT limit and whose
cache fits. The model of the engine is the step times of the simulation itself. If a single prompt takes n times the
TTFT limit, there are at least n prefill instances. At most ``MOST_CHANGES`` instances change at a time.

An instance that just carries the forecast leaves no time for a queue: attainment is lowest just below the rate that
takes one more instance, and rises with the load there. ``headroom`` raises the forecast.

With ``load=True`` the load planner decides between two windows and never goes below the sizes found here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from disagg_sim.domain import Slo
from disagg_sim.simulation.kernel.layout import BLOCK_TOKENS
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.options import (
    Checked,
    drain_option,
    headroom_option,
    least_option,
    max_sequences_option,
    option,
    period_option,
    queue_option,
    token_budget_option,
)
from disagg_sim.simulation.policies.dynamo.load import (
    DynamoLoad,
    LoadPlanner,
    planned,
    queue_of,
    queue_threshold_option,
    stepping,
)
from disagg_sim.simulation.policies.pools import Pools, Sizes, forecast_named, forecast_option
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.site import Site, StepLimits
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Role, Wish

#: Most instances that one decision starts or stops. [1]
MOST_CHANGES = 8


@register("dynamo_sla")
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSla(Checked):
    """Size both pools for the forecast load, within the GPUs of the deployment."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    window_s: float = period_option(180.0, "time between two decisions, and what each looks back on")
    forecast: str = forecast_option()
    headroom: float = headroom_option()
    load: bool = option(
        False, "the load planner decides between two windows; the sizes of the SLA planner are its floor"
    )
    load_period_s: float = period_option(5.0, "time between two decisions of the load planner")
    least: int = least_option()
    queue: str = queue_option()
    queue_threshold: float = queue_threshold_option()
    token_budget: int = token_budget_option()
    max_sequences: int = max_sequences_option()
    drain: bool = drain_option()

    def build(self, site: Site) -> Parts:
        """See ``Policy``."""
        steps = stepping(site, self.token_budget, self.max_sequences)
        queue = queue_of(self.queue, self.queue_threshold, steps, site)
        return planned(site, Planner(self, site, steps), steps, queue, self.window_s)


class Planner:
    """The forecasts, the sizes for them, and the load planner in between if there is one."""

    def __init__(self, options: DynamoSla, site: Site, steps: StepLimits) -> None:
        self._options, self._slo = options, site.slo
        self._pools = Pools(site, drain=options.drain)
        prefill, decode = self._pools.mappings
        here, there = steps.limits(prefill, Role.PREFILL), steps.limits(decode, Role.DECODE)
        self._prefill, self._decode = site.table(prefill, here.max_sequences), site.table(decode, there.max_sequences)
        self._budget, self._sequences = here.token_budget, there.max_sequences
        self._load: LoadPlanner | None = None
        self.period_s = options.window_s
        if options.load:
            load = DynamoLoad(
                period_s=options.load_period_s,
                least=options.least,
                token_budget=options.token_budget,
                max_sequences=options.max_sequences,
                drain=options.drain,
            )
            self._load, self.period_s = LoadPlanner(load, site, steps), options.load_period_s
        self._tokens = site.blocks(decode, there) * BLOCK_TOKENS
        self._rate, self._inputs, self._outputs = (forecast_named(options.forecast) for _ in range(3))
        self._due = options.window_s

    def resize(self, view: ClusterView) -> Sequence[Wish]:
        """See ``Autoscaler``."""
        if view.now < self._due:
            return () if self._load is None else self._load.resize(view)
        self._due += self._options.window_s
        window = view.window(self._options.window_s)
        self._rate.observe(window.arrivals / window.seconds)
        self._inputs.observe(window.input_tokens)
        self._outputs.observe(window.output_tokens)
        rate, inputs, outputs = self._rate.next(), self._inputs.next(), self._outputs.next()
        if math.isnan(inputs) or math.isnan(outputs):
            return ()
        load = rate * (1.0 + self._options.headroom)
        floor = Sizes(
            prefill_instances(self._prefill, load, inputs, self._slo, self._budget),
            decode_instances(self._decode, load, inputs, outputs, self._slo, tokens=self._tokens, most=self._sequences),
        )
        wanted = self._pools.within(view, floor, self._options.least)
        if self._load is not None:
            self._load.floor = wanted  # also while an instance starts, as the load planner has one do most of the time
        if self._pools.starting(view):
            return ()
        there = self._pools.there(view)
        if self._load is not None:
            wanted = Sizes(*(max(n, need) for n, need in zip(there, wanted, strict=True)))
            wanted = self._pools.within(view, wanted, self._options.least)
        reason = f"{rate:.3g} requests/s of {inputs:.0f}/{outputs:.0f} tokens: {there.words} to {wanted.words}"
        return self._pools.steps(view, wanted, reason)[:MOST_CHANGES]


def prefill_instances(table: StepTable, rate: float, inputs: float, slo: Slo, token_budget: int) -> int:
    """Instances that prefill ``rate`` [request/s] prompts of ``inputs`` [token] one after the other, in chunks. [1]

    Each attention rank has a prompt of its own and its share of the budget.
    """
    prompt, ranks = max(round(inputs), 1), table.ranks
    most = max(token_budget // ranks, 1)
    each = sum(
        table.step_time(0, 0.0, ranks * min(most, prompt - past), float(past), ranks) for past in range(0, prompt, most)
    )
    late = math.ceil(each / slo.ttft) if each > slo.ttft else 0
    return max(math.ceil(rate * each / ranks), late)


def decode_instances(
    table: StepTable, rate: float, inputs: float, outputs: float, slo: Slo, *, tokens: int, most: int
) -> int:
    """Instances that decode ``rate`` [request/s] inside the TPOT limit, each with the largest batch that can. [1]

    The mean context is input plus half the output; an instance holds ``tokens`` and ``most`` sequences.
    """
    context = inputs + outputs / 2
    low, high = 1, max(1, min(most, int(tokens / context)))
    while low < high:
        middle = (low + high + 1) // 2
        if table.token_time(middle, context) <= slo.tpot:
            low = middle
        else:
            high = middle - 1
    return math.ceil(rate * outputs * table.token_time(low, context) / low)
