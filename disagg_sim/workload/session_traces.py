"""Draw synthetic sessions: turns with a growing context, think and tool time between them, blocks that turns share.

>>> from disagg_sim.facts.load import load_traffic
>>> trace = session_trace(load_traffic("coding_agent"), rate=0.1, sessions=50, seed=1)
>>> int((trace.sessions.previous() < 0).sum()), trace.prefix.block_tokens
(50, 512)
"""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Ints, Mask
from disagg_sim.errors import InputError, above_zero, whole_number
from disagg_sim.facts.traffic import SessionSpec, TrafficSpec
from disagg_sim.memory import require_memory
from disagg_sim.workload.arrivals import ArrivalProcess, Poisson, arrivals, named_rng
from disagg_sim.workload.distributions import length_distribution
from disagg_sim.workload.request_columns import PrefixBlocks, Sessions
from disagg_sim.workload.trace import MOST_REQUESTS, Trace, too_many

#: Tokens of a block of the prompts, as in Mooncake's traces. [token]
BLOCK_TOKENS = 512
#: Memory that takes a block of a prompt as it is drawn, at its peak. [B]
BLOCK_BYTES = 64.0


def session_trace(
    traffic: TrafficSpec,
    *,
    rate: float,
    sessions: int | None = None,
    duration: float | None = None,
    arrivals_as: ArrivalProcess = Poisson(),  # noqa: B008 - frozen, no state
    seed: int = 0,
    name: str = "sessions",
) -> Trace:
    """Draw sessions of a traffic.

    A session begins with a prompt of ``session.first`` tokens, of which all sessions share ``session.shared_tokens``
    (system prompt and tools). Each later prompt is the one before and ``session.growth`` tokens: the answer, as far as
    it stays in the context, and what a person or a tool adds. All are drawn independently. Takes ``traffic`` (answers
    are those of its first case [token]), ``rate`` [1/s] and ``sessions`` and ``duration`` (one of them: how many
    sessions [1], or up to which time they begin [s]).

    >>> from disagg_sim.facts.load import load_traffic
    >>> trace = session_trace(load_traffic("coding_agent"), rate=0.1, sessions=200, seed=1)
    >>> f"{len(trace) / 200:.0f} turns, {trace.input_tokens.mean():,.0f} tokens a prompt"
    '12 turns, 32,935 tokens a prompt'
    """
    law = traffic.session
    if law is None:
        raise InputError(f"traffic {traffic.name} has no sessions; allowed: one with the key 'session'")
    if (sessions is None) == (duration is None):
        raise InputError("a trace of sessions needs sessions or duration, one of them")
    rate, rng = above_zero("rate", rate, "sessions/s"), named_rng(seed, "arrivals")
    if sessions is not None:
        begin = arrivals(arrivals_as, rng, rate, requests=whole_number("sessions", sessions))
    else:
        begin = arrivals(arrivals_as, rng, rate, duration=above_zero("duration", duration, "s"))
        if not begin.size:
            raise InputError(f"no session begins in {duration:g} s at {rate:g} sessions/s with seed {seed}")
    turns = length_distribution(law.turns).sample(named_rng(seed, "turns"), begin.size)
    if (count := float(turns.sum(dtype=float))) > MOST_REQUESTS:
        raise InputError(too_many(f"turns of {begin.size:,} sessions", count))
    ends = np.cumsum(turns)
    session, first = np.repeat(np.arange(begin.size), turns), np.zeros(ends[-1], dtype=bool)
    first[ends - turns] = True
    drawn = named_rng(seed, "think_s").random(first.size)
    think = np.interp(drawn, law.think_s.probabilities, law.think_s.seconds)
    think[first] = 0.0
    inputs = _prompts(law, first, seed)
    require_memory(f"a trace of {begin.size:,} sessions", BLOCK_BYTES * float(inputs.sum(dtype=float)) / BLOCK_TOKENS)
    outputs = length_distribution(traffic.cases[0].osl).sample(named_rng(seed, "output_tokens"), first.size)
    waited = np.cumsum(think)
    arrival = np.repeat(begin - waited[ends - turns], turns) + waited
    order = np.argsort(arrival, kind="stable")
    return Trace(
        arrival=arrival[order],
        input_tokens=inputs[order],
        output_tokens=outputs[order],
        prefix=_blocks(inputs, session, law.shared_tokens).take(order),
        sessions=Sessions(session=session[order], think_s=think[order]),
        name=name,
    )


def _prompts(law: SessionSpec, first: Mask, seed: int) -> Ints:
    """Length of every prompt, by session and turn. [token]"""
    grown = length_distribution(law.growth).sample(named_rng(seed, "growth"), first.size)
    grown[first] = length_distribution(law.first).sample(named_rng(seed, "first"), int(first.sum()))
    total = np.cumsum(grown)
    before = np.where(first, total - grown, 0)
    return total - np.maximum.accumulate(before)


def _blocks(inputs: Ints, session: Ints, shared_tokens: int) -> PrefixBlocks:
    """Whole blocks of each prompt: those of the shared start from 0 on, then those of its session."""
    counts = inputs // BLOCK_TOKENS
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    ids = np.repeat(session + 1, counts) * (int(counts.max(initial=0)) + 1) + place
    return PrefixBlocks(
        offsets=offsets, ids=np.where(place < shared_tokens // BLOCK_TOKENS, place, ids), block_tokens=BLOCK_TOKENS
    )
