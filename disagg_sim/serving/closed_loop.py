r"""Steady state of a real engine under a closed loop: so many requests are always in flight.

A new request starts as soon as one ends. Of the A requests that an instance admits (no more than its
memory holds), a share x of the time of each is decode and the rest is its prefill with the wait for
it. Every request sees the others (the arrival theorem of closed networks), hence with
:math:`B = 1 + (A-1)\,x` sequences in a decode step and m pieces of at most one token budget a prompt

.. math:: \varphi = \frac{(A-1)\,x\,m}{OSL-1},\quad
          T = (1-f)\,T_d(B) + f\,T_{mix}(B, k\,s)\ \text{(mixed)}\quad\text{or}\quad T_d(B) + f\,T_p(k\,s),\quad
          x = \frac{(OSL-1)\,T}{TTFT + (OSL-1)\,T}

where :math:`\varphi` pieces of s tokens fall due in a step, k = max(1, phi) of them go together (each DP rank
works on prompts of its own) and a share f = phi/k of the steps carries them. x is found by bisection.
Source: physics page, section 8 (co-located), with the steps as the engine forms them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.memory import colocated_bytes, decode_residents, prompt_residents
from disagg_sim.physics.mixed import mixed_step
from disagg_sim.physics.phases import Degrees, decode_step
from disagg_sim.physics.work import Numeric
from disagg_sim.search.setting import Setting, setting

#: Halvings of the bisections: the last interval is a millionth of the first.
HALVINGS = 20


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a system in one recipe, run by one engine."""

    at: Setting
    engine: EngineSpec


class Lengths(NamedTuple):
    """Input and output length of every request. [token]"""

    isl: Numeric
    osl: Numeric


class SteadyState(NamedTuple):
    """What requests see while so many are in flight; arrays of the shape of the input."""

    tpot: Numeric  # mean time of an output token after the first [s]
    ttft: Numeric  # mean, wait included [s]
    request_rate: Numeric  # of the deployment [request/s]
    capacity: Numeric  # requests that fit: memory of an instance (of all decode workers) [request]

    def latency(self, lengths: Lengths) -> Numeric:
        """Mean time of a request from its start to its last token. [s]"""
        return self.ttft + (lengths.osl - 1) * self.tpot


def served(
    model: ModelSpec | str, system: SystemSpec | str, precision: str, engine: EngineSpec, profile: str = "measured"
) -> Served:
    """Resolve the rates; host time and memory share are the engine's, and memory is provisioned for the mean.

    Raises
    ------
    UnknownNameError, InputError
        As ``search.setting.setting``.
    """
    at = setting(model, system, precision, profile, engine.name)
    own = replace(
        at.profile, host=0.0, memory_utilisation=engine.memory_utilisation, resident_deviations=0.0
    )
    return Served(replace(at, profile=own, rates=replace(at.rates, profile=own)), engine)


def host_time(engine: EngineSpec, degrees: Degrees, sequences: Numeric) -> Numeric:
    """Host time of a step that the GPU waits for: fixed, by sequences of a rank, by doublings of the GPUs. [s]"""
    ranks = np.log2(degrees.gpus)
    return engine.step_host + engine.rank_host * ranks + engine.sequence_host * sequences / degrees.dp_attn


def decode_time(run: Served, degrees: Degrees, batch: Numeric, lengths: Lengths) -> Numeric:
    """A decode step of ``batch`` sequences at their mean length. [s]"""
    context = lengths.isl + lengths.osl / 2
    step = decode_step(run.at.model, run.at.rates, degrees, batch=batch, context=context)
    return step.ttl + host_time(run.engine, degrees, batch)


def prefill_time(
    run: Served, degrees: Degrees, tokens: Numeric, ranks: Numeric, lengths: Lengths, *, decodes: Numeric = 0.0
) -> Numeric:
    """A pass of ``tokens`` new tokens shared by ``ranks`` DP ranks, with ``decodes`` sequences riding along. [s]"""
    context = lengths.isl + lengths.osl / 2
    step = mixed_step(
        run.at.model, run.at.rates, degrees, batch=decodes, context=context, chunk_tokens=tokens, isl=lengths.isl,
        chunk_ranks=ranks,
    )  # fmt: skip
    return step.time + host_time(run.engine, degrees, decodes)


def pieces_of(engine: EngineSpec, isl: Numeric) -> tuple[Numeric, Numeric]:
    """Pieces m into which the token budget of a step cuts a prompt, and tokens s of each: ``s = ISL/m``."""
    count = np.ceil(isl / engine.chunk_tokens)
    return count, isl / count


def capacity(run: Served, degrees: Degrees, lengths: Lengths) -> Numeric:
    """Requests that an instance can hold at their mean length, 0 where not even one a rank fits. [request]"""
    at, engine = run.at, run.engine
    cached, prompt = decode_residents(lengths.isl, lengths.osl), prompt_residents(lengths.isl)
    new = np.minimum(lengths.isl, engine.chunk_tokens)

    def fits(sequences: Numeric) -> Numeric:
        held = colocated_bytes(
            at.model, at.precision, at.profile, degrees, sequences * degrees.dp_attn, cached=cached, prompt=prompt,
            prompts=0.0, new=new, mixed=engine.mixed_steps,
        )  # fmt: skip
        return held <= at.memory_limit

    low, high = np.zeros(np.shape(new)), np.full(np.shape(new), float(engine.max_running))
    whole = fits(high)
    for _ in range(HALVINGS):
        middle = np.maximum((low + high) / 2, 1.0)
        holds = fits(np.floor(middle))
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(whole, float(engine.max_running), np.floor(low)) * degrees.dp_attn


class _Loop(NamedTuple):
    """Token time, first-token time and prefill load of the requests that an instance admits."""

    tpot: Numeric  # [s]
    ttft: Numeric  # [s]


def _loop(run: Served, degrees: Degrees, lengths: Lengths, others: Numeric, share: Numeric) -> _Loop:
    """Times where each of ``others + 1`` requests spends ``share`` of its life in decode."""
    engine, dp = run.engine, degrees.dp_attn
    pieces, size = pieces_of(engine, lengths.isl)
    running = 1.0 + others * share
    due = np.maximum(others * share * pieces / np.maximum(lengths.osl - 1, 1.0), 1e-9)
    fit = np.maximum(np.floor(engine.chunk_tokens / size), 1.0) * dp  # pieces that one pass can take
    together = np.clip(due, 1.0, fit)
    ranks = np.minimum(together, dp)
    plain = decode_time(run, degrees, running, lengths)
    decodes = running if engine.mixed_steps else 0.0
    loaded = prefill_time(run, degrees, together * size, ranks, lengths, decodes=decodes)
    often = due / together
    if engine.mixed_steps:
        tpot = np.where(often < 1, (1 - often) * plain + often * loaded, loaded * often)
        used = np.minimum(due / fit, 1.0)
    else:
        tpot = plain + often * loaded
        used = often * loaded / tpot
    own = pieces * prefill_time(run, degrees, size, 1.0, lengths, decodes=decodes)
    queue = used**fit * own / (2 * fit * np.maximum(1 - used, 1e-6))
    residual = np.where(others > 0, plain / 2, 0.0)
    return _Loop(tpot, engine.request_host + own + residual + np.minimum(queue, others * own))


def colocated(run: Served, degrees: Degrees, lengths: Lengths, concurrency: Numeric) -> SteadyState:
    """One co-located instance with ``concurrency`` requests in flight, those that do not fit waiting.

    Parameters
    ----------
    degrees, lengths, concurrency
        Of shape (rows,) or numbers; ``concurrency`` counts the requests of the instance, infinity for
        "everything queued". [request]

    Returns
    -------
    SteadyState
        ``nan`` where not one request fits.
    """
    room = capacity(run, degrees, lengths)
    admitted = np.where(room > 0, np.minimum(concurrency, np.maximum(room, 1.0)), np.nan)
    others = admitted - 1
    low, high = np.zeros(np.shape(others)), np.ones(np.shape(others))
    for _ in range(HALVINGS):
        share = (low + high) / 2
        loop = _loop(run, degrees, lengths, others, share)
        decoding = (lengths.osl - 1) * loop.tpot
        more = decoding / (decoding + loop.ttft) > share
        low, high = np.where(more, share, low), np.where(more, high, share)
    loop = _loop(run, degrees, lengths, others, (low + high) / 2)
    rate = admitted / (loop.ttft + (lengths.osl - 1) * loop.tpot)
    waiting = np.where(np.isfinite(concurrency), (concurrency - admitted) / rate, np.inf)
    ttft = np.where(concurrency > admitted, loop.ttft + waiting, loop.ttft)
    return SteadyState(loop.tpot, ttft, rate, room)
