"""Steps that a prompt meets at ranks that wait for each other, beside a simulation, and limits by hand."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_sim.planning.mixed_steps import MixedSteps
from disagg_sim.techniques.ranks.plan import prompt_times

RANKS, ROOM, DECODES = 8, 1000.0, 0.02


def made(prompt: float) -> MixedSteps:
    """20 ms of decodes alone; 0.1 to 1 s for 1 to 1,000 tokens of the fullest rank, whatever the others have."""
    tokens = np.array([0.0, 1.0, ROOM])
    table = np.array([[DECODES], [0.1], [1.0]])
    return MixedSteps(
        ranks=RANKS,
        budget=round(RANKS * ROOM),
        prompt=prompt,
        each=100.0,
        waits=(0,),
        batch=np.ones(1),
        verified=np.zeros(1),
        step=np.full(1, DECODES),
        tokens=tokens,
        mixed=table,
        single=table,
        late=table,
        longer=np.zeros_like(table),
        behind=prompt / 2,
    )


def played(rate: float, prompt: float, count: int) -> np.ndarray:
    """Times from arrival to the end of the last step of a prompt; prompts go to the ranks in turn."""
    arrival = np.cumsum(np.random.default_rng(2).exponential(1.0 / rate, count))
    queues: list[list[int]] = [[] for _ in range(RANKS)]
    left, done, now, come = np.full(count, prompt), np.zeros(count), 0.0, 0
    while come < count or any(queues):
        while come < count and arrival[come] <= now:
            queues[come % RANKS].append(come)
            come += 1
        pieces = [_piece(queue, left) for queue in queues]
        now += _time(max(pieces))
        for queue in queues:
            while queue and left[queue[0]] < 1e-6:
                done[queue.pop(0)] = now
        if not any(queues) and come < count:
            now += DECODES * np.ceil(max(arrival[come] - now, 0.0) / DECODES)
    return done - arrival


def _time(tokens: float) -> float:
    return 0.1 + 0.9 * (tokens - 1.0) / (ROOM - 1.0) if tokens else DECODES


def _piece(queue: list[int], left: np.ndarray) -> float:
    room = ROOM
    for each in queue:
        taken = min(left[each], room)
        left[each] -= taken
        room -= taken
    return ROOM - room


@pytest.mark.parametrize(
    ("prompt", "rate"),
    [
        (1020.0, 0.3),  # a last piece of 20 tokens beside full pieces of other ranks
        (1020.0, 1.0),
        (990.0, 1.0),  # prompts that come in a step share the next
        (3300.0, 0.2),
    ],
)
def test_times_are_those_of_a_simulation(prompt, rate) -> None:
    steps = made(prompt)
    [times], chances = prompt_times(steps, steps.mixing(rate, 0), 1.0, rate, np.array([prompt]))
    assert chances.sum() == pytest.approx(1.0)
    run = played(rate, prompt, 20_000)
    assert times @ chances == pytest.approx(run.mean(), rel=0.08)
    order = np.argsort(times)
    for share in (0.5, 0.9):
        place = np.searchsorted(np.cumsum(chances[order]), share)
        assert times[order][place] == pytest.approx(np.quantile(run, share), rel=0.12)


def test_a_prompt_that_meets_nobody_waits_for_a_decode_step() -> None:
    """A full piece, and one of 20 tokens."""
    steps = made(1020.0)
    [times], chances = prompt_times(steps, steps.mixing(1e-9, 0), 1.0, 1e-9, np.array([1020.0]))
    assert times @ chances == pytest.approx(DECODES / 2 + 1.0 + _time(20.0))
