"""What a node draws beside its GPUs: host, fans, supplies, network, cooling. Published models, not measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from disagg_sim.facts.schema import NotEmpty, Quantity, Range

_Watts = Annotated[float, Quantity("W", 0.0, 1e6)]
_Share = Annotated[float, Range(0.0, 1.0)]
_Count = Annotated[int, Range(1, 10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converters:
    """Converters of direct current in front of the GPUs of a rack."""

    count: _Count
    capacity: _Watts  # output of one [W]
    loads: Annotated[tuple[_Share, ...], NotEmpty]  # rising shares of the capacity [1]
    losses: Annotated[tuple[_Watts, ...], NotEmpty]  # of one converter at these loads [W]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fans:
    """Fans whose speed rises with the heat of GPUs and host."""

    rated: _Watts  # at full speed [W]
    slowest: _Share  # speed without heat [1]
    fastest: _Share  # speed at ``heat`` and beyond [1]
    heat: _Watts  # [W]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """A chassis or a rack: ``wall = (GPUs + host + fans + converters)/eta + network``, facility = wall*PUE."""

    gpus: _Count
    host: _Watts  # CPUs, memory, drives, switches, NICs, where GPUs of one node work together [W]
    host_across: _Watts  # the same where those of several do [W]
    network: _Watts  # share in external switches and optics [W]
    network_across: _Watts  # [W]
    fans: Fans | None = None
    converters: Converters | None = None
    supply_capacity: _Watts  # of all supplies that share the load [W]
    supply_loads: Annotated[tuple[_Share, ...], NotEmpty]  # rising shares of it [1]
    supply_efficiency: Annotated[tuple[_Share, ...], NotEmpty]  # at these loads [1]
    pue: Annotated[float, Range(1.0, 3.0)]

    @property
    def links(self) -> float:
        """What NICs, switches and optics draw more for traffic between nodes. [W]"""
        return self.host_across - self.host + self.network_across - self.network
