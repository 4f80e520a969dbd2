"""A plain planner: try every count of every layout, and take the fewest GPUs. It shares nothing with the package.

Prefill is a queue of equal servers, one prompt at a time. Of Poisson arrivals the share C waits (Erlang's C formula):
for what is left of a pass, evenly, and for prompts before it, exponentially with what that leaves of the mean of Allen
and Cunneen. Decode is processor sharing: pi(n) is proportional to prod lambda/mu(k), and a request sees the step of the
sequences that it meets.
"""

import math
from typing import NamedTuple


class Prefill(NamedTuple):
    gpus: int  # of an instance
    first_token: float  # arrival to first token of a prompt that comes alone [s]
    seconds: float  # that it keeps the instance [s]
    variation: float  # squared coefficient of variation of these [1]
    link: float  # caches that the links of an instance carry away [request/s]


class Decode(NamedTuple):
    gpus: int  # of an instance
    steps: list[float]  # with 1, 2, ... all seats taken [s]
    link: float  # caches that the links of an instance take in [request/s]


class Question(NamedTuple):
    ttft_ms: float
    ttft_share: float  # of the requests that keep it [1]
    tpot_ms: float
    tpot_share: float
    headroom: float  # share of the rate that is served beside it [1]
    surge: float  # rate that counts over the mean rate [1]
    tokens: float  # of a request after its first [1]
    prices: tuple[float, float]  # of a GPU of prefill and of decode
    places: list[tuple[int, list[Prefill], list[Decode]]]  # GPUs that fit, and layouts: in one NVLink domain, or beyond


def erlang_c(servers: int, load: float) -> float:
    """Share of the arrivals that wait, for so many servers' worth of work below ``servers``."""
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


def late(layout: Prefill, count: int, rate: float, seconds: float) -> float:
    """Share of the requests whose first token comes after so long."""
    load = rate * layout.seconds
    if load >= count:
        return 1.0
    waits, met = erlang_c(count, load), layout.seconds * (1 + layout.variation)
    allen_cunneen = layout.seconds / (count - load) * (1 + layout.variation) / 2
    behind = max(load / count, 1e-9)  # share of those that wait that is behind others, too
    queue, total = max(allen_cunneen - met / (count + 1), 0.0) / behind, 0.0
    for eighth in range(8):  # what is left of the pass, at the middle of each eighth of it
        left = seconds - layout.first_token - met * (eighth + 0.5) / 8
        total += 1.0 if left < 0 else behind * math.exp(-left / queue) if queue else 0.0
    return waits * total / 8 + (1 - waits) * (layout.first_token > seconds)


def ttft(layout: Prefill, count: int, rate: float, share: float) -> float:
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if late(layout, count, rate, middle) <= 1 - share else (middle, high)
    return high


def tpot(layout: Decode, count: int, rate: float, tokens: float, share: float) -> float:
    """Step that a share of the requests does not exceed; inf where more than the others find no seat."""
    seats, done = len(layout.steps), [0.0] + [(n + 1) / (tokens * step) for n, step in enumerate(layout.steps)]
    if rate >= count * done[-1]:
        return math.inf
    shares = [1.0]  # pi(n) of n sequences in all instances, over pi(0)
    for n in range(1, count * seats + 1):
        few, more = n // count, -(-n // count)  # of one instance: mu is linear between whole numbers
        mu = count * done[few] + n % count * (done[more] - done[few])
        shares.append(shares[-1] * rate / mu)
    shares[-1] /= 1 - rate / (count * done[-1])  # with those that wait for a seat, a geometric series
    found, total = 0.0, sum(shares)
    if shares[-1] > (1 - share) * total:
        return math.inf
    for n, each in enumerate(shares):
        found += each
        if found >= share * total:
            return layout.steps[max(math.ceil(n / count), 1) - 1]
    raise AssertionError("the shares add up to 1")


def holds(layout: Prefill | Decode, asked: Question, rate: float, count: int) -> bool:
    """Whether a pool keeps its limit at the rate with headroom in a surge, and its links carry the mean rate.

    Prefill is planned at a load of at most 85 % in a surge.
    """
    sized = rate * (1 + asked.headroom) * asked.surge
    if rate > count * layout.link:
        return False
    if isinstance(layout, Prefill):
        if rate * asked.surge * layout.seconds > 0.85 * count:  # more than the load that is planned
            return False
        return late(layout, count, sized, asked.ttft_ms / 1000) <= 1 - asked.ttft_share
    return tpot(layout, count, sized, asked.tokens, asked.tpot_share) <= asked.tpot_ms / 1000


def smallest(layouts: list, asked: Question, rate: float, room: int) -> tuple[int, int, int] | None:
    """GPUs, GPUs of an instance and instances of the pool of the fewest GPUs; of several that of the lowest latency."""
    found = []
    for each in layouts:
        count = next((n for n in range(1, room // each.gpus + 1) if holds(each, asked, rate, n)), None)
        if count:
            found.append((count * each.gpus, each, count))

    def order(one: tuple) -> tuple[int, float]:
        gpus, layout, count = one
        if isinstance(layout, Prefill):
            return gpus, ttft(layout, count, rate * asked.surge, asked.ttft_share)
        return gpus, tpot(layout, count, rate * asked.surge, asked.tokens, asked.tpot_share)

    gpus, layout, count = min(found, key=order, default=(0, None, 0))
    return (gpus, layout.gpus, count) if layout else None


def plan(asked: Question, rate: float, budget: int) -> tuple[float, tuple[int, int], tuple[int, int]] | None:
    """Cost, then GPUs of an instance and instances of prefill and of decode; None where the budget does not serve."""
    for domain, prefills, decodes in asked.places:
        room = min(domain, budget)
        first = smallest(prefills, asked, rate, room)
        last = smallest(decodes, asked, rate, room) if first else None
        if first and last and first[0] + last[0] <= room:
            return first[0] * asked.prices[0] + last[0] * asked.prices[1], first[1:], last[1:]
    return None


def most_rate(asked: Question, budget: int) -> float:
    """Highest rate that so many GPUs serve, to a ten-thousandth; 0 where not even 0.001 requests/s are."""
    low, high = 0.0, 1e-3
    while plan(asked, high, budget):
        low, high = high, 2 * high
    while low and high > 1.0001 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if plan(asked, middle, budget) else (low, middle)
    return low
