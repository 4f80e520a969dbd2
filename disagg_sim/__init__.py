"""disagg-sim: plan LLM inference at datacenter scale.

>>> import disagg_sim as ds
>>> at, lengths = ds.setup("llama_3_1_70b", "gb200_nvl72", "nvfp4_fp8kv"), ds.lengths(4096, 512)
>>> mappings = ds.enumerate_mappings(at, max_gpus=16)
>>> prefill, decode = ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)
>>> points = ds.disaggregated(prefill, decode, ftl_limit=10.0)
>>> front = ds.pareto_front(points)
>>> plan = ds.plan_pools([prefill, decode], ftl_limit=10.0, ttl_limit=0.02, gpu_budget=64)
>>> plan.deployment.prefill.gpus + plan.deployment.decode.gpus <= 64
True
"""

import warnings as _warnings
from importlib import import_module as _import_module
from importlib.metadata import version as _version

import lazy_loader as _lazy

from disagg_sim.notebook import show_with as _show_with

#: Names that ``ds`` loses with the next release, and where they are.
_MOVED = {
    "Breakdown": "certainty.breakdown.Breakdown",
    "Curve": "serving.gains.Curve",
    "Deployment": "search.deployment.Deployment",
    "EncodeStep": "techniques.encode.physics.EncodeStep",
    "Evaluation": "planning.evaluate.Evaluation",
    "Gain": "serving.gains.Gain",
    "ImportedModel": "facts.hub.imported.ImportedModel",
    "Instance": "search.deployment.Instance",
    "KvHandOver": "physics.kv_transfer.KvHandOver",
    "KvLayout": "physics.kv_transfer.KvLayout",
    "Launch": "launch.launch.Launch",
    "Mapping": "domain.Sharding",
    "PhaseGrid": "search.phase_grid.PhaseGrid",
    "Pool": "search.deployment.Pool",
    "PoolsPlan": "serving.pools.PoolsPlan",
    "SimulationResult": "simulation.simulate.SimulationResult",
    "SplitGrid": "techniques.split.search.SplitGrid",
    "SplitInstance": "techniques.split.search.SplitInstance",
    "Status": "domain.Status",
    "Summary": "simulation.metrics.Summary",
    "Uncertainty": "certainty.error_bars.Uncertainty",
    "Workers": "launch.workers.Workers",
    "batch_axis": "search.axes.batch_axis",
    "decode_work": "physics.counts.decode_work",
    "gain": "serving.gains.gain",
    "kv_hand_over": "physics.kv_transfer.kv_hand_over",
    "load_profile": "facts.load.load_profile",
    "prefill_work": "physics.counts.prefill_work",
}
#: The names of ``__init__.pyi``, each loaded with its module at the first use.
_public, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
__version__ = _version("disagg-sim")


def __getattr__(name: str) -> object:
    """Load a public name; one of ``_MOVED`` with a warning that says where to import it from."""
    if name not in _MOVED:
        return _public(name)
    module, _, there = f"{__name__}.{_MOVED[name]}".rpartition(".")
    message = f"ds.{name} goes with the next release: from {module} import {there}"
    _warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(_import_module(module), there)


def _html(value: object) -> str:
    """HTML of a value for notebooks; what that takes is loaded at the first use."""
    from disagg_sim.report.html import html_of

    return html_of(value)


_show_with(_html)
