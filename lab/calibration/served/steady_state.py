r"""Predict the steady state of a real engine under load: a closed loop, a Poisson stream, or everything queued.

In a closed loop a new request starts as soon as one ends. Of the A requests that an instance admits (no more
than its memory holds), a share x of the time of each is decode and the rest is its prefill with the wait for
it. A request sees the others (the arrival theorem of closed networks), hence with :math:`B = 1 + (A-1)\,x`
sequences in a decode step, and m pieces of at most one token budget a prompt, :math:`d = (A-1)\,x\,m/(OSL-1)`
pieces fall due in a step. Each of R attention ranks has one in the share :math:`\varphi = d/R` of the steps, apart
from the others, several where d > R; ranks that wait for each other, as in a plan (``prefill_delay``), have theirs in
the same steps. Steps with pieces, of T on average (``serving.step_mixing``), take :math:`A\,m\,T\,f/d` in the life of
a request, f their share. A time t of it, all but those of its own prompt and its wait, falls between its tokens:

.. math:: TPOT = T_d(B)\,\left(1 - \frac{t}{(OSL-1)\,T}\right) + \frac{t}{OSL-1}\ \text{(mixed)}\quad\text{or}\quad
          T_d(B) + \frac{t}{OSL-1},\quad x = \frac{(OSL-1)\,TPOT}{TTFT + (OSL-1)\,TPOT}

x is found by bisection. A request waits for half of the step under way when it comes, :math:`E[T^2]/(2 E[T])`, the
time-average: steps with prefill are the longer ones; where steps are formed ahead, for the next one, too, of mean
length, as it holds what came during the step before. Its own step is shared with those that came meanwhile: in mixed
steps those that ended with one step, :math:`T = T_d + k t` with k a Poisson number of mean d; between decode steps all
that came during the pass under way, :math:`\theta = (1-\rho)\,T_d + \rho\,P(1 + \lambda\theta)`, P the time of a pass.
Prefill workers likewise, with :math:`T_d = 0` and no step formed ahead, as none is before a prompt is there; how long
a queue a loop of n can have: ``_seen``.

Not in it: after a long and constant host time prompts that ended together come together again, and where prefill takes
over half of the time, steps swing (simulated 1.1 to 2.2 times this TTFT, with 23 ms and 1 s). Lengths that spread by
5 % keep the requests of a start together for tens of them a slot, and those behind prefill workers in an order that
queues less.
Source: physics page, section 8 (co-located), with the steps as the engine forms them.

Past 400 lines: loops, streams and batches of both modes share the times of passes and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.kv_transfer import unique_gpus
from disagg_sim.physics.memory import colocated_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import crosses_domains, overlapped_prefill, overlaps
from disagg_sim.physics.residents import Prefilling, decode_residents, prompt_residents
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.physics.work import Numeric
from disagg_sim.serving.step_mixing import MixedShares, mixed_steps, own_step, time_alone, token_time
from disagg_sim.techniques.prefill_delay.plan_queue import gathered, mixed_share, waits

#: Runs of split workers whose load a decode rank lies above a power of two, by this factor at most, are taken to fill
#: batches of that size, while the others wait for a slot: 2,151 requests on 16 ranks are 128 a rank and 5 % more. The
#: source does not state the largest batch; ten loads of TensorRT-LLM are such, and none of SGLang and vLLM. [1]
OVERSUBSCRIBED = 1.15
#: Skew of experts that fills ranks as full as counted of prompts of random tokens (DeepSeek-R1, 16 and 76 million
#: tokens; NVIDIA/srt-slurm, expert distributions of 1k/1k and 8k/1k): max over mean of contiguous ranks 1.49, 2.06,
#: 2.79, 4.20, 7.15 on EP 4 to 64, of this skew 1.34, 1.76, 2.59, 4.22, 7.56. [1]
RANDOM_SKEW = {"deepseek_r1": 3.2}
#: Variation of the popularity by which random tokens hit experts, of a model whose served runs tell it: of five the one
#: of least error of TPOT and TTFT on the fitted part (vLLM and TensorRT-LLM on B200, vLLM on Hopper: 118 points). Of
#: DeepSeek-R1 the counts say 2.4 in a layer, but TPOT of TensorRT-LLM gets worse with any (held out 5.8 to 7.5 % with
#: 1, 13 % with 2). [1]
RANDOM_POPULARITY = {"gpt_oss_120b": 1.8}
#: Least batch of a rank that a load tells. [request]
LEAST_SLOTS = 8
#: Least number of pieces that fall due in a step, in place of 0. [1]
LEAST_DUE = 1e-6
#: Turns in which the steps of a stream, and what comes in them, are found from each other. [1]
TURNS = 6
#: Halvings of the bisections: the last interval is 1.5e-5 of the first.
HALVINGS = 16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on a system in one recipe, run by one engine."""

    at: Setup
    poll_steps: int = 1  # decode steps from one look at new requests, or split from one send, to the next [1]
    gather_steps: int = 0  # decode steps that a prompt waits for others to come with it [1]
    slots: int = 0  # of a decode rank of split workers; 0 = as the load tells [request]

    @property
    def engine(self) -> EngineSpec:
        """What the engine adds to its kernels."""
        assert self.at.overheads is not None, "made by `served`"
        return self.at.overheads


class RowLengths(NamedTuple):
    """Constant input and output length of the requests of every row, (rows,). [token]"""

    isl: Numeric
    osl: Numeric

    @property
    def context(self) -> Numeric:
        """Mean cache of a request in decode. [token]"""
        return decode_residents(self.isl, self.osl).mean

    @property
    def gaps(self) -> Numeric:
        """Tokens after the first; not quite 0 where there is none. [token]"""
        return np.maximum(self.osl - 1.0, 1e-9)


class SteadyState(NamedTuple):
    """What requests see; arrays of the shape of the input."""

    tpot: Numeric  # mean time of an output token after the first [s]
    ttft: Numeric  # mean, wait included [s]
    request_rate: Numeric  # of the deployment [request/s]
    capacity: Numeric  # requests that fit into the memory where they decode [request]

    def latency(self, lengths: RowLengths) -> Numeric:
        """Mean time of a request from its start to its last token. [s]"""
        return self.ttft + lengths.gaps * self.tpot


class WorkerPool(NamedTuple):
    """``count`` equal workers of one mapping."""

    mapping: Sharding
    count: Numeric  # [1]


def served(
    model: ModelSpec | str, system: SystemSpec | str, precision: str, engine: EngineSpec, *, random_tokens: bool = False
) -> ServedModel:
    """Resolve the rates; host time and memory share are the engine's, and memory is provisioned for the mean."""
    at = setup(model, system, precision, "measured", engine)
    at = at.changed(profile=replace(at.profile, host=0.0, resident_deviations=0.0))
    return ServedModel(of_random_tokens(at) if random_tokens else at)


def of_random_tokens(at: Setup) -> Setup:
    """The setup with experts hit, and their ranks filled, as where prompts are random tokens, where that is known."""
    name, profile = at.model.name, at.profile
    ranks, hit = RANDOM_SKEW.get(name, profile.rank_skew), RANDOM_POPULARITY.get(name, profile.expert_skew)
    return at.changed(profile=replace(profile, rank_skew=ranks, expert_skew=hit))


def decode_time(run: ServedModel, mapping: Sharding, batch: Numeric, lengths: RowLengths) -> Numeric:
    """A decode step of ``batch`` sequences of an instance at their mean length. [s]"""
    return decode_step(run.at, mapping, batch=batch, context=lengths.context).ttl


def prefill_time(
    run: ServedModel, mapping: Sharding, tokens: Numeric, ranks: Numeric, lengths: RowLengths, *, decodes: Numeric = 0.0
) -> Numeric:
    """A pass of ``tokens`` new tokens shared by ``ranks`` DP ranks, with ``decodes`` sequences riding along. [s]"""
    at, chunk = run.at, Chunk(tokens, lengths.isl, ranks)
    step = mixed_step(at, mapping, batch=decodes, context=lengths.context, chunk=chunk).time
    if not np.any(np.asarray(decodes) > 0) and overlaps(at, mapping):
        halves = overlapped_prefill(at, mapping, tokens=tokens, ranks=ranks, isl=lengths.isl)
        step = np.where(crosses_domains(at, mapping), halves, step)
    return step


def pieces_of(engine: EngineSpec, isl: Numeric) -> tuple[Numeric, Numeric, Numeric]:
    """Pieces m into which the token budget of a step cuts a prompt, tokens s of each, ``s = ISL/m``, and how many of
    them a rank takes into a step.
    """
    count = np.ceil(isl / engine.chunk_tokens)
    return count, isl / count, np.maximum(np.floor(engine.chunk_tokens / (isl / count)), 1.0)


def capacity(run: ServedModel, mapping: Sharding, lengths: RowLengths) -> Numeric:
    """Requests that an instance holds, at their mean length or whole if it reserves that; 0 if none fits. [request]"""
    at, engine = run.at, run.engine
    whole = prompt_residents(lengths.isl + lengths.osl)
    cached = whole if engine.reserves_output else decode_residents(lengths.isl, lengths.osl)
    new = np.minimum(lengths.isl, engine.chunk_tokens)

    none = Prefilling(prompts=0.0, prompt=whole, new=new, mixed=engine.mixed_steps)

    def bytes_at(sequences: Numeric) -> Numeric:
        return colocated_bytes(at, mapping, sequences * mapping.dp_attn, cached=cached, prefilling=none)

    shape = np.shape(lengths.isl + mapping.gpus)
    low, high = np.zeros(shape), np.full(shape, float(engine.max_running))
    most = bytes_at(high) <= at.memory_limit
    for _ in range(HALVINGS):
        middle = np.maximum((low + high) / 2, 1.0)
        holds = bytes_at(np.floor(middle)) <= at.memory_limit
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(most, float(engine.max_running), np.floor(low)) * mapping.dp_attn


class ClosedLoopRun(NamedTuple):
    """How a closed loop goes on after all slots start at once: ``waves`` requests a slot one after the other, service
    times uniform in ``1 +- spread``; with none, requests that started together stay together.
    """

    waves: float = np.inf  # [1]
    spread: float = 0.1  # [1]


ENDLESS = ClosedLoopRun()


def _bunching(run: ClosedLoopRun, work: Numeric, life: Numeric, *, drains: bool) -> Numeric:
    """Mean wait behind prompts of the same wave: ``max(0, work - window)/2``, the mean over the waves. [s]

    ``work`` is the prefill time of all requests in flight, ``window`` the time over which a wave arrives: 0
    for the first, ``2*spread*sqrt(k)*life`` after k more (independent lengths). An engine that prefills beside
    decodes hands the spacing of the first wave on to all others, so that only the first one waits; one that
    ``drains`` its prompts before it decodes lines them up again.
    """
    if not drains:
        return work / 2 / run.waves
    if run.spread == 0 or not np.isfinite(run.waves):
        return work / 2 * (run.spread == 0)
    later = [np.maximum(work - 2 * run.spread * np.sqrt(k) * life, 0.0) for k in range(int(run.waves))]
    return sum(later) / 2 / run.waves


def _of_rank(found: Numeric, due: Numeric, plain: Numeric, passes: tuple[Numeric, ...], ranks: Numeric) -> Numeric:
    """Pieces of a rank in a pass that has some, of Poisson numbers: ``found`` by a step, and ``due`` in it; a pass
    follows another as long as prompts come during it. ``passes`` are times of one piece and of so many [s], 0 in mixed
    steps. [1]
    """
    lone, full, fit = passes
    first = several = found / -np.expm1(-found)
    for _ in range(3):
        time = lone + (full - lone) / np.maximum(fit - 1.0, 1.0) * np.minimum(several * ranks - 1.0, fit - 1.0)
        come = due / (plain + due / several * time) * time
        several = first * np.exp(-come) + come
    return several


class _Mix(NamedTuple):
    """Steps of an instance that has pieces of prompts in some of them."""

    most: Numeric  # pieces of a step with some [1]
    busy: Numeric  # share of the steps in which a rank has some [1]
    one: Numeric  # time of a step with the pieces of one rank [s]
    every: Numeric  # and with those of every rank [s]
    shares: MixedShares  # of the steps

    @property
    def loaded(self) -> Numeric:
        """Mean time of a step with pieces. [s]"""
        return self.shares.loaded(self.one, self.every)


def _mix(
    step: Callable[[Numeric, Numeric], Numeric],
    polled: Numeric,
    limits: tuple[Numeric, Numeric, Numeric],
    of_rank: Numeric,
    none: Numeric | None = None,
) -> _Mix:
    """Steps that have so many pieces of a rank, each rank by itself; or, where ranks wait, those that are found, at
    least one of each and at most so many as fit. ``none`` is the share of steps without, where it is known.
    """
    waits, fit, ranks = limits
    apart = np.where(waits > 1, 1.0, ranks)
    most = np.where(waits > 1, np.clip(polled, waits, fit), ranks * of_rank)
    busy = np.minimum(polled / most, 1.0)
    one = every = step(most, np.minimum(most, ranks))
    if np.any(apart > 1):
        one = np.where(apart > 1, step(most / ranks, 1.0), every)
    if none is not None:
        none = np.minimum(np.where(waits > 1, 1.0, none), 1.0 - busy)
    return _Mix(most, busy, one, every, mixed_steps(busy, apart, none))


def _of_stream(
    due: Numeric, times: tuple[Numeric, Numeric], often: Numeric, pieces: Numeric, ranks: Numeric
) -> tuple[Numeric, Numeric]:
    """Share of the steps without pieces, and pieces of a rank in a step where it has some, of prompts at a rate. [1]

    Takes the pieces ``due`` in a mean step, the ``times`` of steps of decodes alone and with pieces, the share of these
    and the pieces of a prompt; after a step with some none is left as where ranks are many (``planning.pieces``).
    """
    alone, loaded = (due * each / (times[0] + often * (times[1] - times[0])) for each in times)  # that come in it
    left = np.exp(-loaded) * np.expm1(-loaded / pieces) / np.expm1(-loaded)
    often = 1.0 / (1.0 + time_alone(1.0, -np.expm1(-alone / pieces), left))
    busy = (1.0 - often) * -np.expm1(-alone / ranks) + often * -np.expm1(-loaded / ranks)
    return 1.0 - often, due / ranks / busy


@np.vectorize
def _gathered(prompts: float, pieces: float, steps: int, ranks: float) -> tuple[float, float]:
    """Pieces of a step with some, and steps that a prompt waits for other ranks, as in a plan, by what falls due in
    a step and the ``steps`` that they wait at most. [1]
    """
    if ranks < 2 or not steps:
        return 1.0, 0.0
    some, count = np.array(min(pieces, ranks)), int(ranks)
    late, chances = waits(prompts, steps, 1.0, float(some), count)
    share = mixed_share(some, count, gathered(np.array(prompts * steps), count))
    return pieces / float(share), float(late @ chances)


def _seen(used: Numeric, others: Numeric) -> Numeric:
    r"""Load that an arrival in a closed loop meets, of a server that is ``used`` for so much of the time. [1]

    Each of n others comes once a cycle: where Poisson arrivals queue as :math:`1/(1-\rho)`, more than x of theirs wait
    with the probability :math:`e^{-2x(x/n + 1-\rho)}` (Roberts and Virtamo, IEEE Transactions on Communications 39,
    1991). Its mean, with the upper bound of erfc in Abramowitz and Stegun, 7.1.13, grows as :math:`1/(1-\rho')`:

    .. math:: 1 - \rho' = \frac{1 - \rho + \sqrt{(1 - \rho)^2 + 8 \rho^2/(\pi n)}}{2}

    The approximation holds at high loads and has no square of the load under the root; it is added because a low load
    finds the server idle (chosen).
    """
    idle = np.maximum(1.0 - used, 0.0)
    return np.maximum(1.0 - (idle + np.sqrt(idle**2 + 8.0 * used**2 / (np.pi * np.maximum(others, 1e-9)))) / 2, 0.0)


def _loop(
    run: ServedModel,
    mapping: Sharding,
    lengths: RowLengths,
    others: Numeric,
    share: Numeric,
    pattern: ClosedLoopRun = ENDLESS,
    *,
    stream: bool = False,
) -> tuple[Numeric, Numeric]:
    """TPOT and TTFT where a request sees ``others``, each of which spends ``share`` of its life in decode. [s]

    In a closed loop as many prompts come in every step; of a ``stream`` more come in the longer steps.
    """
    engine, dp, mixes = run.engine, mapping.dp_attn, run.engine.mixed_steps
    pieces, size, room = pieces_of(engine, lengths.isl)
    fit = room * dp  # pieces that one pass can take
    running = 1.0 + others * (share if mixes else 1.0)
    due = np.maximum(others * share * pieces / lengths.gaps, LEAST_DUE)
    held = engine.held_at_most * engine.ranks_wait
    waits, gathering = _gathered(due / pieces, due, held, np.minimum(dp, others + 1.0))
    if pattern.spread == 0 and not mixes:
        waits = np.minimum(fit, (others + 1.0) * pieces)
    polled = due if mixes else run.poll_steps * due  # pieces that one look at new requests finds
    plain = decode_time(run, mapping, running, lengths)
    decodes = running if mixes else 0.0

    def step(pieces: Numeric, ranks: Numeric) -> Numeric:
        return prefill_time(run, mapping, pieces * size, ranks, lengths, decodes=decodes)

    lone, full = (0.0, 0.0) if mixes else (step(1.0, 1.0), step(fit, dp))
    of_rank = _of_rank(polled / dp, due / dp, plain, (lone, full, fit), dp)
    of_rank = np.where(others > 0, np.minimum(of_rank, room), 1.0)

    mix = _mix(step, polled, (waits, fit, dp), of_rank)
    for _ in range(TURNS if stream and mixes else 0):
        none, of_rank = _of_stream(due, (plain, mix.loaded), mix.shares.some, pieces, dp)
        mix = _mix(step, polled, (waits, fit, dp), np.clip(of_rank, 1.0, room), none)
    (most, busy, one, every, shares), loaded = mix, mix.loaded
    often = shares.some
    passes = (others + 1.0) * pieces / (most * busy / often) * loaded  # in the life of a request [s]
    steps = lengths.gaps * plain + passes
    used = np.minimum(passes * others / (others + 1.0) / steps, 1.0)
    own = pieces * own_step(one, every, busy)
    if mixes:  # what ends with a step begins with another
        each, mean, come = (one - plain) / of_rank, shares.mean(plain, one, every), due / dp
        within = often * np.maximum((1.0 + come - of_rank) * of_rank, 0.0) * each**2
        under_way = mean + (often * (1.0 - often) * (loaded - plain) ** 2 + within) / mean
        shared = each * (np.minimum(1.0 + come, room) - of_rank)
    else:
        mean, first = (plain + due / most * loaded) / (1.0 + due / most), np.where(waits > 1, every, lone)
        more, seen, come = (full - lone) / np.maximum(fit - 1.0, 1.0), _seen(used, others), due * lengths.gaps / steps
        alone, idle = (1.0 - seen) * plain + seen * first, np.maximum(1.0 - seen * come * more, LEAST_DUE)
        under_way = np.minimum(alone / idle, alone + seen * (full - first))
        shared = pieces * (lone + more * (np.minimum(1.0 + come * under_way, fit) - 1.0)) - own
    shared = np.where((others > 0) & (waits == 1), shared, 0.0)  # the own step with others, over one of the mean
    waited = _bunching(pattern, np.maximum(passes - own, 0.0), steps, drains=not mixes)
    filled = _seen(np.minimum(due / fit if mixes else passes / steps, 1.0), others)
    queue = filled ** (fit + 1.0) * own / (2 * fit * np.maximum(1 - filled, LEAST_DUE))
    waited = waited + np.minimum(queue, others * own)
    looked = looked_late(run, plain + due / most * loaded, due)
    residual = np.where(others > 0, under_way / 2 + engine.steps_ahead * mean + looked, 0.0)
    met = np.maximum(passes - own - shared - waited - used * (engine.request_host + residual), 0.0)  # of others
    tpot = token_time(plain, met, lengths.gaps, loaded if mixes else None)
    return tpot, engine.request_host + own + shared + residual + gathering * tpot + waited


def looked_late(run: ServedModel, step: Numeric, due: Numeric = 0.0) -> Numeric:
    """Mean wait for the next look at requests, or sending of tokens, beyond half of the ``step`` under way; where
    prompts gather, the first waits for all steps and the ``due`` that come in each of them for the rest. [s]
    """
    come = run.gather_steps * due
    return ((run.poll_steps - 1) / 2 + run.gather_steps * (1.0 + come / 2) / (1.0 + come)) * step


def colocated(
    run: ServedModel, mapping: Sharding, lengths: RowLengths, concurrency: Numeric, pattern: ClosedLoopRun = ENDLESS
) -> SteadyState:
    """One co-located instance with ``concurrency`` requests in flight (infinite: everything queued), the rest waiting.
    Where the weights leave no room by our count, capacity is 0 and all but endless requests are admitted.
    """
    room = capacity(run, mapping, lengths)
    admitted = np.minimum(concurrency, _holds(room))
    others = admitted - 1
    low, high = np.zeros(np.shape(others)), np.ones(np.shape(others))
    for _ in range(HALVINGS):
        share = (low + high) / 2
        tpot, ttft = _loop(run, mapping, lengths, others, share, pattern)
        decoding = lengths.gaps * tpot
        more = decoding / (decoding + ttft) > share
        low, high = np.where(more, share, low), np.where(more, high, share)
    tpot, ttft = _loop(run, mapping, lengths, others, (low + high) / 2, pattern)
    rate = admitted / (ttft + lengths.gaps * tpot)
    waiting = np.where(concurrency > admitted, (concurrency - admitted) / rate, 0.0)
    return SteadyState(tpot, ttft + waiting, rate, room)


def _holds(room: Numeric) -> Numeric:
    """Requests that an instance admits: what fits, no limit where nothing would although the engine ran. [request]"""
    return np.where(room > 0, room, np.inf)


def at_rate(run: ServedModel, mapping: Sharding, lengths: RowLengths, request_rate: Numeric) -> SteadyState:
    """One co-located instance under a stream of ``request_rate`` requests a second, none lost.

    The sequences in decode follow from Little's law, ``B = rate*(OSL-1)*T(B)``; where the memory holds fewer,
    times are those of a full instance, and ``request_rate`` of the result what it can serve.
    """
    room = capacity(run, mapping, lengths)
    low, high = np.zeros(np.shape(room)), np.minimum(_holds(room), run.engine.max_running * mapping.dp_attn)
    for _ in range(HALVINGS):
        running = (low + high) / 2
        tpot, _ = _loop(run, mapping, lengths, running, 1.0, stream=True)
        less = running < request_rate * lengths.gaps * tpot
        low, high = np.where(less, running, low), np.where(less, high, running)
    tpot, ttft = _loop(run, mapping, lengths, high, 1.0, stream=True)
    return SteadyState(tpot, ttft, np.minimum(request_rate, high / (lengths.gaps * tpot)), room)


def prefill_limit(run: ServedModel, mapping: Sharding, lengths: RowLengths) -> Numeric:
    """Prompts that a prefill worker finishes in a second when its queue never empties. [request/s]"""
    pieces, size, room = pieces_of(run.engine, lengths.isl)
    fit = room * mapping.dp_attn
    return fit / (pieces * prefill_time(run, mapping, fit * size, mapping.dp_attn, lengths))


def _transfer_time(run: ServedModel, prefill: WorkerPool, decode: WorkerPool, lengths: RowLengths) -> Numeric:
    """Cache of a prompt from the distinct GPUs of its prefill rank, over NVLink inside one domain, else the NIC. [s]"""
    at = run.at
    gpus = prefill.count * prefill.mapping.gpus + decode.count * decode.mapping.gpus
    link = np.where(gpus <= at.system.nvlink_domain, at.system.nvlink_bandwidth, at.system.nic_bandwidth)
    senders = unique_gpus(at.model, prefill.mapping) / prefill.mapping.dp_attn
    sent = at.model.kv_bytes_per_token(at.precision) * lengths.isl
    return sent / (senders * at.profile.nic_efficiency * link)


def slots_for_load(load: Numeric) -> Numeric:
    """Largest batch of a decode rank that a load of ``load`` requests a rank tells, infinite where it tells none. [1]

    >>> slots_for_load(np.array([2151 / 16, 130.0, 160.0, 128.0, 5.0])).tolist()
    [128.0, 128.0, inf, inf, inf]
    """
    below = 2.0 ** np.floor(np.log2(np.maximum(load, 1.0)))
    tells = (below >= LEAST_SLOTS) & (below < load) & (load <= OVERSUBSCRIBED * below)
    return np.where(tells, below, np.inf)


def disaggregated(
    run: ServedModel,
    prefill: WorkerPool,
    decode: WorkerPool,
    lengths: RowLengths,
    concurrency: Numeric,
    pattern: ClosedLoopRun = ENDLESS,
) -> SteadyState:
    r"""Prefill and decode workers with ``concurrency`` requests in flight in the whole deployment.

    With Y of them in decode on n workers, :math:`T = T_d(\max(Y/n, 1))` and the rate is
    :math:`\lambda = Y/((OSL-1)\,T)`; the others are in prefill or wait for it, and Y is where
    :math:`Y + \lambda\,TTFT(\lambda)` is the concurrency. A prompt waits in front of c prefill workers at utilisation u
    for :math:`S\,u^{\sqrt{2(c+1)}-1}/(2c\,(1-u))`, the common approximation of M/D/c. Where the launch or the
    load (``slots_for_load``) tells the largest batch of decode, the others wait for a slot.
    """
    engine = run.engine
    pieces, size, of_rank = pieces_of(engine, lengths.isl)
    dp = prefill.mapping.dp_attn
    fit = of_rank * dp
    most = prefill.count * prefill_limit(run, prefill.mapping, lengths)
    room = decode.count * capacity(run, decode.mapping, lengths)
    transfer = _transfer_time(run, prefill, decode, lengths)

    counts = 2.0 ** np.arange(int(np.log2(np.max(fit))) + 2)  # prompts of a pass [1]
    passes = (prefill_time(run, prefill.mapping, each * size, np.minimum(each, dp), lengths) for each in counts)
    times = np.stack([np.broadcast_to(pieces * each, np.shape(most)) for each in passes])

    def timed(prompts: Numeric) -> tuple[Numeric, Numeric]:
        """Passes of so many prompts, several where they do not fit into one, and what another prompt adds. [s]"""
        inside, whole = np.minimum(prompts, fit), np.maximum(prompts / fit, 1.0)
        place = np.clip(np.floor(np.log2(inside)).astype(int), 0, counts.size - 2)
        low, high = (np.take_along_axis(times, (place + more)[None], 0)[0] for more in (0, 1))
        more = (high - low) / counts[place]
        time = low + more * (inside - counts[place])
        return time * whole, np.where(prompts < fit, more, time / fit)

    def rate_and_first(decoding: Numeric) -> tuple[Numeric, Numeric, Numeric]:
        step = decode_time(run, decode.mapping, np.maximum(decoding / decode.count, 1.0), lengths)
        rate = decoding / (lengths.gaps * step)
        used = np.minimum(rate / most, 1.0)
        often = rate / prefill.count * _seen(used, (concurrency - 1.0) / prefill.count) / np.maximum(used, 1e-9)
        mean = own = np.ones(np.shape(most))
        for _ in range(4):
            come = often * timed(mean)[0]
            mean = np.minimum(come + np.exp(-come), fit)
        meets = often * (come / (come + np.exp(-come))) ** (np.sqrt(2 * (prefill.count + 1)) - 1)
        for _ in range(4):  # Newton's steps: own = 1 + meets * time(own)
            time, more = timed(own)
            own = np.maximum((1.0 + meets * (time - more * own)) / np.maximum(1.0 - meets * more, 1e-6), 1.0)
        rest = (own - 1.0) / 2  # of the prompts that come with it, half are before it
        first = timed(np.maximum(np.minimum(own, fit), 1.0 + rest))[0]
        if engine.ranks_wait:
            first = np.maximum(first, timed(np.clip(concurrency / prefill.count, 1.0, dp))[0])
        start = _bunching(pattern, np.maximum(concurrency / most - first, 0.0), 0.0, drains=False)
        left = rest / np.maximum(often, LEAST_DUE)  # of the pass under way [s]
        begun = (0.5 + engine.steps_ahead) * step + looked_late(run, step)
        return step, rate, engine.request_host + left + first + transfer + begun + start

    ranks = decode.mapping.dp_attn * decode.count
    slots = ranks * (run.slots or slots_for_load(concurrency / ranks))
    low, high = np.zeros(np.shape(most)), np.minimum(np.minimum(concurrency, slots), _holds(room))
    for _ in range(HALVINGS):
        decoding = (low + high) / 2
        _, rate, first = rate_and_first(decoding)
        more = (decoding + rate * first < concurrency) & (rate < most)
        low, high = np.where(more, decoding, low), np.where(more, high, decoding)
    step, rate, first = rate_and_first(low)
    return SteadyState(step, np.maximum(first, (concurrency - low) / rate), rate, room)


def static_batch(run: ServedModel, mapping: Sharding, lengths: RowLengths, batch: Numeric) -> SteadyState:
    """A fixed batch from start to end: all prompts in one go, then decode; what does not fit goes after it."""
    room = capacity(run, mapping, lengths)
    inside = np.minimum(batch, _holds(room))
    first = prefill_time(run, mapping, inside * lengths.isl, np.minimum(inside, mapping.dp_attn), lengths)
    step = decode_time(run, mapping, inside, lengths)
    whole = (first + lengths.gaps * step) * batch / inside
    return SteadyState(step, first, batch / whole, room)
