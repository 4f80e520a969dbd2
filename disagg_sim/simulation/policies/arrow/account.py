"""Compiled: what Arrow's scheduler knows of one instance, and what follows from it."""

from __future__ import annotations

import numpy as np

from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import InstanceRecord, dtype_of


class Account:
    """What the scheduler knows of one instance; the first three are of its ``Predictor``."""

    constant: float  # [s]
    linear: float  # [s/token]
    quadratic: float  # [s/token^2]
    free_s: float  # when the prompts in its queue will be done, on its own clock [s]
    ahead_s: float  # of that clock to the real one: what its last prompt took longer than predicted, in all [s]
    interval_s: float  # mean time between its decode steps over the window; 0 without one [s]
    held: float  # MaxRunningTokens; -1 where others decode in time and it never does [token]
    seats: float  # sequences that it can run [1]
    room: float  # tokens that its memory holds [token]
    weight: float  # its MaxRunningTokens over the largest; 1 where nobody decodes in time [1]
    waiting: int  # 1 = requests that wait for memory are load of decode
    corrects: int  # 1 = ``ahead_s`` is that of its last prompt; 0 = predictions add up


ACCOUNT = dtype_of(Account)


@inner
def prompt_of(account: Account, tokens: int) -> float:
    """Predicted time of a prompt alone on an instance. [s]"""
    return account.constant + tokens * (account.linear + tokens * account.quadratic)


@inner
def delay_of(account: Account, queued: int, now: float) -> float:
    """Predicted wait of a prompt that comes now: what is left of the queue. [s]"""
    return max(account.free_s + account.ahead_s - now, 0.0) if queued > 0 else 0.0


@inner
def queue_of(inst: InstanceRecord) -> int:
    """Prompt tokens that wait for prefill, those whose past is being loaded from tiers included. [token]"""
    return inst.queued_prompt_tokens + inst.loading_prompt_tokens


@inner
def decode_of(inst: InstanceRecord, account: Account, steps: int) -> int:
    """Tokens of all requests that an instance decodes, is being sent, or, where they count, keeps waiting. [token]

    ``steps`` of its decodes are not in its columns yet.
    """
    running = inst.running_tokens + steps * inst.running_requests
    return running + inst.coming_tokens + account.waiting * inst.queued_context_tokens


@inner
def decodes(inst: InstanceRecord, account: Account) -> bool:
    """Whether an instance has anything to decode."""
    return inst.running_requests > 0 or inst.coming_tokens > 0 or account.waiting * inst.queued_context_tokens > 0


@inner
def share(account: Account, tokens: int) -> float:
    """Of what an instance decodes in time. [1]"""
    return tokens / max(account.held, 1.0) if account.held >= 0.0 else np.inf


@inner
def booked(account: Account, tokens: int, queued: int, now: float) -> float:
    """Book a prompt behind ``queued`` tokens: its predicted end, on the clock of the instance. [s]"""
    start = now - account.ahead_s
    if queued > 0:
        start = max(start, account.free_s)
    account.free_s = start + prompt_of(account, tokens)
    return account.free_s
