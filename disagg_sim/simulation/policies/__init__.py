"""Serving systems, one file each; importing this package registers them all."""

from disagg_sim.simulation.policies.arrow.policy import Arrow
from disagg_sim.simulation.policies.disaggregated import Disaggregated
from disagg_sim.simulation.policies.dopd.policy import Dopd
from disagg_sim.simulation.policies.dynamo.load import DynamoLoad
from disagg_sim.simulation.policies.dynamo.sla import DynamoSla
from disagg_sim.simulation.policies.dynaserve.policy import DynaServe
from disagg_sim.simulation.policies.least_load import InTurn, LeastLoad
from disagg_sim.simulation.policies.vllm import Vllm

__all__ = ["Arrow", "Disaggregated", "Dopd", "DynaServe", "DynamoLoad", "DynamoSla", "InTurn", "LeastLoad", "Vllm"]
