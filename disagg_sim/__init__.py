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

from importlib.metadata import version as _version

import lazy_loader as _lazy

from disagg_sim.notebook import show_with as _show_with

#: The names of ``__init__.pyi``, each loaded with its module at the first use.
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
__version__ = _version("disagg-sim")


def _html(value: object) -> str:
    """HTML of a value for notebooks; what that takes is loaded at the first use."""
    from disagg_sim.report.html import html_of

    return html_of(value)


_show_with(_html)
