"""Price a million tokens of a plan: in, cached and out, by what works on them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from disagg_sim.certainty.designs import Designs, times_of
from disagg_sim.certainty.token_prices import TokenPrices, check_utilisation, token_prices
from disagg_sim.planning.design import Design
from disagg_sim.planning.energy import decode_design, prefill_design
from disagg_sim.serving.costs import usd_per_gpu_hour


def planned_prices(design: Design, prices: Mapping[str, float], utilisation: float) -> TokenPrices:
    """Compute what a million tokens of a design cost at its rate.

    The price of a co-located pool is split by the time that an instance spends on the prompt of a request alone, and on
    its output tokens. Takes ``prices`` (price of a GPU by system, in place of the middle of its market range [USD/h]).
    Returns numbers [USD].
    """
    check_utilisation(utilisation)
    lengths, first, last = design.work.lengths, design.pools[0], design.pools[-1]
    hour = [pool.gpus * usd_per_gpu_hour(pool.setup.system, prices) for pool in design.pools]
    fill = prefill_design(first, lengths)
    if len(hour) == 1:
        step = decode_design(last, lengths)
        prompt = float(times_of(fill, step=False).busy[0] / fill.prefill_batch[0])
        tokens = float(times_of(step, fill=False).step[0]) * lengths.gaps / float(step.batch[0])
        hour = [hour[0] * part / (prompt + tokens) for part in (prompt, tokens)]
    return prices_of_one(fill, (hour[0], hour[-1]), design.rate, utilisation)


def prices_of_one(fill: Designs, hour: tuple[float, float], rate: float, utilisation: float) -> TokenPrices:
    """Numbers, of one design: what works on its prompts and on its output tokens costs so much an hour [USD/h]."""
    found = token_prices(fill, *(np.array([each]) for each in (*hour, rate)))
    return TokenPrices(*(np.squeeze(np.asarray(each)) / utilisation for each in found))
