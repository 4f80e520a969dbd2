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

from disagg_sim.certainty.designs import rescore
from disagg_sim.certainty.elasticity import sensitivity
from disagg_sim.certainty.error_bars import Uncertainty, uncertainty
from disagg_sim.certainty.extrapolation import outside_calibration
from disagg_sim.domain import Deployment, Instance, Mapping, Pool, Slo, Status
from disagg_sim.errors import DisaggSimError
from disagg_sim.facts.load import list_specs, load_model, load_precision, load_profile, load_system, load_traffic
from disagg_sim.notebook import show_with as _show_with
from disagg_sim.physics.counts import decode_work, prefill_work
from disagg_sim.physics.mixed import Interference
from disagg_sim.report.tables import readable
from disagg_sim.scenario.written import write_scenario
from disagg_sim.search.distribution import decode_grid_under, prefill_grid_under
from disagg_sim.search.grid import PhaseGrid, batch_axis, decode_grid, prefill_grid
from disagg_sim.search.mappings import MappingTable, enumerate_mappings
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.costs import with_cost
from disagg_sim.serving.disaggregated import disaggregated
from disagg_sim.serving.gains import Curve, Gain, curve, gain, pointwise_gain, where_it_pays
from disagg_sim.serving.piggyback import piggyback
from disagg_sim.serving.points import pareto_front
from disagg_sim.serving.rate_matching import MatchPlan, match_rates
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.simulate import SimulationResult, simulate
from disagg_sim.workload.joint import JointLengths, joint_lengths, observed_lengths
from disagg_sim.workload.lengths import representative_shape
from disagg_sim.workload.readers import load_trace
from disagg_sim.workload.synthetic import synthetic_trace
from disagg_sim.workload.trace import Trace

__version__ = _version("disagg-sim")


def _html(value: object) -> str:
    """HTML of a value for notebooks; what that takes is loaded at the first use."""
    from disagg_sim.report.html import html_of

    return html_of(value)


_show_with(_html)

__all__ = [
    "Curve",
    "Deployment",
    "DisaggSimError",
    "Gain",
    "Instance",
    "Interference",
    "JointLengths",
    "Mapping",
    "MappingTable",
    "MatchPlan",
    "PhaseGrid",
    "Pool",
    "Replicas",
    "ServedDeployment",
    "SimulationResult",
    "Slo",
    "Status",
    "Summary",
    "Trace",
    "Uncertainty",
    "batch_axis",
    "colocated",
    "curve",
    "decode_grid",
    "decode_grid_under",
    "decode_work",
    "disaggregated",
    "enumerate_mappings",
    "gain",
    "joint_lengths",
    "list_specs",
    "load_model",
    "load_precision",
    "load_profile",
    "load_system",
    "load_trace",
    "load_traffic",
    "match_rates",
    "observed_lengths",
    "outside_calibration",
    "pareto_front",
    "piggyback",
    "pointwise_gain",
    "prefill_grid",
    "prefill_grid_under",
    "prefill_work",
    "readable",
    "representative_shape",
    "rescore",
    "sensitivity",
    "simulate",
    "synthetic_trace",
    "uncertainty",
    "where_it_pays",
    "with_cost",
    "write_scenario",
]
