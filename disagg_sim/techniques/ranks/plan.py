r"""Time a prompt at an instance of several attention ranks, by the steps that it meets and those that compute it.

A prompt waits for the rest of the step in which it comes: of decodes alone in a share :math:`1 - \varphi` of the time,
else with prefill. Long steps are met more often than they are run. Then its m pieces take a step each, all ranks for as
long as the one with the largest piece, T_f with a full one. So the step of its last piece, T_l where that is short, is
a long one, too, where another rank has a full piece. Such prompts came in the m - 1 steps before:

.. math:: TTFT = (1 - x)\,T_{met} + (m - 1)\,T_f + T_{last},\quad P(T_{last} = T_l) = e^{-\lambda (1 - 1/R) (m - 1) T_f}

Where a step has room for whole prompts, all that came in the step that was met share the next. Waits for a rank whose
prompts fill its steps come on top (``planning.queueing``).
"""

from __future__ import annotations

import math

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.mixed_steps import MixedSteps, Mixing, with_others
from disagg_sim.planning.queueing import RESIDUES


def prompt_times(
    steps: MixedSteps, mixing: Mixing, sequences: float, rate: float, prompts: Floats
) -> tuple[Floats, Floats]:
    """Find the time from the arrival of a prompt to the end of the step that completes it, where its rank is free.

    Takes ``sequences`` of the instance [request], its ``rate`` [request/s] and ``prompts`` (lengths [token]). Returns
    times, (lengths, cases) [s], and the probabilities of the cases [1].
    """

    def at(values: Floats) -> float:
        return float(np.interp(sequences, steps.batch, values))

    ranks, pieces, of_others = steps.ranks, math.ceil(steps.prompt / at(steps.room)), rate * (1.0 - 1.0 / steps.ranks)
    held, time, share = (at(values) for values in (mixing.held, mixing.time, mixing.share))
    one, every, late = (at(values) for values in steps.cut[1])
    full = float(with_others(one, every, late, min(1.0 + of_others * pieces * time, ranks), ranks))
    rest, longer = full - one + at(steps.cut[2][0]), at(steps.own[1][3])
    alone = math.exp(-of_others * (pieces - 1) * full)  # chance that no other rank has a full piece beside the last one
    prefilling = max(rate * steps.prompt / held * time / share, 1.0)  # ranks, in a step with prefill
    short = pieces**-prefilling if longer else 0.0  # chance that all of them have last pieces
    longest = time + longer * short
    met = (
        ((1.0 - share), at(steps.step)),
        (share * short * (longest - longer) / time, longest - longer),
        (share * (1.0 - short) * longest / time, longest),
    )
    before = (np.ceil(prompts / held - 1e-9) - 1.0) * full
    times, chances = [], []
    for chance, length in met:
        lasts = ((alone, rest), (1.0 - alone, full)) if pieces > 1 else ((1.0, steps.shared(sequences, rate * length)),)
        for part, last in lasts:
            times.append((before + last)[:, None] + RESIDUES * length)
            chances.append(np.full(RESIDUES.size, chance * part / RESIDUES.size))
    return np.concatenate(times, axis=1), np.concatenate(chances)
