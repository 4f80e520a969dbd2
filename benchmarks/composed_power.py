"""Compare the power of whole MLA modules in decode with the laws of their kernels, composed.

    python benchmarks/composed_power.py ../shared/data/power/kernel_power.parquet

The table has a row ``mla_generation_module`` for each batch and past: DeepSeek's attention in decode, projections
included, in BF16. Its forecast is the energy of these operators in a decode step of DeepSeek-R1 (one attention rank a
GPU) over their time.
Prints forecast over measured power by system and engine: rows, median, 10 % and 90 % quantile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.certainty.energy import energy_parts

#: Operators of the module.
MODULE = ("q_a, kv_a", "q_b", "kv_b into q", "decode attention", "kv_b out of values", "o")
#: Rows of each system and engine that are compared, evenly taken; ranks whose experts leave room for the caches. [1]
ROWS, RANKS = 40, 64
SYSTEMS = {"h200_sxm": "h200_sxm", "b200_sxm": "b200_sxm", "gb200": "gb200_nvl72"}


def forecast(system: str, engine: str, batch: int, past: int) -> float:
    """Power of the module on one GPU. [W]"""
    at = ds.setup("deepseek_r1", system, "bf16", engine=engine)
    ranks = ds.Sharding(dp_attn=RANKS, ep=RANKS)
    grid = ds.decode_grid(at, ranks, ds.lengths(past, 2), batch=[batch * RANKS])
    parts = energy_parts(grid).set_index("operator")
    mine = parts.loc[[name for name in MODULE if name in parts.index]]
    return float(mine["joules"].sum() / mine["seconds"].sum())


def main() -> None:
    """Print a line for each system and engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    table = pd.read_parquet(parser.parse_args().table)
    plain = (table["kind"] == "mla_generation_module") & (table["tp_size"] == 1) & (table["past_tokens"] >= 2)
    for name in ("dtype", "kv_dtype", "gemm_dtype"):
        plain &= table[name] == "bfloat16"
    for (system, engine), rows in table[plain].groupby(["system", "framework"]):
        some = rows.iloc[np.unique(np.linspace(0, len(rows) - 1, ROWS).astype(int))]
        told = [
            forecast(SYSTEMS[system], engine, int(row.batch), int(row.past_tokens)) / row.power_w
            for row in some.itertuples()
        ]
        low, middle, high = np.quantile(told, [0.1, 0.5, 0.9])
        print(f"{system} {engine}: {len(told)} rows, forecast over measured {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
