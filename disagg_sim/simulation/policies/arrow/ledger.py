"""Arrow's ledger: what its scheduler knows of each instance, and the choices based on it, compiled.

Every comparison is in what an instance serves: seconds of its own prefill, shares of the tokens that it decodes in
time. On equal instances these are the paper's comparisons of delays and of tokens, choice by choice.

So that a choice looks at few instances, those of a phase are in an order, which has two trees of least keys
(``kernel.ranking``) for each kind of instances: of those that do only what they are assigned to (``PURE``), and of
those that still finish the work of their other role (``MIXED``). Those that prefill are in the order in which their
queues end, those that decode in that of their tokens at their last event, which are brought to the present for the
first of a tree. The log of the kernel says what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.addresses import state_at
from disagg_sim.simulation.kernel.compiled import entry, inner
from disagg_sim.simulation.kernel.layout import FleetState, InstanceRecord
from disagg_sim.simulation.kernel.ranking import first_up_to, least_of, least_tree, set_key
from disagg_sim.simulation.kernel.ranks import uncounted
from disagg_sim.simulation.policies.arrow.account import (
    Account,
    booked,
    decode_of,
    decodes,
    delay_of,
    prompt_of,
    queue_of,
    share,
)

PURE, MIXED = 0, 1
#: Rows behind the trees: the kind of each instance, and last where the log was read last; when its tokens were brought
#: to the present. [s]
BEHIND = 2


def order_of(among: Index, kind: Ints) -> Floats:
    """Make an order of some instances, each of a kind."""
    tree = least_tree(np.full(kind.size, np.inf))
    order = np.stack([tree] * (2 * (int(kind.max()) + 1) + BEHIND))
    order[-2] = -1.0
    order[-2, among] = kind[among]
    order[-2, -1] = -2.0 - kind.size  # as long ago as nothing
    order[-1] = -np.inf
    return order


@inner
def among_these(order: Floats, i: int) -> bool:
    """Whether an instance is one of the phase."""
    return bool(order[len(order) - BEHIND, i] >= 0.0)


@inner
def enter(st: FleetState, ledger: Sequence[Account], order: Floats, i: int, decode: bool) -> None:
    """Put an instance where it belongs, if it is one of the phase."""
    kind = int(order[len(order) - BEHIND, i])
    if kind < 0:
        return
    one, account = st.inst[i], ledger[i]
    if decode:
        key = float(decode_of(one, account, 0)) if account.held >= 0.0 else 0.0
        mixed = MIXED if one.queued_prompt_tokens > 0 else PURE
        order[len(order) - 1, i] = -np.inf
    else:
        key = account.free_s + account.ahead_s if queue_of(one) > 0 else -np.inf
        mixed = MIXED if decodes(one, account) else PURE
    set_key(order[2 * kind + mixed], i, key)
    set_key(order[2 * kind + 1 - mixed], i, np.inf)


@inner
def catch_up(st: FleetState, ledger: Sequence[Account], order: Floats, decode: bool) -> None:
    """Bring an order up to date with the log."""
    here, marks = st.world[0], order[len(order) - BEHIND]
    read = int(marks[len(marks) - 1])
    if here.changes - read > len(st.log):
        for i in range(len(ledger)):
            enter(st, ledger, order, i, decode)
    else:
        for at in range(read, here.changes):
            enter(st, ledger, order, st.log[at % len(st.log)], decode)
    marks[len(marks) - 1] = here.changes


@inner
def first_of(order: Floats) -> int:
    """The first instance of the phase."""
    i = 0
    while order[len(order) - BEHIND, i] < 0.0:
        i += 1
    return i


@inner
def soonest_done(
    st: FleetState, ledger: Sequence[Account], order: Floats, mixed: int, tokens: int, now: float
) -> tuple[int, float]:
    """Where a prompt would be done first, of several where it waits least, and the time until then [s]; -1 = no room.

    Queues that have ended by the clock of their instance last no time, so that the first of these counts.
    """
    best, best_s, best_delay = -1, np.inf, np.inf
    for row in range(mixed, len(order) - BEHIND, 2):
        tree = order[row]
        i = first_up_to(tree, now) if tree[1] <= now else least_of(tree)
        if i < 0 or ledger[i].room <= tokens:
            continue
        delay = delay_of(ledger[i], queue_of(st.inst[i]), now)
        time = delay + prompt_of(ledger[i], tokens)
        if time < best_s or (time == best_s and (delay < best_delay or (delay == best_delay and i < best))):
            best, best_s, best_delay = i, time, delay
    return best, best_s


@inner
def lightest_now(
    st: FleetState, ledger: Sequence[Account], order: Floats, mixed: int, more: int, now: float
) -> tuple[int, float]:
    """Where ``more`` tokens leave the least share taken, the first of several, and the share [1]; -1 = no room."""
    best, best_share, present = -1, np.inf, order[len(order) - 1]
    for row in range(mixed, len(order) - BEHIND, 2):
        tree = order[row]
        i = least_of(tree)
        while i >= 0 and present[i] != now and ledger[i].held >= 0.0:
            present[i] = now
            set_key(tree, i, float(decode_of(st.inst[i], ledger[i], uncounted(st, i, now))))
            i = least_of(tree)
        if i < 0 or ledger[i].room <= more:
            continue
        taken = share(ledger[i], int(tree[len(tree) // 2 + i]) + more)
        if best < 0 or taken < best_share or (taken == best_share and i < best):
            best, best_share = i, taken
    return best, best_share


@entry
def prompt_s(ledger: Sequence[Account], i: int, tokens: int) -> float:
    """Predicted time of a prompt alone on an instance. [s]"""
    return prompt_of(ledger[i], tokens)


@entry
def take(ledger: Sequence[Account], i: int, tokens: int, queued: int, now: float) -> float:
    """Book a prompt on an instance that has ``queued`` tokens: its predicted end, on the clock of the instance. [s]"""
    return booked(ledger[i], tokens, queued, now)


@entry
def book(home: Ints, order: Floats, ledger: Sequence[Account], i: int, tokens: int, now: float) -> float:
    """The same on an instance as it is, which may be one of those in ``order`` by their queues."""
    st = state_at(home)
    end = booked(ledger[i], tokens, queue_of(st.inst[i]), now)
    enter(st, ledger, order, i, decode=False)
    return end


@entry
def place(
    home: Ints, order: Floats, ledger: Sequence[Account], tokens: int, ttft: float, now: float
) -> tuple[int, float, int]:
    """Algorithm 1, first steps: an instance of P, else of D->P, within the limit, booked, and the predicted end.

    In each pool it is the one where the prompt would be done first, of several the one with the shorter queue.
    Otherwise -1, the time until the prompt is done late [s], and where; -1 where nobody has room. ``order`` has those
    that prefill by their queues.
    """
    st = state_at(home)
    catch_up(st, ledger, order, decode=False)
    pure, pure_s = soonest_done(st, ledger, order, PURE, tokens, now)
    mixed, mixed_s = soonest_done(st, ledger, order, MIXED, tokens, now)
    for i, time in ((pure, pure_s), (mixed, mixed_s)):
        if i >= 0 and time <= ttft:
            end = booked(ledger[i], tokens, queue_of(st.inst[i]), now)
            enter(st, ledger, order, i, decode=False)
            return i, end, i
    return (-1, pure_s, pure) if pure >= 0 else (-1, mixed_s, mixed)


@entry
def sooner(
    among: Index, inst: Sequence[InstanceRecord], ledger: Sequence[Account], tokens: int, within: float, now: float
) -> Index:
    """Those of some instances where a prompt would be done in less than ``within`` [s]."""
    found = np.empty_like(among)
    count = 0
    for i in among:
        account = ledger[i]
        time = delay_of(account, queue_of(inst[i]), now) + prompt_of(account, tokens)
        if account.room > tokens and time < within:
            found[count] = i
            count += 1
    return found[:count]


@entry
def soonest_free(
    among: Index, queued: Ints, ledger: Sequence[Account], tokens: int, most: float, now: float
) -> tuple[int, float]:
    """Of instances whose queue lasts less than ``most`` [s], where a prompt would be done first, and the time. [s]"""
    found, found_s = -1, np.inf
    for i in among:
        account = ledger[i]
        delay = delay_of(account, queued[i], now)
        if account.room > tokens and delay < most:
            time = delay + prompt_of(account, tokens)
            if time < found_s:
                found, found_s = i, time
    return found, found_s


@entry
def least_delay(among: Index, inst: Sequence[InstanceRecord], ledger: Sequence[Account], now: float) -> int:
    """Of D->P, else of P, the instance with the shortest queue that can decode in time; -1 = none."""
    pure, mixed = -1, -1
    pure_s, mixed_s = np.inf, np.inf
    for i in among:
        one, account = inst[i], ledger[i]
        if account.held < 0.0:
            continue
        delay = delay_of(account, queue_of(one), now)
        if decodes(one, account):
            if delay < mixed_s:
                mixed, mixed_s = i, delay
        elif delay < pure_s:
            pure, pure_s = i, delay
    return int(mixed if mixed >= 0 else pure)


@entry
def lightest(
    among: Index, home: Ints, ledger: Sequence[Account], more: int, at: float
) -> tuple[int, float, int, float]:
    """Where ``more`` tokens leave the least share taken, in pool D and in P->D: instance and share, -1 = none.

    Of the tokens in decode ``at`` a time [s]; those at the last event are a lower bound.
    """
    st = state_at(home)
    pure, mixed = -1, -1
    pure_share, mixed_share = np.inf, np.inf
    for i in among:
        one, account = st.inst[i], ledger[i]
        if account.room <= more:
            continue
        prefills = one.queued_prompt_tokens > 0
        best, least = (mixed, mixed_share) if prefills else (pure, pure_share)
        if best >= 0 and share(account, decode_of(one, account, 0) + more) >= least:
            continue
        taken = share(account, decode_of(one, account, uncounted(st, i, at)) + more)
        if best >= 0 and taken >= least:
            continue
        if prefills:
            mixed, mixed_share = i, taken
        else:
            pure, pure_share = i, taken
    return pure, pure_share, mixed, mixed_share


@entry
def hand_over(
    home: Ints,
    orders: tuple[Floats, Floats],
    ledger: Sequence[Account],
    more: int,
    tpot: float,
    now: float,
    origin: int,
) -> int:
    """Algorithm 2, first steps: an instance of D, else of P->D, within the limits; otherwise ``-1 - i``, i the lighter.

    The limits are MaxRunningTokens, a free sequence, and intervals up to ``tpot`` [s]. ``orders`` have those that
    prefill by their queues, where the clock of the ``origin`` has moved, and those that decode by their tokens.
    """
    st = state_at(home)
    enter(st, ledger, orders[0], origin, decode=False)
    order = orders[1]
    catch_up(st, ledger, order, decode=True)
    pure, pure_share = lightest_now(st, ledger, order, PURE, more, now)
    mixed, mixed_share = lightest_now(st, ledger, order, MIXED, more, now)
    for i in (pure, mixed):
        if i < 0:
            continue
        one, account = st.inst[i], ledger[i]
        if one.running_requests + one.queued_requests >= account.seats or account.interval_s > tpot:
            continue
        if decode_of(one, account, uncounted(st, i, now)) <= account.held:
            return int(i)
    lighter = mixed if pure < 0 or (mixed >= 0 and mixed_share < pure_share) else pure
    return -1 - int(lighter if lighter >= 0 else first_of(order))


@entry
def low(among: Index, home: Ints, ledger: Sequence[Account], without: int, most: float, at: float) -> bool:
    """Whether all that decodes would take a share up to ``most`` of what the instances but ``without`` hold.

    Of the tokens in decode ``at`` a time [s].
    """
    st = state_at(home)
    tokens, sequences, held, seats = 0, 0, 0.0, 0.0
    for i in among:
        one, account = st.inst[i], ledger[i]
        tokens += decode_of(one, account, uncounted(st, i, at))
        sequences += one.running_requests + one.queued_requests
        if i != without:
            held += max(account.held, 0.0)
            seats += account.seats
    return bool(tokens <= most * held and sequences <= most * seats)


@entry
def measure(among: Index, inst: Sequence[InstanceRecord], ledger: Sequence[Account], past: Floats) -> float:
    """Fill the intervals since the ``past`` steps and time (2, instances), which become the present ones.

    Their mean over those of ``among`` that made steps, by weight; 0 without one. [s]
    """
    total, weights = 0.0, 0.0
    for i in range(len(ledger)):
        one = inst[i]
        grown = one.decode_steps - past[0, i]
        ledger[i].interval_s = (one.decode_s - past[1, i]) / grown if grown > 0 else 0.0
        past[0, i], past[1, i] = one.decode_steps, one.decode_s
    for i in among:
        account = ledger[i]
        if account.interval_s > 0.0:
            total += account.weight * account.interval_s
            weights += account.weight
    return total / weights if weights > 0.0 else 0.0


@entry
def idle_instance(among: Index, inst: Sequence[InstanceRecord], ledger: Sequence[Account], before: Ints) -> int:
    """One of prefill that computed nothing since ``before`` and decodes in time, one that decodes first; -1 = none."""
    found = -1
    for i in among:
        one = inst[i]
        if one.prefill_tokens != before[i] or one.queued_prompt_tokens > 0 or ledger[i].held < 0.0:
            continue
        if found < 0 or (one.running_requests > 0 and inst[found].running_requests == 0):
            found = i
    return int(found)


@entry
def busy_instance(
    among: Index, inst: Sequence[InstanceRecord], ledger: Sequence[Account], limit: float, light: float
) -> int:
    """One of decode where requests wait, or with an interval above ``limit`` [s]; -1 = none.

    Where no more than a share ``light`` of what it holds is taken, its steps are slow by nature.
    """
    for i in among:
        one, account = inst[i], ledger[i]
        slow = account.interval_s > limit and share(account, decode_of(one, account, 0)) > light
        if account.waiting * one.queued_context_tokens > 0 or slow:
            return int(i)
    return -1
