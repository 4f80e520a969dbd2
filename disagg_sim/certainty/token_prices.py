r"""Price a million tokens: new and cached ones of the input, and those of the output.

.. math:: c_{in} = \frac{U_p\,(1 - s)}{X\,S}, \quad c_{cached} = \frac{U_p\,s}{X\,C}, \quad c_{out} = \frac{U_d}{X\,O}

A deployment of X requests/s costs :math:`U_p + U_d`: the price of its two pools, or of one pool split by the time that
its instances spend on the prefill and on the O output tokens of a request. A prompt has S new tokens after C cached
ones, and :math:`s = 1 - t(S, 0)/t(S, C)` of its pass goes by for them. So the three add up to the price of a request.
What holds caches between two requests is not priced. GPUs that are reserved and serve this rate in a share u of the
hours cost c/u. Where rows count spares (``techniques.availability``), a pool costs as much more as it has GPUs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.certainty.designs import MODES, Designs, Prompt, times_of
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of, numbers
from disagg_sim.errors import InputError
from disagg_sim.serving.costs import usd_per_gpu_hour
from disagg_sim.serving.points import Column
from disagg_sim.units import HOUR, MILLION

#: What a table has beside ``points.COLUMNS`` where prices of tokens were asked for.
PRICE_COLUMNS: tuple[Column, ...] = (
    Column("usd_per_hour", "float64", "USD/h", "price of all GPUs of the deployment, without spares"),
    Column("usd_per_million_input_tokens", "float64", "USD", "of new tokens of prompts, those that no cache holds"),
    Column("usd_per_million_cached_tokens", "float64", "USD", "of cached tokens of prompts; empty = none are cached"),
    Column("usd_per_million_output_tokens", "float64", "USD", "of output tokens, prefill left out"),
)


class TokenPrices(NamedTuple):
    """Prices of a million tokens; a number, or shape (rows,). [USD]"""

    new: Floats  # of prompts, not cached
    cached: Floats  # of prompts; NaN where none are
    output: Floats


def with_token_prices(
    points: pd.DataFrame, prices: Mapping[str, float] | None, *, utilisation: float = 1.0, origin: Origin = SHIPPED
) -> pd.DataFrame:
    """Add to a table of points what a million input, cached and output tokens cost.

    Parameters
    ----------
    points : DataFrame
        A table of points or a frontier (``points.COLUMNS``), any modes and cases.
    prices : mapping, optional
        Price of a GPU by system, in place of the middle of its market range. [USD/h]
    utilisation : float
        Share of the reserved hours in which the deployment serves its rate; 1 = hours are paid as they are used. [1]
    origin : Origin
        What the rows were made with: systems of one's own, a distribution of lengths.

    Returns
    -------
    DataFrame
        A copy with ``PRICE_COLUMNS`` at the end. [USD/h], [USD]

    Raises
    ------
    InputError
        A price that is not known, a utilisation out of range; errors of ``designs_of``.

    Examples
    --------
    One GPU at 3.6 USD/h serves X requests/s: a request costs 1/X mUSD, of 1024 tokens in and 256 out.

    >>> import disagg_sim as ds
    >>> at, options = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), ds.Colocation(batch=(64,), prefill_batch=(1,))
    >>> points = ds.colocated(at, ds.Sharding(), ds.lengths(1024, 256), options=options)
    >>> row = with_token_prices(points, {"h200_sxm": 3.6}).iloc[0]
    >>> request = 1024 * row["usd_per_million_input_tokens"] + 256 * row["usd_per_million_output_tokens"]
    >>> f"{request * row['request_rate_per_s'] / 1000:.6f} mUSD"
    '1.000000 mUSD'
    """
    check_utilisation(utilisation)
    values = {column.name: np.full(len(points), np.nan) for column in PRICE_COLUMNS}
    for designs in designs_of(points, origin):
        here = points.iloc[designs.rows]
        prefill, decode = _hourly(designs, here, prices)
        values["usd_per_hour"][designs.rows] = prefill + decode
        prefill, decode = _spared(designs, here, prefill, decode)
        found = token_prices(designs, prefill, decode, numbers(here, "request_rate_per_s"))
        for column, price in zip(PRICE_COLUMNS[1:], found, strict=True):
            values[column.name][designs.rows] = price / utilisation
    kept = points.drop(columns=[column.name for column in PRICE_COLUMNS if column.name in points])
    return kept.assign(**values)


def check_utilisation(utilisation: float) -> None:
    """Require a share of the reserved hours that is above 0 and at most 1.

    >>> check_utilisation(0.0)
    Traceback (most recent call last):
    disagg_sim.errors.InputError: utilisation must be above 0 and at most 1, got 0
    """
    if not 0.0 < utilisation <= 1.0:
        raise InputError(f"utilisation must be above 0 and at most 1, got {utilisation:g}")


def token_prices(designs: Designs, prefill: Floats, decode: Floats, rate: Floats) -> TokenPrices:
    """Compute the prices of a million tokens [USD] of designs of which the GPUs of both phases cost so much [USD/h]."""
    lengths, cached = designs.lengths, designs.lengths.cached
    per_million = MILLION / HOUR / rate
    output = decode * per_million / lengths.mean_osl
    past = 0.0 if cached is None else cached.mean_past
    if past == 0.0:
        return TokenPrices(prefill * per_million / lengths.mean_isl, np.nan * output, output)
    alone = tuple(Prompt(each.isl - each.past, 0.0, *each[2:]) for each in designs.prompts)
    timed = (times_of(each, step=False) for each in (designs, replace(designs, prompts=alone)))
    whole, new = (times.busy + times.stall for times in timed)
    share = np.asarray(np.maximum(1.0 - new / whole, 0.0))  # of the passes of prefill, that goes by for cached tokens
    new = prefill * (1.0 - share) * per_million / lengths.mean_new
    return TokenPrices(new, prefill * share * per_million / past, output)


def _hourly(designs: Designs, points: pd.DataFrame, prices: Mapping[str, float] | None) -> tuple[Floats, Floats]:
    """What the GPUs cost that work on prompts and on output tokens, (rows,). [USD/h]"""
    if designs.mode not in MODES:
        raise InputError(f"a price of tokens needs designs of both phases, not of {designs.mode} alone")
    decode = designs.instances * designs.mapping.gpus * usd_per_gpu_hour(designs.at.system, prices)
    if not designs.shared:
        gpus = designs.prefill_instances * designs.prefill_mapping.gpus
        return gpus * usd_per_gpu_hour(designs.prefill_at.system, prices), decode
    busy = [1.0 / numbers(points, f"{phase}_request_rate_per_s") for phase in ("prefill", "decode")]
    share = busy[0] / (busy[0] + busy[1])
    return decode * share, decode * (1.0 - share)


def _spared(designs: Designs, points: pd.DataFrame, prefill: Floats, decode: Floats) -> tuple[Floats, Floats]:
    """The same with the share of a deployment in the spares of all its copies, where rows have some. [USD/h]"""
    if "copies" not in points:
        return prefill, decode
    copies = numbers(points, "copies")
    more = 1.0 + numbers(points, "decode_spares") / (copies * designs.instances)
    if designs.shared:
        return prefill * more, decode * more
    return prefill * (1.0 + numbers(points, "prefill_spares") / (copies * designs.prefill_instances)), decode * more
