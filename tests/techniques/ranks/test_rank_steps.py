"""Steps that a prompt meets at ranks that wait for each other, beside a simulation, and limits by hand."""

from __future__ import annotations

import numpy as np
import pytest

from disagg_sim.planning.mixed_steps import MixedSteps
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.techniques.ranks.plan import prompt_times

RANKS, ROOM, DECODES = 8, 1000.0, 0.02


def made(*prompts: float, pasts: tuple[float, ...] = (), pair: float = 0.0, ahead: int = 0) -> MixedSteps:
    """20 ms of decodes alone; 0.1 to 1 s for 1 to 1,000 tokens of the fullest rank, whatever the others have.

    Steps of the mean prompt take so long; each query-key pair more adds ``pair`` seconds.
    """
    tokens = np.array([0.0, 1.0, ROOM])
    table = np.array([[DECODES], [0.1], [1.0]])
    return MixedSteps(
        ranks=RANKS,
        budget=round(RANKS * ROOM),
        prompts=lengths(*prompts, pasts=pasts),
        each=100.0,
        waits=(0,),
        batch=np.ones(1),
        verified=np.zeros(1),
        step=np.full(1, DECODES),
        tokens=tokens,
        mixed=table,
        single=table,
        longer=pair * tokens[:, None],
        ahead=ahead,
    )


def lengths(*prompts: float, pasts: tuple[float, ...] = ()) -> PromptLengths:
    """As many of each."""
    past = np.array(pasts) if pasts else np.zeros(len(prompts))
    return PromptLengths(np.array(prompts), past, np.full(len(prompts), 1.0 / len(prompts)))


def played(rate: float, prompts: np.ndarray, ahead: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Times from arrival to the end of the last step of each prompt, of steps, and of all; ranks get prompts in turn.

    A step takes what has come when it begins; one that is formed ``ahead``, when the step before it begins.
    """
    count, taken = len(prompts), []
    arrival = np.cumsum(np.random.default_rng(2).exponential(1.0 / rate, count))
    queues: list[list[int]] = [[] for _ in range(RANKS)]
    left, done, begun, now, come = prompts.copy(), np.zeros(count), 0.0, 0.0, 0
    while come < count or any(queues):
        while come < count and arrival[come] <= (begun if ahead else now):
            queues[come % RANKS].append(come)
            come += 1
        pieces = [_piece(queue, left) for queue in queues]
        taken.append(_time(max(pieces)))
        begun, now = now, now + taken[-1]
        for queue in queues:
            while queue and left[queue[0]] < 1e-6:
                done[queue.pop(0)] = now
        if not any(queues) and come < count:
            idle = np.ceil(max(arrival[come] - now, 0.0) / DECODES)
            begun, now = (now + DECODES * (idle - 1.0) if idle else begun), now + DECODES * idle
    return done - arrival, np.array(taken), float(now)


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
    ("prompt", "rate", "ahead"),
    [
        (1020.0, 0.3, 0),  # a last piece of 20 tokens beside full pieces of other ranks
        (1020.0, 1.0, 0),
        (990.0, 1.0, 0),  # prompts that come in a step share the next
        (3300.0, 0.2, 0),
        (1500.0, 0.3, 1),
        (990.0, 1.0, 1),
        (3300.0, 0.2, 1),
    ],
)
def test_times_are_those_of_a_simulation(prompt, rate, ahead) -> None:
    steps = made(prompt, ahead=ahead)
    mixing = steps.mixing(rate, 0)
    [times], chances = prompt_times(steps, mixing, 1.0, rate, lengths(prompt), 1.0 if ahead else None)
    assert chances.sum() == pytest.approx(1.0)
    run, taken, whole = played(rate, np.full(20_000, prompt), ahead)
    assert mixing.share == pytest.approx([taken[taken > DECODES].sum() / whole], rel=0.05)
    assert times @ chances == pytest.approx(run.mean(), rel=0.08)
    order = np.argsort(times)
    for share in (0.5, 0.9):
        place = np.searchsorted(np.cumsum(chances[order]), share)
        assert times[order][place] == pytest.approx(np.quantile(run, share), rel=0.12)


@pytest.mark.parametrize("rate", [0.5, 2.0, 5.0])
def test_unlike_prompts_of_one_piece_mix_with_decodes_as_where_no_step_is_formed_ahead(rate) -> None:
    """What misses a step begins with the next but one: as many steps have prefill, and as many have none."""
    here, there = (made(50.0, 200.0, 800.0, ahead=ahead).mixing(rate, 0) for ahead in (0, 1))
    assert there.share == pytest.approx(here.share)
    assert there.steps == pytest.approx(here.steps)


def test_a_prompt_that_meets_nobody_waits_for_a_decode_step() -> None:
    """A full piece, and one of 20 tokens; for one more where each step is formed as the one before begins."""
    steps = made(1020.0)
    [times], chances = prompt_times(steps, steps.mixing(1e-9, 0), 1.0, 1e-9, lengths(1020.0))
    assert times @ chances == pytest.approx(DECODES / 2 + 1.0 + _time(20.0))
    steps = made(1020.0, ahead=1)
    [times], chances = prompt_times(steps, steps.mixing(1e-9, 0), 1.0, 1e-9, lengths(1020.0), 1.0)
    assert times @ chances == pytest.approx(1.5 * DECODES + 1.0 + _time(20.0))


def test_a_prompt_computes_pairs_with_its_past_by_hand() -> None:
    """Prompts of 1,020 tokens behind none or 8,000 have 4,000 fewer or more behind each than a mean one, at 0.1 us."""
    pasts = 0.0, 8000.0
    steps = made(1020.0, 1020.0, pasts=pasts, pair=1e-7)
    times, chances = prompt_times(steps, steps.mixing(1e-6, 0), 1.0, 1e-6, lengths(1020.0, 1020.0, pasts=pasts))
    mean = DECODES / 2 + 1.0 + _time(20.0)
    assert times @ chances == pytest.approx([mean - 1020 * 4000e-7, mean + 1020 * 4000e-7], rel=1e-4)


@pytest.mark.parametrize("past", [0.0, 8000.0])
def test_prompts_lengthen_steps_of_others_by_hand(past) -> None:
    """A step of another prompt has a full piece in half of the cases; where none is full, this prompt brings one.

    Of a Poisson number of pieces, one on average, none is full with the chance exp(-1/2). Whole pieces of the same
    tokens behind as many others take as long as the longest step does already.
    """
    steps = made(1020.0, pasts=(past,), pair=1e-7)
    full, last = 1.0 - 1000 * 10e-7, _time(20.0) + 20 * 500e-7  # 500 and 1,010 behind, a mean token 510
    added = steps.added(steps.mixing(1e-6, 0), 1.0, 1e-6)
    assert added == pytest.approx([np.exp(-0.5) * (full - last)], rel=1e-3)
    whole = made(800.0, pasts=(past,), pair=1e-7)
    assert whole.added(whole.mixing(1e-6, 0), 1.0, 1e-6) == pytest.approx([0.0], abs=1e-9)


def test_steps_with_unlike_prompts_by_hand() -> None:
    """One prompt comes in a step on average, of 100 or of 700 tokens, as many of each.

    No long one comes in 0.607 of the steps, and none at all in 0.368; of those in which some do 0.239 of 0.632 have
    only short ones. Of a prompt of 2,700 tokens a rank has two full pieces, with 500 and 1,500 tokens behind their
    middles; of two anywhere in between the one with more pairs has 500 + 2/3 of 1,000 behind.
    """
    law, one = made(100.0, 700.0).pieces, np.ones((3, 1))
    kinds, left = law.follow(one[0], 0.0)(one / 3.0, one, one[0], np.full(1, 1e-9))
    assert kinds[:, 0] == pytest.approx([0.2387 / 0.6321, 1 - 0.2387 / 0.6321, 0.0], abs=1e-4)
    assert left == pytest.approx([0.3679], abs=1e-4)
    long = made(2700.0)
    assert long.pieces.each == pytest.approx([3.0])
    assert long.prompts.largest_pairs(1000.0)[1, :2] * 1e6 == pytest.approx([1e6, (0.5 + 2 / 3) * 1e6], rel=1e-3)


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0])
def test_unlike_prompts_are_those_of_a_simulation(rate) -> None:
    some = 50.0, 200.0, 800.0, 4200.0
    steps = made(*some)
    mixing = steps.mixing(rate, 0)
    run, taken, _ = played(rate, np.random.default_rng(3).choice(some, 40_000))
    mixed = taken[taken > DECODES]
    assert mixing.time == pytest.approx([mixed.mean()], rel=0.1)
    times, chances = prompt_times(steps, mixing, 1.0, rate, lengths(*some))
    assert (times @ chances).mean() == pytest.approx(run.mean(), rel=0.15)
