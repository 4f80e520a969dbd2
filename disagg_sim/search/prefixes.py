"""Cut cached prefixes to where a model can take them up again."""

from __future__ import annotations

from disagg_sim.physics.kv_transfer import checkpoint_tokens
from disagg_sim.physics.setup import Setup
from disagg_sim.workload.lengths import Lengths


def taken_up(at: Setup, lengths: Lengths) -> Lengths:
    """Find where the layers of a model let a cached prefix be taken up again.

    Parameters
    ----------
    at, lengths
        Setup, whose model has recurrent states or compressed entries or has not, and lengths of requests.

    Returns
    -------
    Lengths
        With pasts that end at whole checkpoints (``physics.kv_transfer.checkpoint_tokens``); of most models the same.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> from disagg_sim.workload.lengths import lengths
    >>> found = lengths(65_536, 1024, cached=0.9)
    >>> models = ("llama_3_1_70b", "qwen3_next_80b_a3b")
    >>> [taken_up(setup(name, "h200_sxm", "fp8"), found).cached.mean_past for name in models]
    [58976.0, 58688.0]
    """
    return lengths.at_whole(checkpoint_tokens(at.model, at.precision)) if lengths.cached is not None else lengths
