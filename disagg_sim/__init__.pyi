from .certainty.breakdown import Breakdown, breakdown
from .certainty.elasticity import sensitivity
from .certainty.energy import with_energy
from .certainty.error_bars import Uncertainty, uncertainty
from .certainty.extrapolation import outside_calibration
from .certainty.rows import Origin, rescore
from .certainty.token_prices import with_token_prices
from .certainty.trust import rests_on
from .domain import Mapping, Sharding, Slo, Status
from .errors import DisaggSimError
from .facts.hub.imported import ImportedModel, import_model
from .facts.load import load_model, load_precision, load_profile, load_speculation, load_system, load_traffic
from .facts.traffic import Reuse
from .facts.yaml_files import list_specs
from .launch.expressible import expressible
from .launch.launch import Launch, launch
from .launch.workers import Workers
from .physics.counts import decode_work, prefill_work
from .physics.encoder import EncodeStep, encode_step
from .physics.kv_path import KvHandOver, KvLayout, kv_hand_over
from .physics.setup import Setup, setup
from .planning.answer import Plan
from .planning.evaluate import Evaluation, evaluate
from .planning.plan import plan
from .planning.question import PlanOptions
from .planning.run_energy import run_energy
from .report.tables import readable
from .search.axes import batch_axis
from .search.deployment import Deployment, Instance, Pool
from .search.grid import decode_grid, prefill_grid
from .search.mappings import enumerate_mappings
from .search.phase_grid import PhaseGrid
from .search.splits import SplitGrid, SplitInstance, split_grid
from .serving.colocated import colocated
from .serving.colocation import Colocation
from .serving.costs import with_cost
from .serving.disaggregated import disaggregated
from .serving.evidence import layout_evidence
from .serving.gains import Curve, Gain, curve, gain, pointwise_gain, where_it_pays
from .serving.piggyback import piggyback
from .serving.points import pareto_front
from .serving.pool_program import MatchOptions
from .serving.pools import PoolsPlan, plan_pools
from .serving.spares import SpareRules, with_spares
from .simulation.deployment import Replicas, ServedDeployment
from .simulation.metrics import Summary
from .simulation.simulate import SimulationResult, simulate
from .workload.hit_rates import hit_curve
from .workload.lengths import Lengths, lengths
from .workload.readers.load import load_trace
from .workload.readers.windows import stream_trace
from .workload.synthetic import synthetic_stream, synthetic_trace
from .workload.trace import Trace

__version__: str

__all__ = [
    "Breakdown",
    "Colocation",
    "Curve",
    "Deployment",
    "DisaggSimError",
    "EncodeStep",
    "Evaluation",
    "Gain",
    "ImportedModel",
    "Instance",
    "KvHandOver",
    "KvLayout",
    "Launch",
    "Lengths",
    "Mapping",
    "MatchOptions",
    "Origin",
    "PhaseGrid",
    "Plan",
    "PlanOptions",
    "Pool",
    "PoolsPlan",
    "Replicas",
    "Reuse",
    "ServedDeployment",
    "Setup",
    "Sharding",
    "SimulationResult",
    "Slo",
    "SpareRules",
    "SplitGrid",
    "SplitInstance",
    "Status",
    "Summary",
    "Trace",
    "Uncertainty",
    "Workers",
    "batch_axis",
    "breakdown",
    "colocated",
    "curve",
    "decode_grid",
    "decode_work",
    "disaggregated",
    "encode_step",
    "enumerate_mappings",
    "evaluate",
    "expressible",
    "gain",
    "hit_curve",
    "import_model",
    "kv_hand_over",
    "launch",
    "layout_evidence",
    "lengths",
    "list_specs",
    "load_model",
    "load_precision",
    "load_profile",
    "load_speculation",
    "load_system",
    "load_trace",
    "load_traffic",
    "outside_calibration",
    "pareto_front",
    "piggyback",
    "plan",
    "plan_pools",
    "pointwise_gain",
    "prefill_grid",
    "prefill_work",
    "readable",
    "rescore",
    "rests_on",
    "run_energy",
    "sensitivity",
    "setup",
    "simulate",
    "split_grid",
    "stream_trace",
    "synthetic_stream",
    "synthetic_trace",
    "uncertainty",
    "where_it_pays",
    "with_cost",
    "with_energy",
    "with_spares",
    "with_token_prices",
]
