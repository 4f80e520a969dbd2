r"""Time a prompt at an instance of several attention ranks, by the steps that it meets and those that compute it.

A prompt waits for the rest of the step in which it comes: of decodes alone in a share :math:`1 - \varphi` of the time,
else with prefill, by its largest piece. Long steps are met more often than they are run. Then its m pieces take a step
each, all ranks for as long as the slowest: T_f with a full one of its own, and in the step of its last piece, of p
tokens, the larger of it and those of other ranks, of which y come on average and have at most s tokens with the chance
:math:`e^{-y (1 - F(s))}`:

.. math:: TTFT = (1 - x)\,T_{met} + (m - 1)\,T_f + T(\max(p, s))

Where each step is formed as the one before begins, one more comes between, with prefill after all steps with a full
piece, a share f of those with prefill, and after a share q of the others: of a share :math:`\pi` of steps with prefill

.. math:: \pi = \pi f + (1 - \pi f)\,q

Its last piece is then beside full pieces of those that came in the missed step, not of those that came in the last step
but one. Means and p90 of simulated steps are met to 5 % so, but for prompts that fill their last piece hardly at all,
whose times are up to a quarter too long.

Where a step has room for whole prompts, all that came in the step that was met share the next. Waits for a rank whose
prompts fill its steps come on top (``planning.queueing``).
"""

from __future__ import annotations

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.mixed_steps import MixedSteps, Mixing, fullest_rank
from disagg_sim.planning.passes import parts
from disagg_sim.planning.pieces import PromptLengths
from disagg_sim.planning.queueing import RESIDUES
from disagg_sim.serving.step_mixing import step_rate

#: Pieces of other ranks that are told apart; more are taken as their means of equally probable ones. [1]
APART = 3


def prompt_times(
    steps: MixedSteps,
    mixing: Mixing,
    sequences: float,
    rate: float,
    prompts: PromptLengths,
    running: float | None = None,
) -> tuple[Floats, Floats]:
    """Find the time from the arrival of a prompt to the end of the step that completes it, where its rank is free.

    Takes ``sequences`` of the instance [request], its ``rate`` [request/s], ``prompts`` and, where steps are formed as
    the one before begins, the chance that decodes run. Returns times, (prompts, cases) [s], and the probabilities of
    the cases [1].
    """
    share, time = (float(np.interp(sequences, steps.batch, values)) for values in (mixing.share, mixing.time))
    kinds = np.array([np.interp(sequences, steps.batch, each) for each in mixing.kinds])
    ranks, several, steps = steps.ranks, steps.prompt < steps.room[0], steps.beside(sequences)
    law, room, alone = steps.pieces, float(steps.room[0]), float(steps.step[0])
    mean, come = float(law.mean[0]), rate * float(law.each[0])  # pieces a second

    def beside(pieces: float, fewer: float) -> tuple[Floats, Floats]:
        """Tokens of the largest of so many pieces on average, by chance none, of ``fewer`` full ones; probabilities."""
        larger = pieces * (1.0 - np.append(0.0, law.below))
        reached = np.exp(-np.maximum(larger - fewer, 0.0) if fewer else -larger)
        return _few(np.append(0.0, law.tokens), np.diff(reached, prepend=0.0))

    some = max(come * time / share, 1.0)
    fullest = fullest_rank(np.array([come * time]), ranks) if several else None
    met = steps.by_largest(np.array([some if several else min(some, ranks)]), fullest, kinds[-1], law)[:, 0]
    met, chance = _few(met, kinds)
    met = met * time / float(chance @ met)
    met, chance = np.append(alone, met), np.append(1.0 - share, share * chance * met / time)
    rests, rest_chance = np.multiply.outer(met, RESIDUES), np.full((met.size, RESIDUES.size), 1.0 / RESIDUES.size)
    fewer = np.zeros(met.size)
    if running is not None:
        some, full = share / time / step_rate(alone, time, share), float(kinds[-1])
        follows = some * (1.0 - full) / (1.0 - some * full)
        prefills = np.append(follows, np.full(met.size - 1, full + (1.0 - full) * follows))[:, None]
        decodes = np.append(running, np.ones(met.size - 1))[:, None] * alone
        rests = np.concatenate([rests + decodes, rests + time], axis=1)
        rest_chance = np.concatenate([rest_chance * (1.0 - prefills), rest_chance * prefills], axis=1)
        if not several:  # what comes in the last step but one starts after the last, what comes in the missed one in it
            longer = float(prompts.weight @ (prompts.counts(steps.room)[:, 0] > 1.0))
            missed = (decodes + prefills * (time - decodes))[:, 0]
            fewer = longer * rate * (1.0 - 1.0 / ranks) * np.maximum(time - missed, 0.0)

    others = come * (1.0 - 1.0 / ranks) * time
    own = steps.among(others, prompts)
    before = (own.counts - 1.0) * own.full
    times, chances = [], []
    for length, part, less, rest, each in zip(
        met.tolist(), chance.tolist(), fewer.tolist(), rests, rest_chance, strict=True
    ):
        pieces = come * length if several else others
        more = (float(fullest_rank(np.array([pieces]), ranks)[0]) - 1.0) * mean if several else 0.0
        for tokens, share_of in zip(*beside(pieces, less), strict=True):
            fullest = np.minimum(np.maximum(own.last, tokens) + more, room)
            ends = steps.lasting(fullest[:, None], (own.last + pieces * mean)[:, None], own.pairs[:, None])[:, 0]
            times.append((before + ends)[:, None] + rest)
            chances.append(part * share_of * each)
    return np.concatenate(times, axis=1), np.concatenate(chances)


def _few(values: Floats, chances: Floats) -> tuple[Floats, Floats]:
    """Take means of a few equally probable values for many."""
    if values.size <= APART:
        return values, chances
    found = parts(chances, values[:, None])[0]
    return found, np.full(found.size, 1.0 / found.size)
