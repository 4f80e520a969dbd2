"""Serving systems, one file each; importing this package registers them all."""

from disagg_sim.simulation.policies.arrow import Arrow
from disagg_sim.simulation.policies.disaggregated import Disaggregated
from disagg_sim.simulation.policies.least_load import InTurn, LeastLoad
from disagg_sim.simulation.policies.vllm import Vllm

__all__ = ["Arrow", "Disaggregated", "InTurn", "LeastLoad", "Vllm"]
