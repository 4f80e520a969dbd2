"""Write the parts of a plan as rows of tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from disagg_sim.certainty.trust import LITTLE, shares_text
from disagg_sim.choices import LEAST_LOAD
from disagg_sim.domain import ServingMode
from disagg_sim.facts.speculation import Speculation
from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.setup import KERNELS, Setup
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import Assurance, Band
from disagg_sim.planning.design import Design, Percentiles, PlannedPool, PoolPart
from disagg_sim.planning.energy import drawn
from disagg_sim.planning.flips import LADDER, AnswerFlip, Changes
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pools import ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.ranking import NEAR, passed_over, was_run
from disagg_sim.report.verdicts import LEAST_GAIN, LEAST_PROBABILITY, gain_text
from disagg_sim.report.words import beside_text, rate_text, seconds_band, seconds_text, size_text, text_of
from disagg_sim.search.layouts import unsupported
from disagg_sim.units import GB
from disagg_sim.workload.lengths import Lengths

MODE_TEXT = {ServingMode.DISAGGREGATED: "disaggregated", ServingMode.COLOCATED: "co-located"}
#: Bounds of a pass or step, in words.
BOUND_TEXT = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "communication": "links between GPUs",
    "latency": "latencies",
}
#: Bounds in the plural.
PLURAL = ("communication", "latency")
#: Units of objectives other than GPUs.
UNITS = {"usd": "USD", "watt": "watt", "joule": "joule"}
#: Load from which a plan warns of bursts: 5 % more requests put TPOT at its limit, or let the prefill queue grow. [1]
NEAR_FULL = 0.95
#: Largest gain shown as equal, and most flips shown. [1]
SAME, MOST_FLIPS = 0.005, 4


def mapping_words(pool: PlannedPool) -> str:
    """Write the layout of a pool in short: ``TP8``, ``TP2 PP2, chunks of 4096``, ``(attention DP4 + FFN EP2)``."""
    if len(pool.halves) > 1:
        return f"({' + '.join(f'{role_text(part.role)} {_part_words(part)}' for part in pool.halves)})"
    held = f", prefill delay up to {steps} steps" if (steps := pool.replicas.hold_steps) else ""
    return _part_words(pool.halves[0]) + held


def _part_words(part: PoolPart) -> str:
    return text_of(part.mapping) + beside_text(int(part.mapping.chunk_tokens), int(part.mapping.draft_tokens))


def question_line(plan: Plan) -> str:
    """Write what was asked, in one line: model, systems, lengths, limits, size."""
    case, work = plan.cases[0], plan.work
    systems = ", ".join(dict.fromkeys(each.at.system.title for each in plan.cases))
    if len(plan.cases) > 3:
        systems = f"{len(plan.cases)} systems"
    limits = f"TTFT {_limit(work.ttft)}, TPOT {_limit(work.tpot)}"
    means = law_words(work.lengths, plan.options.speculation, case.at)
    over = f" over {', '.join(case.further.names)}" if case.further is not None else ""
    if (images := plan.options.images) is not None:
        kept = f", {images.cached:.3g} of them kept" if images.cached else ""
        means += f", {images.images} image{'s' * (images.images > 1)} of {images.height} x {images.width}{kept}"
    return f"{case.at.model.title} on {systems}{over}: {means}, {limits}, {size_text(plan.size)}"


def law_words(law: Lengths, drafter: Speculation | None, at: Setup | None) -> str:
    """Write what requests are like: lengths, cached share, its tiers and pieces, drafts, ranks."""
    means = f"{law.mean_isl:.0f} + {law.mean_osl:.0f} tokens{'' if law.constant else ' on average'}"
    if law.cached is not None:
        means += f" with {100 * (1 - law.mean_new / law.mean_isl):.3g} % of a prompt cached"
        tiers = [f"{100 * share:.0f} % of it in {name}" for name, share in law.cached.reuse.tiers if 0 < share < 1]
        tiers = tiers or [f"in {name}" for name in law.cached.reuse.below]
        piece = 1 if at is None else checkpoint_tokens(at.model, at.precision)
        if piece > law.cached.reuse.block_tokens:  # up to a saved state, or to the end of a compressed entry
            tiers.append(f"in whole pieces of {piece:,} tokens")
        means += f" ({', '.join(tiers)})" if tiers else ""
    if drafter is not None:
        means += f", drafts of {drafter.name}"
    if law.rank_imbalance and law.rank_imbalance != LEAST_LOAD:  # as plans take it
        means += f", DP ranks by {law.rank_imbalance}"
    return means


def verdict(plan: Plan, sure: Assurance | None) -> list[str]:
    """Write the answer: disaggregate or co-locate, how surely it holds, by how much it is better; or what binds."""
    best = plan.best
    if best is None:
        return [f"INFEASIBLE: {plan.infeasible}"]
    what, mode = "DISAGGREGATE" if best.mode == ServingMode.DISAGGREGATED else "CO-LOCATE", MODE_TEXT[best.mode]
    head = f"{best.gpus} GPU{' serves' if best.gpus == 1 else 's serve'} {best.rate:.4g} requests/s"
    moved = [] if plan.fewest is None else [moved_line(best, plan.fewest)]
    if plan.case.further is not None:  # with which instances of both phases do not compete
        return [head, *_odds_of_limits(best, sure), *moved, *_better(sure, mode)]
    if plan.other is None:
        (rest,) = {ServingMode.DISAGGREGATED, ServingMode.COLOCATED} - {best.mode}
        return [f"{what}: {head}; no {MODE_TEXT[rest]} deployment keeps the limits", *_odds_of_limits(best, sure)]
    chance = math.nan if sure is None else sure.probability
    either = not (plan.gain >= LEAST_GAIN and not chance < LEAST_PROBABILITY)
    head = f"EITHER WILL DO: {mode}, {head}" if either else f"{what}: {head}"
    other, gain = MODE_TEXT[plan.other.mode], gain_text(plan.gain)
    if abs(plan.gain - 1.0) < SAME:
        said = f"{head}; {other} is as good, and needs {plan.other.gpus}"
    elif (unit := UNITS.get(plan.options.objective)) is None:
        if plan.size.gpus is not None:
            said = f"{head}, {gain} times the {plan.other.rate:.4g} of the best {other} deployment"
        else:
            said = f"{head}; {other} needs {plan.other.gpus}, {gain} times as many"
    elif plan.size.gpus is not None:
        said = f"{head}, with {gain} times the output tokens per {unit} of the best {other} deployment"
    else:
        said = f"{head}; {other} {'draws' if unit == 'joule' else 'costs'} {gain} times as much"
    first = [f"{mode} is named first: {_why_first(plan, best)}"] if either else []
    return [said, *_odds_of_limits(best, sure), *first, *moved, *_better(sure, mode)]


def _better(sure: Assurance | None, mode: str) -> Iterator[str]:
    """Write the probability that the mode is better."""
    if sure is not None and not math.isnan(sure.probability):
        band = f"(80 % band: {_times(sure.gain)})"
        yield f"{mode} is the better one with a probability of {percent(sure.probability)} {band}"


def _odds_of_limits(design: Design, sure: Assurance | None) -> Iterator[str]:
    """Write the probability that the limits hold, and the rate at which it is 90 %."""
    if sure is None or math.isnan(sure.holds):
        return
    told = f"the limits hold at this rate with a probability of {percent(sure.holds)}"
    told += f" (TTFT {percent(sure.ttft_holds)}, TPOT {percent(sure.tpot_holds)})"
    if sure.holds >= LEAST_PROBABILITY:
        yield told
    elif sure.within_reach > LEAST_PROBABILITY:
        safe = sure.capacity[0] * design.rate  # the end of the 80 % band is the quantile of one less LEAST_PROBABILITY
        told += f", at {rate_text(safe)} requests/s with {percent(LEAST_PROBABILITY)}"
        yield f"{told}; --confidence {LEAST_PROBABILITY:g} plans for {percent(LEAST_PROBABILITY)}"
    else:
        yield f"{told}; no headroom makes it more than {percent(sure.within_reach)}"


def percent(chance: float) -> str:
    """Write a probability from finitely many samples, never as 0 or 100 %, and not rounded up: 89.6 % is below 90."""
    return f"{min(max(math.floor(100 * chance + 1e-9), 1), 99)} %"


def _why_first(plan: Plan, best: Design) -> str:
    """Write why one of two equal modes is first."""
    if best.mode == ServingMode.COLOCATED and plan.gain < LEAST_GAIN:
        return "one pool, and no caches to move"
    other = best if plan.other is None else plan.other
    if plan.gain < 1.0 + SAME and was_run(best) and not was_run(other):
        return "no run confirms the layouts of the other"
    if plan.gain < 1.0 + SAME and other.pools[-1].mapping.dp_attn == 1:
        return "the best co-located design is on another system"
    if plan.gain < 1.0 + SAME:
        return "ranks of co-located attention DP wait for each other, which no measurement has judged"
    if plan.gain < LEAST_GAIN:
        return f"its forecast is ahead, by less than {percent(LEAST_GAIN - 1.0)}"
    return f"its forecast is ahead, with a probability below {percent(LEAST_PROBABILITY)}"


def moved_line(best: Design, fewest: Design) -> str:
    """Compare the design of fewest joules with the design of fewest GPUs."""
    if best.pools == fewest.pools:
        return "the design of fewest GPUs draws least, too"
    own, small = (drawn(each).watts / each.tokens_per_s for each in (best, fewest))
    more = best.gpus - fewest.gpus
    gpus = f"{abs(more)} GPU{'s' * (abs(more) != 1)} {'more' if more > 0 else 'fewer'}" if more else "as many GPUs"
    return (
        f"against the design of fewest GPUs ({fewest.gpus}: {instances_text(fewest)}): {gpus}, "
        f"{own:.3g} J an output token in place of {small:.3g}, {1 - own / small:.1%} less"
    )


def instances_text(design: Design) -> str:
    """Write the pools of a design in short: ``13 x 1 GPU + 2 x TP4``."""
    return " + ".join(f"{_counted(pool)} x {mapping_words(pool)}" for pool in design.pools)


def _limit(limit: Limit) -> str:
    return f"{seconds_text(limit.seconds)} ({limit.percentile}{', default' * limit.default})"


def pool_rows(design: Design) -> Iterator[tuple[str, ...]]:
    """Write a row for each pool: instances, layout, GPUs, engine, batch, load, memory, what binds its pass or step."""
    for pool, part in ((each, part) for each in design.pools for part in each.halves):
        prompts = pool.role in ("encode", "prefill")
        batch = f"{pool.batch} {'prompt' if prompts else 'sequence'}{'s' * (pool.batch > 1)}"
        batch += "" if prompts else f" ({pool.sequences:.0f} running)"
        batch += f" in {part.microbatches} micro-batches" if part.microbatches > 1 else ""
        budget = getattr(pool.choice, "budget", 0)
        yield (
            role_text(part.role),
            f"{_counted(pool)} x {mapping_words(pool) if part.role == pool.role else _part_words(part)}",
            f"{part.gpus} x {part.setup.system.name}",
            part.setup.precision.name,
            part.setup.engine or KERNELS,
            batch + (f", {budget} tokens a step" if budget else ""),
            f"{pool.utilisation:.0%}",
            "" if math.isnan(part.memory) else f"{part.memory / GB:.0f} of {part.setup.memory_limit / GB:.0f} GB",
            BOUND_TEXT[pool.choice.bound] if math.isnan(part.idle) else f"waits {part.idle:.0%} of a full step",
        )


def _counted(pool: PlannedPool) -> str:
    """Write ``4``, or ``4 + 1`` with a spare instance."""
    return f"{pool.instances} + {pool.spares}" if pool.spares else f"{pool.instances}"


POOL_HEADER = ("pool", "instances", "GPUs", "precision", "engine", "batch", "load", "memory", "bound by")


def latency_rows(
    work: Demand, latencies: tuple[Percentiles, Percentiles], sure: Assurance | None, *, simulated: bool = False
) -> Iterator[tuple[str, ...]]:
    """Write TTFT and TPOT at p50, p90 and p99, the limit, how far the time behind it may be off, what it rests on."""
    for name, values, limit, band, shares in (
        ("TTFT", latencies[0], work.ttft, sure.ttft if sure else None, sure and sure.pools[-2:][0].ttft),
        ("TPOT", latencies[1], work.tpot, sure.tpot if sure else None, sure and sure.pools[-1].tpot),
    ):
        told = "" if band is None or math.isnan(band[0]) else f"{'pass' if name == 'TTFT' else 'step'} {_times(band)}"
        if sure and name == "TTFT" and not math.isnan(sure.ttft_s[0]):
            told = f"{limit.percentile} {seconds_band(sure.ttft_s)}"
        if sure and told and (text := sure.text[name == "TPOT"]) and text[1] - text[0] > LITTLE:
            told += f", {'pass' if name == 'TTFT' else 'step'} by experts of your text {_times(text)}"
        yield (
            f"{name}, simulated" if simulated else name,
            *(seconds_text(value) for value in values.values()),
            _limit(limit),
            told,
            shares_text(shares or {}),
        )


LATENCY_HEADER = ("", "p50", "p90", "p99", "limit", "80 % band", "rests on")


def _times(band: Band) -> str:
    low, high = band
    return f"{low:.2f} to {high:.2f} times" if math.isfinite(high) else f"{low:.2f} times or more"


def why_rows(plan: Plan, design: Design) -> Iterator[tuple[str, str]]:
    """Write what binds each pool, and what one instance fewer would do."""
    for pool in design.pools:
        choice, fewer = pool.choice, pool.instances - 1
        said = [binds_text(pool)]
        if isinstance(choice, DecodeChoice | ColocatedChoice):
            held = "memory" if choice.seats >= choice.memory_seats else "the TPOT limit"
            budget = isinstance(choice, ColocatedChoice) and 2 * choice.seats > choice.budget // 2
            said.append(f"{'the token budget' if budget and held != 'memory' else held} holds the batch")
        engine = pool.setup.overheads
        if pool.role == "colocated" and pool.mapping.dp_attn > 1 and engine is not None and not engine.holds_prompts:
            said.append(f"launch writes no prefill delay for {pool.setup.engine}")
        if pool.utilisation >= NEAR_FULL:
            more = "queues for long" if pool.role in ("encode", "prefill") else "takes a step to the TPOT limit"
            said.append(f"at a load of {pool.utilisation:.0%} a burst {more}: --headroom leaves room for it")
        if fewer:
            said.append(f"with {fewer} instance{'s' * (fewer > 1)} {_missed(plan, design, pool, fewer)}")
        yield role_text(pool.role), "; ".join(said)


def binds_text(pool: PlannedPool) -> str:
    """Write what binds a pool: ``compute binds a pass``, or how long its halves wait for each other."""
    if len(pool.halves) > 1:
        waits = " and ".join(f"{role_text(part.role)} ranks wait {part.idle:.0%}" for part in pool.halves)
        return f"{waits} of a full step"
    bound, unit = pool.choice.bound, "a pass" if pool.role in ("encode", "prefill") else "a step"
    return f"{BOUND_TEXT[bound]} bind{'' if bound in PLURAL else 's'} {unit}"


def _missed(plan: Plan, design: Design, pool: PlannedPool, instances: int) -> str:
    """Write the limit that fewer instances would miss."""
    pool = design.first if pool.role == "prefill" else pool  # whose TTFT has the hand-over to decode in it
    choice, rate, work = pool.choice, pool.rate, plan.work
    if pool.role == "encode":
        if not choice.holds(rate, instances):
            return "encoding would not keep up"
        pool = replace(design, pools=(replace(pool, instances=instances), *design.pools[1:])).first
        choice, instances = pool.choice, pool.instances
    if isinstance(choice, DecodeChoice | ColocatedChoice):
        tpot = choice.tpot(rate, instances, work.tpot.share) if rate / instances < choice.most else math.inf
        if not tpot <= work.tpot.seconds:
            late = f"TPOT {work.tpot.percentile} would be {seconds_text(tpot)}"
            return "decode would not keep up" if math.isinf(tpot) else late
        if not isinstance(choice, ColocatedChoice):
            return "all sequence slots would be in use too often"
    assert isinstance(choice, PrefillChoice | ColocatedChoice)
    ttft = choice.ttft(rate, instances, work.ttft.share)
    if math.isinf(ttft) or (isinstance(choice, PrefillChoice) and choice.utilisation(rate, instances) >= 1.0):
        return "prefill would not keep up"
    if ttft > work.ttft.seconds:
        return f"TTFT {work.ttft.percentile} would be {seconds_text(ttft)}"
    if isinstance(choice, ColocatedChoice):
        said = f"prompts would take more than {work.most_load:.0%} of its token budget"
    elif (load := choice.utilisation(rate, instances)) > work.most_load:
        said = f"its load would be {load:.0%}, and a plan takes at most {work.most_load:.0%}"
    else:
        said = f"its headroom would be below {work.headroom:.0%}"
    return said


def role_text(role: str) -> str:
    """Name what a pool does: ``prefill``, ``decode``, ``co-located``, ``FFN``."""
    return {"colocated": "co-located", "ffn": "FFN"}.get(role, role)


#: Axes of flips: a name, and how a value is written.
AXES: dict[str, tuple[str, Callable[[float], str]]] = {
    "ttft": ("TTFT limit", seconds_text),
    "tpot": ("TPOT limit", seconds_text),
    "isl": ("prompts", lambda value: f"{value:,.0f} tokens"),
    "osl": ("answers", lambda value: f"{value:,.0f} tokens"),
    "nic": ("KV bandwidth of a GPU", lambda value: f"{value / GB:.2g} GB/s"),
    "price": ("price", lambda value: f"{value:.2f} USD a GPU hour"),
}


def change_lines(plan: Plan, changes: Changes) -> list[str]:
    """Write changes of the answer, nearest first; savings of looser limits; designs set aside."""
    lines = flip_lines(plan, changes.flips)
    best = plan.best
    assert best is not None
    for each in changes.limits:
        name, text = AXES[each.axis]
        own = text(getattr(plan.work, each.axis).seconds)
        if plan.size.gpus is None:
            saved = f"{each.gpus} GPU{'s' * (each.gpus > 1)} in place of {best.gpus}"
        else:
            saved = f"{each.rate:.4g} requests/s in place of {best.rate:.4g}"
        lines.append(f"{name} of {text(each.value)} in place of {own}: {saved}")
    if (design := changes.aside) is not None:
        saved = f"{design.gpus} GPU{'s' * (design.gpus > 1)} in place of {best.gpus}"
        if plan.size.gpus is not None:
            saved = f"{design.rate:.4g} requests/s in place of {best.rate:.4g}"
        why = _why_aside(best, design, plan.options.prices)
        lines.append(f"set aside: {instances_text(design)} ({MODE_TEXT[design.mode]}), {saved}: {why}")
    return lines


def _why_aside(best: Design, design: Design, prices: Mapping[str, float]) -> str:
    """Write why a cheaper design is not the answer."""
    for pool in design.pools:
        if (rule := unsupported(pool.setup, pool.mapping)[0]) != "":
            return str(rule)
    why = passed_over(best, design, prices)
    alike = best.cost / best.rate <= NEAR * design.cost / design.rate
    return f"less than forecasts tell apart, and {why}" if alike else why


#: Decode instances, whole and split.
DECODE_TEXT = {False: "whole decode instances", True: "attention and FFN ranks apart"}


def flip_lines(plan: Plan, changes: tuple[AnswerFlip, ...]) -> list[str]:
    """Write changes of the answer, nearest first."""
    if not changes:
        return [f"no other answer was found up to 1/{LADDER[-1]:g} and {LADDER[-1]:g} times each limit and length"]
    several = len({case.at.system.name for case in plan.cases}) > 1
    lines = []
    for flip in changes[:MOST_FLIPS]:
        name, text = AXES[flip.axis]
        way = "up" if flip.factor > 1.0 else "down"
        if flip.axis == "price":
            lines.append(f"{name} of {flip.system} {way} to {text(flip.value)}: as good as the best")
            continue
        where = f" on {flip.system}" if several and flip.system else ""
        kind = "" if flip.mode is None else DECODE_TEXT[flip.split] if plan.halves_compete else MODE_TEXT[flip.mode]
        then = f"{kind}{where}" if kind else "no deployment"
        between = f" (at {text(flip.value * flip.before / flip.factor)} still the same)" * (flip.before != 1.0)
        lines.append(f"{name} {way} to {text(flip.value)}: {then}{between}")
    return lines


def runner_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Write a row for each runner-up, marked ``planned`` if only other designs were simulated."""
    mixed = plan.best is not None and plan.best.simulated is not None
    for design in plan.runners_up:
        planned = ", planned" * (mixed and design.simulated is None)
        yield (
            MODE_TEXT[design.mode],
            instances_text(design),
            " + ".join(dict.fromkeys(pool.setup.system.name for pool in design.pools)),
            f"{design.gpus}",
            f"{design.rate:.4g}/s",
            seconds_text(design.ttft[plan.work.ttft.percentile]) + planned,
            seconds_text(design.tpot[plan.work.tpot.percentile]) + planned,
            "" if plan.best is None else passed_over(plan.best, design, plan.options.prices),
        )


RUNNER_HEADER = ("runners-up", "instances", "systems", "GPUs", "rate", "TTFT", "TPOT", "why not first")
