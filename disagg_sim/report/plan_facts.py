"""Write what the best design of a plan does, rows of one table: throughput, caches, price, energy, spares, tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from disagg_sim.certainty.token_prices import TokenPrices
from disagg_sim.certainty.trust import Trust, shares_text
from disagg_sim.domain import ServingMode
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.assurance import Assurance
from disagg_sim.planning.design import Design, PlannedPool
from disagg_sim.planning.energy import Drawn
from disagg_sim.planning.question import PlanOptions
from disagg_sim.report.plan_rows import role_text
from disagg_sim.report.words import rate_text, seconds_band, seconds_text
from disagg_sim.search.layouts import SERVED
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.techniques.availability.law import Spares
from disagg_sim.techniques.prefill_delay.plan_effect import PrefillDelayEffect
from disagg_sim.techniques.prefix.plan import TierUse, tier_uses
from disagg_sim.techniques.registry import technique_named
from disagg_sim.units import DAY, GB, HOUR, MILLION
from disagg_sim.workload.lengths import Lengths

if TYPE_CHECKING:
    from disagg_sim.sweep.kv_links import HandedOver

#: Share of time from which a stretch that is shorter is not told. [1]
LEAST_SHORT = 1e-5
#: Error of a kind of layout, over all engines and ages, from which its part in the bands is told. [1]
WIDE = 0.3


def price_of_pools(pools: Iterable[PlannedPool], prices: Mapping[str, float]) -> float:
    """Add up the price of pools, given the price of some systems; NaN where that of one is not known. [USD/h]"""

    def each(system: SystemSpec) -> float:
        known = system.name in prices or bool(system.usd_per_gpu_hour)
        return usd_per_gpu_hour(system, prices) if known else math.nan

    return sum(gpus * each(at.system) for pool in pools for at, gpus in pool.parts)


def joules_of(pools: Iterable[PlannedPool], tokens: float) -> float:
    """Output tokens for a joule at the TDP of the GPUs, given their output [token/s]. [token/J]"""
    return tokens / sum(gpus * at.system.tdp for pool in pools for at, gpus in pool.parts)


def fact_rows(options: PlanOptions, design: Design, sure: Assurance | None) -> Iterator[tuple[str, str, str]]:
    """Write throughput, requests in flight, KV bandwidth, price and energy, each with what it rests on."""
    rests = "" if sure is None else shares_text(sure.throughput)
    each = design.tokens_per_s / design.gpus
    yield "throughput", f"{design.tokens_per_s:,.0f} output tokens/s, {each:,.0f} a GPU", rests
    if sure is not None and all(map(math.isfinite, sure.capacity)):
        most, low, high = (design.rate * each for each in (sure.most, *sure.capacity))
        rates = map(rate_text, (most, design.rate, low, high))
        told = "{} requests/s until a limit is missed, {} planned: the rest is for bursts (80 % band: {} to {})"
        yield "capacity", told.format(*rates), rests
    if sure is not None and sure.ttft_causes:
        causes = [f"{each.cause} {seconds_band(each.band)}" for each in sure.ttft_causes if each.band[1] > 0.0]
        yield (
            f"TTFT {design.work.ttft.percentile} by cause",
            ", ".join(causes),
            "80 % bands; that of the sum is narrower than their sum",
        )
    yield "hosts", "; ".join(_hosts(design)), f"{Trust.MEASURED}: GPUs of a host"
    yield "in flight", f"{design.in_flight:,.0f} requests on average", rests
    if design.mode == ServingMode.DISAGGREGATED:
        yield (
            "KV caches",
            f"{design.kv_rate / GB:.2g} GB/s in or out of a GPU",
            f"{Trust.MEASURED}: bytes of the caches at this rate",
        )
    yield from tier_rows(tier_uses(design), design.first.setup.system.name)
    yield from technique_rows(design.first.setup)
    yield from cost_rows(design.pools, design.tokens_per_s, options.prices)
    pools = [(role_text(pool.role), int(pool.mapping.gpus)) for pool in design.pools]
    yield from spares_rows(design.spares, pools, options.failures)


def technique_rows(at: Setup) -> Iterator[tuple[str, str, str]]:
    """Write the techniques of the registry that lengthen the steps of a setup, with their values."""
    for name, value in at.techniques:
        yield name.replace("_", " "), f"{value}: {technique_named(name).title}", f"{Trust.ASSUMED}: as asked for"


def checked_rows(sure: Assurance) -> Iterator[tuple[str, str, str]]:
    """Write how far the layouts have been checked, and what the time of each pool rests on."""
    for pool in sure.pools:
        layout = f"{Trust.ASSUMED}: {pool.layout}"
        if pool.layout.startswith(SERVED):
            far = ", which no forecast was compared with"
            if pool.error is not None:
                wide = "; the bands are from runs of this engine" * (pool.error > WIDE)
                far = f" on any engine, three quarters within {pool.error:.0%} of their forecast{wide}"
            if pool.most_sequences is not None and pool.sequences > pool.most_sequences:
                far += f"; up to {pool.most_sequences:,.3g} sequences a GPU are known, {pool.sequences:,.0f} here"
            more = pool.layout.removeprefix(SERVED)
            layout = f"{pool.points:,} operating points of its kind were served{far}{more}"
        yield role_text(pool.role), layout, shares_text(pool.rests_on)


def cost_rows(
    pools: Sequence[PlannedPool], tokens: float, prices: Mapping[str, float]
) -> Iterator[tuple[str, str, str]]:
    """Write what pools cost, and what they draw at their TDP, given their output [token/s]."""
    hour = price_of_pools(pools, prices)
    if math.isnan(hour):
        systems = {at.system.name for pool in pools for at, _ in pool.parts if not at.system.usd_per_gpu_hour}
        unknown = ", ".join(sorted(systems))
        yield "price", f"no market price of {unknown} is known: --price {unknown.partition(',')[0]}=USD_PER_HOUR", ""
    else:
        told = f"{Trust.ASSUMED}: {'as given' if prices else 'middle of the market range'}"
        million = hour / HOUR / tokens * MILLION
        yield "price", f"{hour:,.2f} USD/h, {million:.3g} USD for a million output tokens", told
    yield "energy", f"{joules_of(pools, tokens):.3g} output tokens/J", f"{Trust.ASSUMED}: GPUs at their TDP"


def _hosts(design: Design) -> Iterator[str]:
    """Hosts that a design fills, with what is left of them."""
    sizes = {at.system.name: at.system.host_gpus for pool in design.pools for at, _ in pool.parts}
    for name, (count, idle) in design.hosts.items():
        more = f", {idle} of these GPUs left for others" if idle else ", all GPUs in use"
        yield f"{count} host{'s' * (count > 1)} of {sizes[name]} {name} each{more}"


def cached_rows(
    lengths: Lengths, uses: Sequence[TierUse], system: str, *, passes: bool
) -> Iterator[tuple[str, str, str]]:
    """Write how much of a mean prompt caches hold, and what each tier does."""
    if lengths.cached is None or not passes:
        return
    past, whole = lengths.cached.mean_past, lengths.mean_isl
    told = f"{past:,.0f} of {whole:,.0f} tokens of a prompt; a pass computes {lengths.mean_new:,.0f}"
    yield "cached", told, f"{Trust.ASSUMED}: as asked for"
    yield from tier_rows(uses, system)


def prefill_delay_rows(found: PrefillDelayEffect | None) -> Iterator[tuple[str, str, str]]:
    """Write how long prefill is delayed, what that costs FTL and gains TTL."""
    if found is not None:
        told = f"up to {found.steps} decode steps; a pass takes {found.gathered:.1f}, every {found.between:.0f} steps: "
        told += f"TTL {seconds_text(found.ttl)}, not {seconds_text(found.ttl_without)}; "
        told += f"FTL and slot {seconds_text(found.ftl)}, not {seconds_text(found.ftl_without)}"
        yield "prefill delay", told, f"{Trust.ASSUMED}: a full queue, waits as serving.prefill_delay counts them"


def hand_over_rows(found: HandedOver | None) -> Iterator[tuple[str, str, str]]:
    """Write what the hand-over of a cache takes: its link, what posts it, its time, and FTL with it."""
    if found is None:
        return
    told = f"{found.size / GB:.2f} GB a prompt"
    told += f" over {found.link}" if found.link else ""
    if math.isfinite(found.bandwidth):
        told += f", {found.bandwidth / GB:.3g} GB/s a GPU: {seconds_text(found.wire)} on the wire, latency included"
    yield "hand-over", told, f"{Trust.ASSUMED}: a link that no other cache uses"
    posted = f"a GPU of the receiver posts {found.descriptors:,.0f} descriptors in {seconds_text(found.post)}"
    yield "", posted, f"{Trust.ASSUMED}: descriptors as the sweep or the profile costs them"
    whole = f"{seconds_text(found.time)} in all; FTL with it {seconds_text(found.ftl)}, which the FTL limit holds for"
    yield "", whole, ""


def tier_rows(uses: Sequence[TierUse], system: str) -> Iterator[tuple[str, str, str]]:
    """Write what prompts find in each tier that is named, and whether they load it sooner than they compute it."""
    for each in uses:
        load, again = seconds_text(each.load), seconds_text(each.recomputed)
        way = f"loading in {load} beats computing in {again}" if each.loads else f"computing in {again} beats {load}"
        room = (
            f"; an instance has room for {each.holds / MILLION:.3g} million tokens" if math.isfinite(each.holds) else ""
        )
        told = f"{100 * each.share:.3g} % of prompt tokens, {way if each.load else 'nothing to load'}{room}"
        rests = f"kv_tiers of {system}" if each.load else "as asked for"
        yield f"in {each.name}", told, f"{Trust.ASSUMED}: {rests}"


def spares_rows(
    found: Spares | None, pools: Sequence[tuple[str, int]], failures: str
) -> Iterator[tuple[str, str, str]]:
    """Write what spares give, what would be without them, and how often an instance stops."""
    if found is None:
        return
    *most, last = (f"{count} {name}" for count, (name, _) in zip(found.counts, pools, strict=True))
    counts = " and ".join([*([", ".join(most)] if most else []), last])
    without = f", {_share(found.without)} without" if any(found.counts) else ""
    told = f"{_share(found.availability)} of the time at full capacity with {counts} spare{without}"
    rests = f"{Trust.ASSUMED}: {failures}"
    yield "availability", told, rests
    days = (f"{mtbf / DAY:,.3g} days" if math.isfinite(mtbf) else "never" for mtbf in found.mtbf)
    hit = [each * gpus for each, (_, gpus) in zip(found.together, pools, strict=True)]
    stops = (
        f"{name} every {each} (blast radius {gpus} GPU{'s' * (gpus > 1)})"
        for (name, _), each, gpus in zip(pools, days, hit, strict=True)
    )
    yield "failures", f"an instance stops: {', '.join(stops)}; expected goodput {_share(found.capacity)}", rests


def _share(value: float) -> str:
    """``99.95 %``: one digit of what is missing, as rates of failure and restarts are known no better.

    Shorter than ``LEAST_SHORT`` are failures that the rates leave out: of sites, networks and people.
    """
    missing = 1.0 - value
    if missing < LEAST_SHORT:
        return f"more than {100 * (1.0 - LEAST_SHORT):g} %"
    return f"{100 * value:.{max(-math.floor(math.log10(missing)) - 2, 0)}f} %"


def price_rows(prices: TokenPrices | None) -> Iterator[tuple[str, str, str]]:
    """Write what a million tokens in, cached and out cost, where it was asked for."""
    if prices is None:
        return
    told = {"in": prices.new, "cached": prices.cached, "out": prices.output}
    said = ", ".join(f"{float(each):.3g} USD {name}" for name, each in told.items() if not math.isnan(float(each)))
    yield "tokens", f"{said}, a million each", f"{Trust.ASSUMED}: pools by what they do, at the stated utilisation"


def watts_rows(told: Drawn | None, gpus: int, rate: float, tokens: float) -> Iterator[tuple[str, str, str]]:
    """Write what the GPUs draw and what the building draws, where it was asked for, each with what it rests on."""
    if told is None:
        return
    label = Trust.INHERITED if told.inherited else Trust.FITTED
    each, joules = told.watts / gpus, told.watts / rate
    low, high = told.band
    said = f"{told.watts:,.0f} W of all GPUs ({low:,.0f} to {high:,.0f}), {each:.0f} W each; {joules:,.0f} J a request"
    yield "drawn", f"{said}, {tokens / told.watts:.3g} output tokens/J", f"{label}: power of kernels"
    if math.isnan(told.facility):
        yield "facility", "hosts, network and cooling are not known", ""
    else:
        said = f"{told.facility:,.0f} W, {tokens / told.facility:.3g} output tokens/J"
        yield "facility", said, f"{Trust.ASSUMED}: a model of hosts, network, supplies and PUE"
