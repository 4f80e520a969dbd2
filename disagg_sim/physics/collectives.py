"""Time collectives from bytes, ranks and links, without knowledge of models.

``S`` is the full tensor in bytes, ``n`` the ranks, bandwidths are one way per GPU and already
times the efficiency reached. A group of one rank costs nothing. Source: physics page, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from disagg_sim.physics.work import Numeric


class MessageTime(NamedTuple):
    """Latency and wire time of a message; their sum is its time."""

    latency: Numeric  # [s]
    wire: Numeric  # [s]

    @property
    def time(self) -> Numeric:
        """[s]"""
        return self.latency + self.wire


def ring_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link: ``2(n-1)/n*S`` (ring or two-shot)."""
    return size * (2.0 * (n - 1.0) / n)


def one_shot_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link when each rank pulls every peer: ``(n-1)*S``."""
    return size * (n - 1.0)


def in_switch_all_reduce_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link with reduction in the switch: ``(1+1/n)*S``; nothing for n = 1."""
    return size * np.where(n > 1, 1.0 + 1.0 / n, 0.0)


def gather_bytes(size: Numeric, n: Numeric) -> Numeric:
    """Bytes over one rank's link of an all-gather or reduce-scatter: ``(n-1)/n*S``.

    Parameters
    ----------
    size
        S, the full tensor. [B]
    n
        Ranks of the group, from 1. [1]

    Returns
    -------
    numeric
        Of the broadcast shape; 0 for one rank. [B]

    Examples
    --------
    Each of 8 ranks lacks 7 of 8 parts of a tensor of 8 MB, and holds all of it where the group is one rank:

    >>> [f"{gather_bytes(8e6, n) / 1e6:.0f} MB" for n in (1, 8)]
    ['0 MB', '7 MB']
    """
    return size * ((n - 1.0) / n)


def all_reduce_bytes(size: Numeric, n: Numeric, *, best: bool, in_switch: bool) -> Numeric:
    """Volume of the ring, or of the least of the three algorithms when ``best``.

    ``in_switch`` says whether the domain's switch can reduce.
    """
    ring = ring_all_reduce_bytes(size, n)
    if not best:
        return ring
    least = np.minimum(ring, one_shot_all_reduce_bytes(size, n))
    return np.minimum(least, in_switch_all_reduce_bytes(size, n)) if in_switch else least


def pipelined_transfer(wire: Numeric, n: Numeric, *, latency: float, hop: float, ramp: float) -> MessageTime:
    r"""A message of ``wire`` seconds handed on in pieces over ``n`` ranks.

    .. math:: t = a + h (n - 1) + w + 2\sqrt{r w}

    ``a`` starts the call, ``h`` is what each further rank adds. With pieces of the best size the pipeline takes
    :math:`(\sqrt r + \sqrt w)^2`, where ``r`` [s] is the hand-over of a piece times the stages; its constant part is in
    ``a``. So the rate rises with the message and reaches half of its plateau at w = 4r.

    References: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    IJHPCA 19(1), 2005, :doi:`10.1177/1094342005051521`.

    Parameters
    ----------
    wire
        w, time of the whole message on the link. [s]
    n
        Ranks. [1]
    latency, hop
        a and h. [s]
    ramp
        r; 0 = no hand-over, so that the message takes w alone. [s]

    Returns
    -------
    MessageTime
        Latency and time on the wire, of the broadcast shape. [s]

    Examples
    --------
    At w = 4r, 100 us on the wire, half of the rate is reached:

    >>> found = pipelined_transfer(100e-6, 8, latency=10e-6, hop=1e-6, ramp=25e-6)
    >>> f"{found.latency * 1e6:.0f} us, {found.wire * 1e6:.0f} us"
    '17 us, 200 us'
    """
    return MessageTime(latency + hop * (n - 1.0), wire + 2.0 * np.sqrt(ramp * wire) if ramp else wire)


def fastest(transfers: Sequence[MessageTime]) -> MessageTime:
    """Take, at each point, the transfer that takes least time.

    Parameters
    ----------
    transfers
        One or more alternatives whose arrays broadcast.

    Returns
    -------
    MessageTime
        Latency and wire time of the chosen one, of the broadcast shape. [s]

    Examples
    --------
    A quick start suits small messages, a fast link large ones:

    >>> near = MessageTime(1e-6, np.array([1e-6, 1e-3]))
    >>> fast = MessageTime(1e-5, np.array([1e-7, 1e-4]))
    >>> [f"{t * 1e6:.1f} us" for t in fastest([near, fast]).time]
    ['2.0 us', '110.0 us']
    """
    best, *others = transfers
    for other in others:
        sooner = other.time < best.time
        best = MessageTime(np.where(sooner, other.latency, best.latency), np.where(sooner, other.wire, best.wire))
    return best


def hierarchical_all_reduce(
    size: Numeric, n: Numeric, domain: Numeric, *, inside: MessageTime, nic_bandwidth: Numeric, nic_latency: float
) -> MessageTime:
    """All-reduce of ``n`` ranks over domains of ``domain`` GPUs with one NIC a GPU.

    ``inside`` is the all-reduce of one domain's ranks (reduce-scatter plus all-gather have its
    volume); between them ``2(m-1)/m*(S/n_in)`` crosses each NIC in ``2*ceil(log2 m)`` hops.
    """
    inner = np.minimum(n, domain)
    domains = np.ceil(n / domain)
    across = size / inner * (2.0 * (domains - 1.0) / domains) / nic_bandwidth
    return MessageTime(inside.latency + 2.0 * nic_latency * np.ceil(np.log2(domains)), inside.wire + across)


def copies_per_pick(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token that leave its rank, one per pick: ``k*(1-1/n)``. [1]"""
    return top_k * (1.0 - 1.0 / n)


def copies_per_rank(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token that leave its rank, one per distinct rank: ``(n-1)*(1-(1-1/n)^k)``. [1]

    Parameters
    ----------
    top_k
        k, experts that a token picks. [1]
    n
        Ranks over which the experts are spread, from 1. [1]

    Returns
    -------
    numeric
        Of the broadcast shape; at most ``min(k, n - 1)``.

    Examples
    --------
    >>> round(float(copies_per_rank(8, 64.0)), 2), round(float(copies_per_rank(8, 8.0)), 2)
    (7.46, 4.59)
    """
    return (n - 1.0) * (1.0 - (1.0 - 1.0 / n) ** top_k)


def copies_with_own(top_k: Numeric, n: Numeric) -> Numeric:
    """Copies of a token, one per distinct rank, its own counted: ``n*(1-(1-1/n)^k)``. [1]"""
    return n * (1.0 - (1.0 - 1.0 / n) ** top_k)


#: Copies of a token against picks and ranks (or nodes).
Copies = Callable[[Numeric, Numeric], Numeric]
#: Volume of an exchange, as its fit names it -> the copies of a token that it counts.
COPIES: dict[str, Copies] = {
    "T*k*d*b*(1-1/n)": copies_per_pick,
    "T*k*d*b*(1-1/nodes)": copies_per_pick,
    "T*d*b*(n-1)*(1-(1-1/n)^k)": copies_per_rank,
    "T*d*b*(nodes-1)*(1-(1-1/nodes)^k)": copies_per_rank,
    "T*d*b*n*(1-(1-1/n)^k)": copies_with_own,
}


def pipeline_hop(size: Numeric, *, latency: Numeric, bandwidth: Numeric) -> MessageTime:
    """Hand-over of a micro-batch's activations to the next stage."""
    return MessageTime(latency, size / bandwidth)
