"""Describe what one instance of each phase serves, and whether a number of them keeps the limits at a request rate.

A choice is one configuration of an instance. ``holds`` tells whether so many of them keep the limits, with queueing
(``planning.queueing``); ``planning.counts`` finds the fewest. Arriving requests see the time average of the pool.

Past 400 lines: choices of the three kinds of pools share what they know of limits and queues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.domain import Sharding
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.counts import MOST_INSTANCES, QuickBound
from disagg_sim.planning.leaving_order import SHARES, StageTimes, behind, blocking_one_by_one, blocking_passes
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.loads import Loads, loaded
from disagg_sim.planning.mixed_steps import ROUNDED, MixedSteps, Mixing
from disagg_sim.planning.passes import kinds, largest_pass, parts, passes
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.prompt_queue import PromptArrivals, most_delay, prompt_delay, reach
from disagg_sim.planning.queueing import (
    RESIDUES,
    Delay,
    Occupancy,
    Service,
    mean_wait,
    occupancy,
    share_that_waits,
    shortest_queue_delay,
    without_queue,
)
from disagg_sim.planning.shared_instances import (
    Sent,
    arrivals_while_decoding,
    chance_of_close_ends,
    sent,
    variance_at_instance,
    variance_while_decoding,
)
from disagg_sim.planning.token_times import Joining, token_times
from disagg_sim.simulation.kv_link import Wire
from disagg_sim.techniques.encode.plan import EncodeChoice, Encoding, PromptTimes
from disagg_sim.techniques.prefill_delay.plan_queue import waits
from disagg_sim.techniques.ranks.plan import prompt_times
from disagg_sim.workload.distributions import PromptParts

#: What comes after prefill where its pool emits the first token.
AT_ONCE = without_queue(np.zeros(1), np.ones(1))
#: Least share of its rate that so few instances are taken to keep, and the power of it by which more may. [1]
LEAST_KEPT, NEARER = 0.1, 0.8


class Cache(NamedTuple):
    """What moves for a prompt, on average."""

    size: float  # [B]
    pieces: float  # blocks of each tensor of each layer [1]
    stored: float = 0.0  # that goes to a shared tier meanwhile, by the same port of the sender [B]


class Link(NamedTuple):
    """What moves between prefill and decode, and over what."""

    cache: Cache
    wire: Wire


class OwnPasses(NamedTuple):
    """Times of the passes of prompts, (prompts, batches) each, of their length alone or all of it."""

    beside: Floats  # of host and loads, and what a longer cache than a mean one adds to the hand-over [s]
    ftl: Floats  # of passes until their first tokens [s]
    later: Floats | None  # of these in later stages of a pipeline [s]
    weights: Floats  # (prompts,) probabilities [1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillChoice(QuickBound):
    """An instance that prefills whole prompts, up to ``batch[-1]`` in a pass."""

    at: Setup
    mapping: Sharding
    work: Demand
    batch: Floats  # (batches,) prompts of a pass, ascending from 1 [request]
    busy: Floats  # (batches,) time until the next pass may start, mean over prompts [s]
    ftl: Floats  # (lengths, batches) time of a pass until its first tokens [s]
    spread: float  # squared coefficient of variation of the busy time over prompts [1]
    weights: Floats  # (lengths,) probabilities of the lengths [1]
    host: float  # host time of a request before its prefill [s]
    link_rate: float  # rate whose caches the links of an instance can send [request/s]
    link: Link | None = None  # to decode; None = as wide as needed
    hand_over: Delay = AT_ONCE  # from the end of prefill to the first token, which a decode pool emits
    transfer: float = 0.0  # of the cache of a mean prompt, in ``hand_over`` [s]
    queued: PrefillChoice | None = None  # without ``hand_over``, whose queue it is; None = itself
    memory: float  # on the fullest GPU at the full batch [B]
    bound: str  # of the pass: one of ``domain.BOUNDS``
    loads: Loads | None = None  # of pasts from tiers below HBM, before the pass
    encode: Encoding | None = None  # where images are encoded before prefill
    stages: StageTimes | None = None  # of a pipeline, which passes leave in their order
    parts: PromptParts | None = None  # at which quantiles are taken; None = at the lengths, as many as there are

    @property
    def alone_s(self) -> float:
        """Mean TTFT without ``hand_over`` of prompts that come alone, without loads and encoders. [s]"""
        return self.host + float(self.weights @ self.ftl[:, 0])

    @property
    def most(self) -> float:
        """Rate of an instance at the highest load that a plan allows. [request/s]"""
        return min(float(self.batch[-1] / self.busy[-1]) * self.work.share, self.link_rate)

    def utilisation(self, rate: float, instances: int) -> float:
        """Rate over the rate that full passes could serve. [1]"""
        return rate / instances * float(self.busy[-1] / self.batch[-1])

    def delay(self, rate: float, instances: int) -> Delay:
        """Find the distribution of TTFT without ``hand_over``. [s]"""
        return _delay_of_prefill(self.queued or self, rate, instances)

    def delay_anew(self, rate: float, instances: int) -> Delay:
        """Compute ``delay``."""
        if self.encode is not None:
            prompts = self.encode.before(rate, PromptTimes(self.ftl, self.weights, self.loads, self.stages))
            return replace(self, encode=None, parts=None, **prompts._asdict()).delay(rate, instances)
        own = self._own(rate / instances)
        return self._one_by_one(rate, instances, own) if self.batch[-1] == 1 else self._by_passes(rate, instances, own)

    def _own(self, rate: float) -> OwnPasses:
        """Prompts by the times of their passes, and of what they load at a rate of the instance."""
        later = None if self.stages is None else self.stages.later
        if self.parts is not None:
            later = None if later is None else self.parts.values(later)
            longer = self.parts.isl / self.work.lengths.mean_isl - 1.0  # caches than that of a mean prompt
            beside = self.host + self.transfer * longer
            return OwnPasses(beside[:, None], self.parts.values(self.ftl), later, self.parts.weights)
        node, load, weights = loaded(self.loads, self.weights, rate, self.work.dispersion)
        later = None if later is None else later[node]
        return OwnPasses(self.host + load[:, None], self.ftl[node], later, weights)

    def _one_by_one(self, rate: float, instances: int, own: OwnPasses) -> Delay:
        """TTFT where a pass takes one prompt."""
        alone, weights, used = (own.beside + own.ftl)[:, 0], own.weights, self.utilisation(rate, instances)
        law = Service(float(self.busy[0]), self.spread, self.work.dispersion)
        if self.stages is None or own.later is None or used >= 1.0:
            return shortest_queue_delay(alone, weights, instances, used, law)
        before = blocking_one_by_one(self.stages, self.weights, rate / instances, instances, used)
        times = alone[:, None], own.later[:, :1]
        idle, queued = (behind(*times, each).ravel() for each in (before.idle, before.queued[0]))
        weights = np.repeat(weights / SHARES.size, SHARES.size)
        return shortest_queue_delay(idle, weights, instances, used, law, queued)

    def _by_passes(self, rate: float, instances: int, own: OwnPasses) -> Delay:
        """TTFT where passes take all who wait, up to a batch."""
        weights, used = own.weights, self.utilisation(rate, instances)
        batch, even, each = int(self.batch[-1]), self.work.dispersion, rate / instances
        alone, mean = (own.beside + own.ftl)[:, :1], self.weights @ self.ftl
        if not np.isfinite(mean).all():  # of encoders that cannot keep up
            return shortest_queue_delay(alone[:, 0], weights, instances, used, Service(float(self.busy[0])))
        unlike = self._unlike()
        found = passes(each, self.batch, self.busy, instances, unlike)
        if self.mapping.dp_attn > 1:  # others of the pass are on other ranks, and the times have waits for them
            joined = np.stack([np.interp(found.beside, self.batch, row) for row in own.ftl])
        else:
            found = found.with_others(self.batch, unlike)
            joined = np.interp(found.beside, self.batch, mean) + (own.ftl[:, 0] - mean[0])[:, None, None] + found.off
        joined = own.beside[..., None, None] + joined[..., None]
        if self.stages is not None and own.later is not None:
            before = blocking_passes(self.stages, self.weights, self.batch, each, instances, found)
            one, more = own.later[:, :1], self.stages.added(self.weights, self.batch, found.beside).later
            alone = behind(alone, one, before.idle)
            joined = behind(joined, (one[:, None] + more)[..., None], before.queued[:, None])
        rests = (joined[..., None] + found.rests[:, :, None]).ravel()
        equal = joined.shape[-1] * RESIDUES.size
        places = np.repeat(np.outer(weights, found.share).ravel() / equal, equal)
        # more requests arrive during a pass than the next pass can take
        queued = found.meets * share_that_waits(instances * batch, used)
        return Delay(
            calm=np.concatenate([alone.ravel(), rests]),
            calm_share=np.concatenate(
                [
                    np.repeat((1.0 - found.meets) * weights / alone.shape[1], alone.shape[1]),
                    (found.meets - queued) * places,
                ]
            ),
            held=rests,
            held_share=queued * places,
            wait=mean_wait(instances * batch, used, float(self.busy[-1]), (even + self.spread) / 2),
        )

    def holds(self, rate: float, instances: int) -> bool:
        """See ``PoolChoice``."""
        sized = self.work.sized(rate)
        if rate / instances > self.link_rate or self.work.overloads(self.utilisation(sized, instances)):
            return False
        limit = self.work.ttft
        if math.isinf(limit.seconds) and self.loads is None and self.encode is None:
            return True  # below full load every wait ends
        late, after = 1.0 - limit.share, self.hand_over
        least, most = (limit.seconds - float(each(after.calm)) for each in (np.max, np.min))
        if (self.queued or self).late_at_most(sized, instances, least) <= late:
            return True
        found = self.delay(sized, instances)
        if (within := found.within(least, late)) or not found.within(most, late):
            return within
        return found.then(after).within(limit.seconds, late)

    def late_at_most(self, rate: float, instances: int, limit: float) -> float:
        """Bound ``delay(rate, instances).late(limit)`` from above: all meet the longest pass that there is. [1]"""
        longest, waits, wait = _longest(self, rate, instances)
        left = limit - longest
        return waits * math.exp(-left / wait) * (1.0 + ROUNDED) if left > 0.0 else 1.0

    def _unlike(self) -> Floats:
        """What passes of equally probable kinds of prompts last longer than the mean of their size. [s]"""
        # n unlike prompts are off by the root of n times what one is off, where n alike ones are by n times that
        taken = self.ftl if self.stages is None else self.stages.first
        return kinds(self.weights, (taken - self.weights @ taken) / np.sqrt(self.batch))

    def ttft(self, rate: float, instances: int, share: float) -> float:
        """TTFT that a share of the requests does not exceed. [s]"""
        return _ttft_of_prefill(self, rate, instances, share)

    def mean_ttft(self, rate: float, instances: int) -> float:
        """Mean TTFT of all requests. [s]"""
        return self.delay(rate, instances).mean + self.hand_over.mean


@lru_cache(maxsize=1024)
def _longest(choice: PrefillChoice, rate: float, instances: int) -> tuple[float, float, float]:
    """Time to the first token beside the longest passes [s], and the share that waits for more [1], how long [s]."""
    if choice.loads is not None or choice.encode is not None or choice.batch[-1] == 1:
        return math.inf, 1.0, 0.0  # they are not looked at
    used, unlike = choice.utilisation(rate, instances), choice._unlike()
    most = largest_pass(rate / instances, choice.batch, choice.busy, instances, unlike)
    own, sizes = choice._own(1.0), np.append(choice.batch[choice.batch < most], most)
    mean, busy = (np.interp(sizes, choice.batch, each) for each in (choice.weights @ choice.ftl, choice.busy))
    others = own.ftl.max() if choice.mapping.dp_attn > 1 else own.ftl[:, 0].max() + np.ptp(mean)
    longest = own.beside.max() + others + busy.max() + 2.0 * np.abs(unlike).max()
    if choice.stages is not None:
        added = choice.stages.added(choice.weights, choice.batch, sizes).later
        longest += np.ptp(choice.stages.later[:, 0]) + np.ptp(added)
    servers = instances * int(choice.batch[-1])
    wait = mean_wait(servers, used, float(choice.busy[-1]), (choice.work.dispersion + choice.spread) / 2)
    return float(longest), share_that_waits(servers, used), wait


#: TTFT of a prefill pool: a search asks for some again; kept by each choice they held gigabytes.
_delay_of_prefill = lru_cache(maxsize=256)(PrefillChoice.delay_anew)


@lru_cache(maxsize=1024)
def _ttft_of_prefill(choice: PrefillChoice, rate: float, instances: int, share: float) -> float:
    """TTFT of a prefill pool that a share of the requests does not exceed. [s]"""
    return choice.delay(rate, instances).then(choice.hand_over).at(share)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeChoice(QuickBound):
    """An instance that decodes up to ``seats`` sequences together."""

    at: Setup
    mapping: Sharding
    work: Demand
    seats: int  # [request]
    batch: Floats  # (batches,) ascending from 1 to the seats [request]
    step: Floats  # (batches,) [s]
    link_rate: float  # rate whose caches the links of an instance can receive [request/s]
    memory: float  # on the fullest GPU with all seats taken [B]
    memory_seats: int  # that memory would allow [request]
    bound: str  # of the step with all seats taken: one of ``domain.BOUNDS``

    @property
    def completed(self) -> Floats:
        """Rate at which an instance completes requests with so many sequences, (batches,). [request/s]"""
        return np.asarray(self.batch / (self.step * self.work.lengths.gaps))

    @property
    def most(self) -> float:
        """Rate of an instance with all seats taken. [request/s]"""
        return min(float(self.completed[-1]) / self.work.spare, self.link_rate)

    def occupied(self, rate: float, instances: int) -> Occupancy:
        """Sequences of an instance over time."""
        return occupancy(rate, instances, self.seats, self.batch, self.completed)

    def _tpot(self, sequences: float) -> float:
        return float(np.interp(np.ceil(sequences), self.batch, self.step))

    def holds(self, rate: float, instances: int) -> bool:
        """See ``PoolChoice``."""
        limit, sized = self.work.tpot, self.work.sized(rate)
        if rate / instances > self.link_rate or sized / instances >= float(self.completed[-1]):
            return False
        found = self.occupied(sized, instances)
        return found.full <= 1.0 - limit.share and self._tpot(found.at(limit.share)) <= limit.seconds

    def tpot(self, rate: float, instances: int, share: float) -> float:
        """TPOT that a share of the requests does not exceed. [s]"""
        return self._tpot(self.occupied(rate, instances).at(share))


class Asked:
    """Fewest instances that keep up with a rate [request/s] or a higher one in time, as ``MixedSteps.highest`` does.

    Those of all prefill delays are looked for at once. The next number to look at is as many times larger as the rate
    that this one kept is smaller, less a little.
    """

    def __init__(self, steps: MixedSteps, slowest: float, rate: float, low: int) -> None:
        self._given, self._waits = (steps, steps.batch / slowest, rate), np.array(steps.waits, dtype=float)
        self._few = np.full(self._waits.size, low - 1)  # do not keep up
        self._enough = np.full(self._waits.size, 2 * MOST_INSTANCES)  # do
        self._next = np.full(self._waits.size, low)

    def fewest(self, place: int, most: int) -> int | None:
        """Instances with a prefill delay; None where more than ``most``."""
        few, enough = self._few, self._enough
        while few[place] < min(enough[place] - 1, most):
            known = enough <= most
            (wait,) = np.nonzero(few < np.minimum(enough - 1, most))
            number = np.where(known, (few + enough) // 2, np.clip(self._next, few + 1, most))[wait]
            kept = self._kept(number, wait)
            few[wait], enough[wait] = (
                np.where(kept < 1.0, number, few[wait]),
                np.where(kept < 1.0, enough[wait], number),
            )
            self._next[wait] = number * np.clip(kept, LEAST_KEPT, 1.0) ** -NEARER
        return int(enough[place]) if enough[place] <= most else None

    def _kept(self, number: Ints, wait: Ints) -> Floats:
        """Rates that so many instances with each of these delays keep, over theirs. [1]"""
        steps, in_time, rate = self._given
        rates = np.maximum(rate / number[:, None], in_time)
        row, column = np.nonzero(steps.bounds >= rates)
        mixing, found = steps.mixing(rates[row, column], self._waits[wait][row], column), np.zeros_like(rates)
        served = mixing.steps * steps.batch[column] / (rates[row, column] * steps.each)
        found[row, column] = np.minimum(served, (1.0 - ROUNDED) / mixing.used)
        return np.asarray(found.max(axis=1))


#: ``Asked`` of choices that differ in prefill delay alone.
_asked = lru_cache(maxsize=256)(Asked)


@dataclass(frozen=True, kw_only=True, eq=False)
class ColocatedChoice:
    """A co-located instance: a step takes its decodes and prompt tokens up to a budget (``planning.mixed_steps``).

    TPOT (``step_mixing.step_rate``) varies with the sequences in service and with the prompts that arrive while a
    request decodes. With drafts TPOT and the number of steps of a request are 1/AL of those without, AL accepted.
    """

    at: Setup
    mapping: Sharding
    work: Demand
    steps: MixedSteps
    weights: Floats  # (lengths,) probabilities of the lengths [1]
    host: float  # host time of a request before its prefill [s]
    memory: float  # on the fullest GPU with all seats taken [B]
    memory_seats: int  # that memory would allow [request]
    bound: str  # of the decode step with all seats taken: one of ``domain.BOUNDS``
    loads: Loads | None = None  # of pasts from tiers below HBM, before prefill
    parts: PromptParts | None = None  # at which quantiles are taken; None = at the lengths, as many as there are
    hold_steps: int = 0  # most decode steps that prompts wait for every rank (``prefill_delay``); 0 = none [1]

    @property
    def batch(self) -> Floats:
        """Sequences, (batches,), ascending from 1 to the seats. [request]"""
        return self.steps.batch

    @property
    def step(self) -> Floats:
        """Time of a step of decodes alone, (batches,). [s]"""
        return self.steps.step

    @property
    def seats(self) -> int:
        """Most sequences. [request]"""
        return int(self.batch[-1])

    @property
    def budget(self) -> int:
        """Most tokens of a step, decodes and prefill, over all DP ranks. [token]"""
        return self.steps.budget

    @property
    def ranks(self) -> int:
        """Attention ranks, each with prompts of its own. [1]"""
        return self.steps.ranks

    @cached_property
    def _accepted(self) -> float:
        """Tokens that a step emits for a sequence, on average. [token]"""
        return float(self.at.accepted_length(self.mapping.draft_tokens))

    @cached_property
    def _lasting(self) -> Floats:
        """Decode steps of equally many requests, over their mean. [1]"""
        law = self.work.lengths.requests
        gaps = np.maximum(law.osl - 1.0, 1.0)
        return np.asarray(parts(law.osl_weight, (gaps / float(law.osl_weight @ gaps))[:, None])[0])

    @property
    def _slowest(self) -> float:
        """Time in which a request decodes at the TPOT limit. [s]"""
        return self.work.lengths.gaps * self.work.tpot.seconds

    @cached_property
    def ceiling(self) -> float:
        """See ``PoolChoice``."""
        rates = self.steps.bounds
        return float(rates[self.batch <= rates * self._slowest].max(initial=0.0)) / self.work.spare

    @cached_property
    def most(self) -> float:
        """Highest rate of an instance with TPOT at its limit, at the best number of sequences. [request/s]"""
        rates = self.steps.highest(self._slowest)
        return float(rates[self.steps.waits.index(self.hold_steps)]) / self.work.spare

    def asks(self, rate: float, most: float) -> int | None:
        """See ``PoolChoice``."""
        low = max(math.ceil(rate / self.ceiling), 1) if self.ceiling > 0 else math.inf
        if low > most:
            return None
        asked = _asked(self.steps, self._slowest, rate * self.work.spare * (1.0 - ROUNDED), int(low))
        return asked.fewest(self.steps.waits.index(self.hold_steps), int(most))

    @cached_property
    def _known(self) -> dict[tuple[str, float, int], Any]:
        """Results by rate and number of instances: a search asks for the same ones again, under other limits, too."""
        return {}

    def under(self, work: Demand) -> ColocatedChoice:
        """The same under other limits; what is known of its rates is known of them, too."""
        found = replace(self, work=work)
        found.__dict__["_known"] = self._known
        return found

    def _state(self, rate: float, instances: int) -> tuple[Occupancy, Mixing]:
        """Sequences and steps."""
        if (key := ("state", rate, instances)) not in self._known:
            mixing = self.steps.mixing(rate / instances, self.hold_steps)
            found = self._occupied(rate, instances, mixing)
            if self.ranks > 1 and instances > 1:
                mixing = self.steps.mixing(rate / instances, self.hold_steps, sent=self._sent(rate, found, instances))
                found = self._occupied(rate, instances, mixing)
            self._known[key] = found, mixing
        state: tuple[Occupancy, Mixing] = self._known[key]
        return state

    def _occupied(self, rate: float, instances: int, mixing: Mixing) -> Occupancy:
        """Sequences of an instance whose steps are these."""
        done = self.batch * mixing.steps / self.steps.each
        return occupancy(rate, instances, self.seats, self.batch, done)

    def _delay(self, rate: float, instances: int) -> Delay:
        """TTFT. [s]"""
        if (key := ("ttft", rate, instances)) not in self._known:
            self._known[key] = self._delay_of(rate, instances, *self._state(rate, instances))
        delay: Delay = self._known[key]
        return delay

    def _delay_of(self, rate: float, instances: int, found: Occupancy, mixing: Mixing) -> Delay:
        some, own_rate, even = found.mean, rate / instances, self.work.dispersion * variance_at_instance(instances)
        node, load, weights = loaded(self.loads, self.weights, own_rate, even)
        if self.parts is not None:
            node, load, weights = loaded(None, self.parts.weights, own_rate, even)
        lengths, running = self.steps.prompts, found.of_some if self.steps.ahead else None
        if self.ranks == 1:
            room, step = self.steps.with_prompts(some)
            mixed, alone = (float(np.interp(some, self.batch, each)) for each in (mixing.time, self.step))
            to_it = self._sent(rate, found, instances)
            prompts = self.steps.worth(some, lengths.new, lengths.past)
            own = prompts if self.parts is None else self.steps.worth(some, self.parts.isl, 0.0)
            coming = PromptArrivals(own_rate, self.work.dispersion * to_it.even, float(to_it.in_prefill(mixed / alone)))
            laws = prompt_delay(coming, prompts, self.weights, room, step, own, running)
            values = np.concatenate([self.host + late + laws[each][0] for each, late in zip(node, load, strict=True)])
            shares = np.concatenate([laws[each][1] * part for each, part in zip(node, weights, strict=True)])
            return Delay(calm=values, calm_share=shares, held=np.zeros(1), held_share=np.zeros(1), wait=0.0)
        if self.parts is not None:  # none is cached
            lengths = PromptLengths(self.parts.isl, np.zeros_like(self.parts.isl), self.parts.weights)
        held, time, _, steps, used = (float(np.interp(some, self.batch, values)) for values in mixing[:5])
        if self.hold_steps:
            own = self.host + np.ceil(lengths.new / held)[node] * time + load
            met = RESIDUES if running is None else RESIDUES + running  # with the step that was formed meanwhile
            own = (own[:, None] + met / steps).ravel()  # the rest of the step that a request meets comes first
            weights = np.repeat(weights / RESIDUES.size, RESIDUES.size)
            longest = self.hold_steps * float(np.interp(some, self.batch, self.step))
            under_way = max(own_rate * self.work.lengths.mean_new / held, own_rate) * time
            wait, shares = waits(own_rate, longest, time, under_way, self.ranks)
            own, weights = np.add.outer(wait, own).ravel(), np.multiply.outer(shares, weights).ravel()
        else:
            times, chances = prompt_times(self.steps, mixing, some, own_rate, lengths, running)
            own = (self.host + times[node] + load[:, None]).ravel()
            weights = np.outer(weights, chances).ravel()
        mean = self.steps.prompt
        spread = float(self.weights @ (self.steps.prompts.new - mean) ** 2) / mean**2
        law = Service(used * instances * self.ranks / rate, spread, even)
        return shortest_queue_delay(own, weights, self.ranks, used, law)

    def _sent(self, rate: float, found: Occupancy, instances: int) -> Sent:
        """How requests are sent to an instance."""
        pieces, alone = (float(np.interp(found.mean, self.batch, each)) for each in (self.steps.count, self.step))
        close = chance_of_close_ends(self.work.lengths.requests, (1.0 / (rate * alone) + pieces) * self._accepted)
        return sent(found, instances, close)

    def _tpot(self, rate: float, instances: int) -> Delay:
        """TPOT. [s]"""
        if (key := ("tpot", rate, instances)) not in self._known:
            found, mixing = self._state(rate, instances)
            prompts = self.steps.worth(found.mean, self.steps.prompts.new, self.steps.prompts.past)
            uneven = float(self.weights @ prompts**2) / float(self.weights @ prompts) ** 2
            each_step = 1.0 / np.interp(np.ceil(found.number), self.batch, mixing.steps)
            mean, wide = found.moments(each_step)
            steps = self.work.lengths.gaps / self._accepted
            tables = self.steps.count * mixing.time, mixing.used
            own, used = (float(np.interp(found.mean, self.batch, each)) for each in tables)
            decoding = steps * mean / (steps * mean + own + used * mean_wait(1, used, own, 0.5))
            even = self.work.dispersion * variance_while_decoding(self.work.lengths.requests, instances, decoding)
            arrivals = Joining(rate / instances, even, uneven, arrivals_while_decoding(found, instances, decoding))
            each = token_times(self.steps, mixing, found.mean, (mean, wide), steps * self._lasting, arrivals)
            self._known[key] = replace(each, calm=each.calm / self._accepted)
        delay: Delay = self._known[key]
        return delay

    def holds(self, rate: float, instances: int) -> bool:
        """See ``PoolChoice``."""
        ttft, tpot, rate = self.work.ttft, self.work.tpot, self.work.sized(rate)
        found, mixing = self._state(rate, instances)
        if found.full > 1.0 - tpot.share or self.work.overloads(np.interp(found.mean, self.batch, mixing.used)):
            return False
        slowest = max(self.step.max(), (self.steps.full if self.ranks == 1 else mixing.time).max()) * (1.0 + ROUNDED)
        if slowest > tpot.seconds * self._accepted and self._tpot(rate, instances).late(tpot.seconds) > 1 - tpot.share:
            return False
        if math.isinf(ttft.seconds) or self._most_delay(rate / instances, found.mean) <= ttft.seconds:
            return True
        return self._delay(rate, instances).late(ttft.seconds) <= 1.0 - ttft.share

    def _most_delay(self, rate: float, sequences: float) -> float:
        """Bound TTFT at a rate of the instance [request/s] beside so many sequences from above. [s]"""
        if self.ranks > 1 or self.loads is not None:
            return math.inf  # they are not looked at
        room, step = self.steps.with_prompts(sequences)
        prompts = self.steps.worth(sequences, self.steps.prompts.new, self.steps.prompts.past)
        timed = prompts if self.parts is None else self.steps.worth(sequences, self.parts.isl, 0.0)
        _, waiting = reach(rate, prompts, self.weights, room, step, self.work.dispersion)  # few come more evenly
        if math.isinf(waiting):
            return waiting
        sizes = np.clip(self.steps.tokens - np.interp(sequences, self.batch, self.steps.verified), 0.0, room)
        slowest = float(step(sizes).max())
        return self.host + self.steps.ahead * slowest + most_delay(waiting, float(timed.max()), room, slowest)

    def ttft(self, rate: float, instances: int, share: float) -> float:
        """TTFT that a share of the requests does not exceed. [s]"""
        return self._delay(rate, instances).at(share)

    def mean_ttft(self, rate: float, instances: int) -> float:
        """Mean TTFT of all requests. [s]"""
        return self._delay(rate, instances).mean

    def tpot(self, rate: float, instances: int, share: float) -> float:
        """TPOT that a share of the requests does not exceed. [s]"""
        return self._tpot(rate, instances).at(share)

    def occupied(self, rate: float, instances: int) -> Occupancy:
        """Sequences of an instance over time."""
        return self._state(rate, instances)[0]


AnyChoice = EncodeChoice | PrefillChoice | DecodeChoice | ColocatedChoice
