"""Find the passes of a pool whose instances take all prompts that wait there at once, up to a largest batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.planning.queueing import RESIDUES, share_that_waits

#: Sizes of a pass that are told apart, and passes until their shares are steady. [1]
MOST_STATES, STEPS = 64, 24
#: Servers that share arrivals evenly, at most: more hardly even them out further. [1]
MOST_SHARED = 16
#: Equally probable kinds of passes of one size, by how long their prompts are (chosen: eight are no nearer). [1]
KINDS = 4
#: Least time of a pass, over the mean of its size: chosen, for what few kinds of a wide law leave below 0. [1]
SHORTEST = 0.05
#: Standard deviations of the size of a pass beyond which none is looked at. [1]
CHANCE = 5.0
#: Logarithms of the factorials of 0, 1, 2 ... [1]
LOG_FACTORIAL = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, MOST_SHARED * MOST_STATES)))])


class Passes(NamedTuple):
    """What arrivals find at servers each of which takes all who wait there at once, up to a largest batch."""

    meets: float  # share of the arrivals at whose server a pass is under way [1]
    share: Floats  # (sizes, kinds) of these by the size of the pass, and by how long its prompts are [1]
    rests: Floats  # (sizes, kinds, residues) what is left of it, equally probable [s]
    beside: Floats  # (sizes, kinds) prompts of the next pass, where an arrival is among them [request]
    used: float  # share of the time in which a server works [1]
    off: Floats = np.zeros(1)  # (sizes, kinds) what the others of the next pass last longer than their mean [s]

    def with_others(self, batch: Floats, unlike: Floats) -> Passes:
        """Tell next passes apart by their other prompts, half of them longer than the mean by a standard deviation."""
        if not unlike.any():
            return self
        off = np.interp(self.beside, batch, unlike.std(axis=1)) * np.sqrt(1.0 - 1.0 / self.beside)
        share, rests, beside = (
            np.concatenate([each] * 2, axis=1) for each in (self.share / 2, self.rests, self.beside)
        )
        return Passes(self.meets, share, rests, beside, self.used, np.concatenate([-off, off], axis=1))


def passes(rate: float, batch: Floats, busy: Floats, servers: int = 1, unlike: Floats | None = None) -> Passes:
    r"""Find the passes of servers whose shortest queue each arrival joins.

    What comes to a server during one pass is its next, and who comes to an idle server starts a pass of one: sizes of
    successive passes are a Markov chain. The shortest queue shares what comes to all c servers evenly: of m requests
    each has m/c, rounded up or down, m being Poisson (of c = 1 it has all). A server is idle for what its passes leave
    of the time between as many arrivals, and all are busy with the probability of Erlang's C at that share. Where they
    are, queues have about one length, so that a server with a small pass is filled up, and soon after its start; we
    take :math:`e = 1 - 1/\sqrt{c}` of the way to equal lengths. That form was chosen among six on simulated servers
    (c = 1, 2, 8, 32, batches to 16, loads of 0.3 to 0.85), whose means it meets to 5 %, p90 to 6 and p99 to 11 % (root
    mean square; single cases of p99 0.8 to 1.8 times).

    Passes of unlike prompts last unlike times: a longer one is met by more arrivals, more of it is left, and more
    prompts share the next. Shortest queues send less to a server with a long pass: 1 - e of what it lasts longer
    counts. That form, too, was chosen on simulated servers (c = 1, 2, 8, batches of 2 to 8, prompts of even and
    log-normal lengths, loads of 0.35 to 0.9); simulated plans judge it (accuracy page).

    Parameters
    ----------
    rate
        Of Poisson arrivals at a server. [request/s]
    batch, busy
        Sizes of a pass, ascending from 1 [request], and how long each keeps the server [s].
    servers
        c. [1]
    unlike
        What equally probable passes of each size last longer than their mean, (batches, kinds); None = 0. [s]

    Returns
    -------
    Passes
        Of sizes from 1.

    Examples
    --------
    Passes of one: a server works for as much of the time as it is offered; of eight, 6 % meet none that is idle.

    >>> one = np.array([1.0])
    >>> [round(passes(0.5, one, one, servers).meets, 3) for servers in (1, 8)]
    [0.5, 0.059]

    Where half of the passes of 1 s take 1.9 s and the others 0.1, 0.905 s are left of the one that is met, not 0.5:

    >>> found = passes(0.5, one, one, unlike=np.array([[-0.9, 0.9]]))
    >>> round(float((found.share * found.rests.mean(axis=2)).sum()), 3)
    0.905
    """
    unlike = np.zeros((batch.size, 1)) if unlike is None else unlike
    sizes, times, more = _sizes(rate, batch, busy, servers, unlike)
    numbers = np.arange(sizes.size + 1.0)
    each, seen = (np.maximum(times[:, None] + part * more, SHORTEST * times[:, None]) for part in (1.0, servers**-0.5))
    chance = shared(rate * seen.ravel(), servers, sizes.size).reshape(*seen.shape, -1)
    moves = chance[:, :, 1:].mean(axis=1)
    moves[:, 0] += chance[:, :, 0].mean(axis=1)
    share = np.full(sizes.size, 1.0 / sizes.size)
    for _ in range(STEPS):
        share = share @ moves
    mean, worked = float(share @ sizes), float(share @ times)
    meets = share_that_waits(servers, rate * worked / mean)
    evened = 1.0 - 1.0 / math.sqrt(servers)
    come = np.maximum(chance @ numbers, 1e-300)
    met = share[:, None] * np.maximum(rate * seen + evened * (mean - sizes[:, None]), 0.0)
    soon = meets * evened * (1.0 - 1.0 / np.maximum(come, 1.0))
    return Passes(
        meets=meets,
        share=met / met.sum(),
        rests=each[:, :, None] * (1.0 - (1.0 - soon[:, :, None]) * RESIDUES),
        beside=np.maximum(chance @ numbers**2 / come, 1.0),
        used=rate * worked / mean,
    )


def kinds(weights: Floats, values: Floats) -> Floats:
    """Means of ``KINDS`` equally probable parts of distributions of mean 0, spread as far as all of each.

    Takes ``weights`` (values,) of the ``values`` (values, rows). Returns (rows, kinds); a single value is one kind.

    >>> kinds(np.full(4, 0.25), np.array([[3.0], [-1.0], [-2.0], [0.0]]))
    array([[-2., -1.,  0.,  3.]])
    """
    found = parts(weights, values)
    spread = np.sqrt(weights @ values**2 / np.maximum((found**2).mean(axis=1), 1e-300))
    return np.asarray(found * spread[:, None])


def parts(weights: Floats, values: Floats) -> Floats:
    """Means of ``KINDS`` equally probable parts of distributions, the least values first; see ``kinds``."""
    if weights.size == 1:
        return np.asarray(values.T)
    ends, found = np.linspace(0.0, 1.0, KINDS + 1), np.empty((values.shape[1], KINDS))
    for row, (column, order) in enumerate(zip(values.T, np.argsort(values, axis=0).T, strict=True)):
        reached = np.append(0.0, np.cumsum(weights[order]))
        summed = np.append(0.0, np.cumsum(weights[order] * column[order]))
        found[row] = np.diff(np.interp(ends, reached / reached[-1], summed)) * KINDS
    return found


def _sizes(rate: float, batch: Floats, busy: Floats, servers: int, unlike: Floats) -> tuple[Floats, Floats, Floats]:
    """Sizes of passes that occur [request], their times, and what kinds of them last longer, (sizes, kinds) [s].

    About that in which as many come, and by chance more: numbers of Poisson arrivals that servers share, rounded, each
    with its part in the time of the next pass.
    """
    sizes = np.arange(1.0, largest_pass(rate, batch, busy, servers, unlike) + 1)
    kinds = np.stack([np.interp(sizes, batch, kind) for kind in unlike.T], axis=1)
    return sizes, np.interp(sizes, batch, busy), kinds


def largest_pass(rate: float, batch: Floats, busy: Floats, servers: int, unlike: Floats) -> int:
    """Find the largest pass that is looked at, as ``_sizes`` takes them. [request]"""
    size, each = 1.0, float(busy[-1] - busy[0]) / max(float(batch[-1]) - 1.0, 1.0)
    for _ in range(STEPS):
        before, size = size, min(max(rate * float(np.interp(size, batch, busy)), 1.0), float(batch[-1]))
        if size == before:
            break
    more = (rate * float(np.interp(size, batch, unlike.std(axis=1)))) ** 2
    wide = math.sqrt(((size + more) / servers + 0.25) / (1.0 - min(rate * each, 0.99) ** 2))
    return int(min(float(batch[-1]), MOST_STATES, math.ceil(size + CHANCE * wide)))


def shared(mean: Floats, servers: int, most: int) -> Floats:
    """Probabilities of 0 to ``most`` or more requests at one of some servers that share Poisson arrivals evenly."""
    servers = min(servers, MOST_SHARED)
    total = np.arange(float(servers * most))
    come = servers * mean[:, None]
    chance = np.exp(total * np.log(come) - come - LOG_FACTORIAL[: total.size]).reshape(-1, most, servers)
    up = chance @ (np.arange(servers) / servers)
    found = np.zeros((mean.size, most + 1))
    found[:, :-1] = chance.sum(axis=2) - up
    found[:, 1:] += up
    found[:, -1] += np.maximum(1.0 - found.sum(axis=1), 0.0)
    return found
