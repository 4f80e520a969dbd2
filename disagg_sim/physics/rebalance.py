r"""Find how often copies of experts are best placed anew, and what age and moves of the placement cost.

Popularity drifts: a placement that was balanced when it was made is as good as any other after a while. With the time
constant :math:`\tau` the passes of a period T are longer than balanced ones by

.. math:: \ell(T) = a\,\Big(1 - \frac{\tau}{T}\,(1 - e^{-T/\tau})\Big) + \frac{c}{T}

a being what a pass takes more with copies anywhere, over its time, and c the time of a move, in which nothing runs. The
least is :math:`a\,(1 - e^{-x})` at :math:`T = x\,\tau` with :math:`(1 + x)\,e^{-x} = 1 - c/(a\,\tau)`: close to
:math:`\sqrt{2 c \tau/a}` where moves are cheap; where c is above :math:`a\,\tau`, no move pays. Own derivation; no
source says what :math:`\tau` is, so it is the user's to state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.physics.blocks import layers_of
from disagg_sim.physics.cost import expert_cost
from disagg_sim.physics.expert_load import Routing, rebalance_time
from disagg_sim.physics.kv_transfer import own_link_bandwidth
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric

#: Host time of a move, beside the weights: "about 1 s" for SGLang (sgl-project/sglang issue 7879, July 2025). [s]
HOST_S = 1.0
#: Passes between moves of engines that are told no other number: vLLM ``step_interval``, SGLang
#: ``--eplb-rebalance-num-iterations``. Source: serving facts page, section 5.3.
USUAL_PASSES = {"vllm": 3000, "sglang": 1000}
#: Halvings of the interval that holds x: to 1e-16 of 64. [1]
HALVINGS = 60


class Rebalancing(NamedTuple):
    """How copies of experts are best kept placed; arrays of the broadcast shape."""

    period: Any  # between moves; inf = none pays [s]
    loss: Any  # what passes take more for it, moves included, over balanced ones [1]
    growth: Any  # the same where nothing is ever moved [1]
    move: Any  # time of a move [s]


def best_period(move: Numeric, growth: Numeric, drift: float) -> tuple[Any, Any]:
    """Find the period with the least loss.

    Parameters
    ----------
    move
        Time of a move. [s]
    growth
        What passes take more where copies lie anywhere, over their time. [1]
    drift
        Time constant of the popularity. [s]

    Returns
    -------
    period, loss : numeric
        inf where no move pays [s]; the loss there [1].

    Examples
    --------
    Moves of 1 s, passes that get 10 % longer, within 1,000 s: the root of 2*1*1000/0.1 is 141 s.

    >>> period, loss = best_period(1.0, 0.1, 1000.0)
    >>> f"{period:.0f} s, {loss:.1%}"
    '149 s, 1.4%'
    """
    move, growth = np.broadcast_arrays(np.asarray(move, dtype=float), np.asarray(growth, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        part = move / (growth * drift)
    pays = (part < 1.0) & np.isfinite(drift)
    left = 1.0 - np.where(pays, part, 0.0)
    low, high = np.zeros(part.shape), np.full(part.shape, 64.0)
    for _ in range(HALVINGS):
        x = (low + high) / 2
        below = (1.0 + x) * np.exp(-x) > left
        low, high = np.where(below, x, low), np.where(below, high, x)
    x = np.where(left == 1.0, 0.0, (low + high) / 2)
    ages = growth if np.isfinite(drift) else np.zeros_like(growth)
    period = np.where(pays, x * (drift if np.isfinite(drift) else 1.0), np.inf)
    return period[()], np.where(pays, -growth * np.expm1(-x), np.maximum(ages, 0.0))[()]


def loss_at(period: Numeric, move: Numeric, growth: Numeric, drift: float) -> Any:
    """What passes take more with a move every so often, over balanced ones. [1]

    Parameters
    ----------
    period
        Between moves. [s]
    move, growth, drift
        As in ``best_period``.

    Returns
    -------
    numeric
        Of the broadcast shape. [1]

    Examples
    --------
    >>> [f"{loss_at(period, 1.0, 0.1, 1000.0):.1%}" for period in (50.0, 148.0, 500.0)]
    ['2.2%', '1.4%', '2.3%']
    """
    x = np.asarray(period) / drift
    return growth * (1.0 + np.expm1(-x) / x) + move / period


def rebalancing(at: Setup, mapping: Mapping, *, tokens: Numeric, seconds: Numeric, drift: float) -> Rebalancing:
    """Find the best period for passes of some tokens.

    Parameters
    ----------
    at, mapping
        Setup, whose profile has a skew of the popularity, and sharding with redundant slots. [1]
    tokens
        Of a pass, over all EP ranks. [token]
    seconds
        Time of a pipeline stage for such a pass, with copies just placed. [s]
    drift
        Time constant of the popularity. [s]

    Returns
    -------
    Rebalancing
        Nothing is lost, and no move pays, where copies change nothing.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew0.5")
    >>> wide = Mapping(dp_attn=32, ep=32, redundant_slots=32)
    >>> found = rebalancing(at, wide, tokens=4096.0, seconds=60e-3, drift=3600.0)
    >>> bool(0 < found.loss < found.growth), bool(60 < found.period < 3600)
    (True, True)
    """
    more, move = staleness(at, mapping, tokens)
    growth = np.maximum(more / seconds, 0.0)
    period, loss = best_period(move, growth, drift)
    return Rebalancing(period, loss, growth, move)


def staleness(at: Setup, mapping: Mapping, tokens: Numeric) -> tuple[Any, Any]:
    """Find what a stage of a pass takes more where copies lie anywhere, and what a move takes.

    Parameters
    ----------
    at, mapping, tokens
        As in ``rebalancing``.

    Returns
    -------
    more, move : numeric
        0 and the time of a move where there are no copies. [s]

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> at = setup("deepseek_r1", "h200_sxm", "fp8", "measured_skew0.5")
    >>> more, move = staleness(at, Mapping(dp_attn=32, ep=32, redundant_slots=32), 4096.0)
    >>> bool(0 < more < 10e-3), bool(1.0 < move < 2.0)
    (True, True)
    """
    bytes_moved, more = 0.0, 0.0
    inside = mapping.stage_gpus <= at.system.nvlink_domain
    for layer, layers in layers_of(at.model):
        if not layer.ffn.picks:
            continue
        spec = layer.ffn.spec
        own = spec.expert_params(at.model.hidden) * at.precision.expert.bytes / mapping.tp_ffn
        slots = (spec.experts + mapping.redundant_slots) / mapping.ep
        count = layers / mapping.pp  # of a stage
        bytes_moved = bytes_moved + own * count * slots
        aged, placed = (
            np.real(  # of derivatives of times the times count
                expert_cost(
                    layer.ffn.routed(
                        at.model, at.precision, mapping, tokens, Routing(skew=at.profile.expert_skew, placed=each)
                    ),
                    mapping.ep,
                    mapping.tp_ffn,
                    at,
                ).time
            )
            for each in (False, True)
        )
        more = more + count * (aged - placed)
    near, far = (own_link_bandwidth(at.system, at.profile, within_domain=each) for each in (True, False))
    move = HOST_S + rebalance_time(bytes_moved, 1, 1, bandwidth=np.real(np.where(inside, near, far)))
    return more * (np.asarray(mapping.redundant_slots) > 0), move
