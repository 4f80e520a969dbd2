"""Load cached prefixes from memory below HBM, or compute them again.

Source: physics page, section 8 (Prefix reuse).
"""

from __future__ import annotations

import numpy as np

from disagg_sim.domain import Mapping
from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.hardware import KvTier, SystemSpec
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.kv_transfer import kv_bytes_per_request, unique_gpus
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Numeric


def tier_of(system: SystemSpec, name: str) -> KvTier | None:
    """Find a tier of a system by its name.

    Parameters
    ----------
    system, name
        Whose node, and ``hbm``, ``dram``, ``ssd`` or ``remote``.

    Returns
    -------
    KvTier or None
        None = HBM, where a past needs no load.

    Raises
    ------
    InputError
        A tier that the system does not name.

    Examples
    --------
    >>> from disagg_sim.facts.load import load_system
    >>> f"{tier_of(load_system('h200_sxm'), 'dram').bandwidth / 1e9:.0f} GB/s"
    '50 GB/s'
    """
    if name == HBM:
        return None
    if name not in system.kv_tiers:
        known = (HBM, *system.kv_tiers)
        said = f"{system.name} has no tier {name!r}{nearest(name, known)}; allowed: {', '.join(known)}"
        raise InputError(f"{said} (kv_tiers of its file)")
    return system.kv_tiers[name]


def load_time(at: Setup, mapping: Mapping, *, batch: Numeric, past: float, tier: KvTier | None) -> Numeric:
    """Time until the pasts of a pass are in HBM.

    Each GPU loads its own part over its own link: ``t = latency + ceil(b/dp)*K(C)/(G_unique/dp*R)``. A part that
    several GPUs of a TP group hold is loaded by each.

    Parameters
    ----------
    at, mapping
        Setup, and sharding of the instance. [1]
    batch
        Prompts of a pass over all DP ranks. [request]
    past
        Cached tokens of each. [token]
    tier
        Where they lie; None = in HBM.

    Returns
    -------
    numeric
        Of the broadcast shape of mapping and batch; 0 where there is nothing to load. [s]

    Examples
    --------
    58,976 tokens of Llama-3.1-70B are 9.7 GB in fp8; eight GPUs load an eighth each at 50 GB/s:

    >>> from disagg_sim.physics.setup import setup
    >>> at, eight = setup("llama_3_1_70b", "h200_sxm", "fp8"), Mapping(tp_attn=8, tp_ffn=8)
    >>> dram = tier_of(at.system, "dram")
    >>> f"{1e3 * load_time(at, eight, batch=1, past=58976, tier=dram):.0f} ms"
    '24 ms'
    """
    if tier is None or past == 0:
        return 0.0
    size = kv_bytes_per_request(at.model, at.precision, past)
    links = unique_gpus(at.model, mapping, past, at.precision) / mapping.dp_attn
    return tier.latency_s + np.ceil(batch / mapping.dp_attn) * size / (links * tier.bandwidth)


def break_even_bandwidth(at: Setup, past: float, recomputed_s: Numeric) -> Numeric:
    """Find the bandwidth above which an instance loads a prefix sooner than it computes it again.

    ``R* = K(C)/t``: it falls as the prefix grows, as attention is quadratic in it.

    Parameters
    ----------
    at, past
        Setup, and tokens of the prefix. [token]
    recomputed_s
        Time to compute it. [s]

    Returns
    -------
    numeric
        Of the whole instance. [B/s]

    Examples
    --------
    9.7 GB that take 1.2 s to compute:

    >>> from disagg_sim.physics.setup import setup
    >>> f"{break_even_bandwidth(setup('llama_3_1_70b', 'h200_sxm', 'fp8'), 58976, 1.2) / 1e9:.1f} GB/s"
    '8.1 GB/s'
    """
    return kv_bytes_per_request(at.model, at.precision, past) / recomputed_s
