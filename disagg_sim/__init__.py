"""disagg-sim: plan LLM inference at datacenter scale.

>>> import disagg_sim as ds
>>> system, model = ds.load_system("gb200_nvl72"), ds.load_model("llama_3_1_70b")
>>> mappings = ds.enumerate_mappings(model, system, max_gpus=16)
>>> prefill = ds.prefill_grid(model, system, mappings, isl=4096, precision="nvfp4_fp8kv")
>>> decode = ds.decode_grid(model, system, mappings, isl=4096, osl=512, precision="nvfp4_fp8kv")
>>> points = ds.disaggregated(prefill, decode, ftl_limit=10.0)
>>> front = ds.pareto_front(points)
>>> plan = ds.match_rates(prefill, decode, ftl_limit=10.0, ttl_limit=0.02, gpu_budget=64)
>>> plan.deployment.prefill.gpus + plan.deployment.decode.gpus <= 64
True
"""

from importlib.metadata import version as _version

from disagg_sim.domain import Deployment, Instance, Mapping, Pool, Slo, Status
from disagg_sim.errors import DisaggSimError
from disagg_sim.facts.load import list_specs, load_model, load_precision, load_profile, load_system, load_traffic
from disagg_sim.physics.counts import decode_work, prefill_work
from disagg_sim.search.grid import PhaseGrid, batch_axis, decode_grid, prefill_grid
from disagg_sim.search.mappings import MappingTable, enumerate_mappings
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.points import pareto_front
from disagg_sim.serving.rate_matching import MatchPlan, match_rates

__version__ = _version("disagg-sim")

__all__ = [
    "Deployment",
    "DisaggSimError",
    "Instance",
    "Mapping",
    "MappingTable",
    "MatchPlan",
    "PhaseGrid",
    "Pool",
    "Slo",
    "Status",
    "batch_axis",
    "decode_grid",
    "decode_work",
    "disaggregated",
    "enumerate_mappings",
    "list_specs",
    "load_model",
    "load_precision",
    "load_profile",
    "load_system",
    "load_traffic",
    "match_rates",
    "pareto_front",
    "prefill_grid",
    "prefill_work",
]
