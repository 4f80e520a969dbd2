from .certainty.breakdown import breakdown
from .certainty.elasticity import sensitivity
from .certainty.energy import with_energy
from .certainty.error_bars import uncertainty
from .certainty.extrapolation import outside_calibration
from .certainty.rows import Origin, rescore
from .certainty.token_prices import with_token_prices
from .certainty.trust import rests_on
from .domain import Sharding, Slo
from .errors import DisaggSimError
from .facts.hub.imported import import_model
from .facts.load import load_model, load_precision, load_speculation, load_system, load_traffic
from .facts.traffic import Reuse
from .facts.yaml_files import list_specs
from .launch.expressible import expressible
from .launch.launch import launch
from .physics.setup import Setup, setup
from .planning.answer import Plan
from .planning.evaluate import evaluate
from .planning.plan import plan
from .planning.question import PlanOptions
from .planning.run_energy import run_energy
from .report.tables import readable
from .search.grid import decode_grid, prefill_grid
from .search.mappings import enumerate_mappings
from .serving.colocated import colocated
from .serving.colocation import Colocation
from .serving.costs import with_cost
from .serving.disaggregated import disaggregated
from .serving.evidence import layout_evidence
from .serving.gains import curve, pointwise_gain, where_it_pays
from .serving.piggyback import piggyback
from .serving.points import pareto_front
from .serving.pool_program import MatchOptions
from .serving.pools import plan_pools
from .simulation.deployment import Replicas, ServedDeployment
from .simulation.simulate import simulate
from .techniques.availability.law_columns import SpareRules, with_spares
from .techniques.encode.physics import encode_step
from .techniques.prefix.requests_hits import hit_curve
from .techniques.split.search import split_grid
from .workload.lengths import Lengths, lengths
from .workload.readers.load import load_trace
from .workload.readers.windows import stream_trace
from .workload.synthetic import synthetic_stream, synthetic_trace
from .workload.trace import Trace

__version__: str

__all__ = [
    "Colocation",
    "DisaggSimError",
    "Lengths",
    "MatchOptions",
    "Origin",
    "Plan",
    "PlanOptions",
    "Replicas",
    "Reuse",
    "ServedDeployment",
    "Setup",
    "Sharding",
    "Slo",
    "SpareRules",
    "Trace",
    "breakdown",
    "colocated",
    "curve",
    "decode_grid",
    "disaggregated",
    "encode_step",
    "enumerate_mappings",
    "evaluate",
    "expressible",
    "hit_curve",
    "import_model",
    "launch",
    "layout_evidence",
    "lengths",
    "list_specs",
    "load_model",
    "load_precision",
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
