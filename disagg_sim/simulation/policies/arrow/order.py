"""Compiled: the instances of a phase in the order of what Arrow compares, so that a choice looks at few of them.

An order has two trees of least keys (``kernel.min_tree``) for each kind of instances: of those that do only what they
are assigned to (``PURE``), and of those that still finish the work of their other role (``MIXED``). Those that prefill
are in the order in which their queues end, those that decode in that of their tokens at their last event, which are
brought to the present for the first of a tree (as in ``kernel.ranking``). The log of the kernel says what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats, Ints
from disagg_sim.simulation.instances import Index
from disagg_sim.simulation.kernel.compiled import inner
from disagg_sim.simulation.kernel.layout import FleetState
from disagg_sim.simulation.kernel.min_tree import first_up_to, least_of, least_tree, set_key
from disagg_sim.simulation.kernel.progress import uncounted
from disagg_sim.simulation.policies.arrow.account import (
    Account,
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
    """Make an order.

    Instances 0 and 2 of three, all of one kind:

    >>> order_of(np.array([0, 2]), np.zeros(3, int))[-2, :3].tolist()
    [0.0, -1.0, 0.0]
    """
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
