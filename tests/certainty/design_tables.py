"""Small tables of points of all modes, made once."""

from functools import lru_cache

import disagg_sim as ds

#: model, system, precision, profile, largest instance, lengths
CASES = {
    "dense": ("llama_3_1_8b", "h100_sxm", "fp8", "measured", 8, 1024, 128),
    "latent": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", "measured", 16, 4096, 256),
    "long_prompt": ("llama_3_1_8b", "h100_sxm", "fp8", "measured", 4, 16384, 64),
    "ideal": ("llama_3_1_8b", "h100_sxm", "fp8", "ideal", 4, 1024, 128),
    "inherited": ("llama_3_1_8b", "mi300x", "bf16", "measured", 4, 1024, 128),
}


@lru_cache
def tables_of(case, rows=30):
    """Frontier and every so many other rows of a case, one table a mode: disaggregated, co-located, piggyback."""
    model, system, precision, profile, gpus, isl, osl = CASES[case]
    at, lengths = ds.setup(model, system, precision, profile), ds.lengths(isl, osl)
    mappings = ds.enumerate_mappings(at, max_gpus=gpus)
    prefill, decode = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
    modes = (
        ds.disaggregated(prefill, decode, ftl_limit=10.0),
        ds.colocated(at, mappings, lengths),
        ds.piggyback(at, mappings, lengths),
    )
    return tuple(thinned(points, rows) for points in modes)


def thinned(points, rows):
    """The frontier of a table, and about so many other rows."""
    import pandas as pd

    some = points.iloc[:: max(1, len(points) // rows)]
    return pd.concat([ds.pareto_front(points), some], ignore_index=True)
