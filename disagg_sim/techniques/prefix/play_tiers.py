"""Keep prompt blocks in tiers below HBM, and load from there what HBM has forgotten, or compute it again.

A block goes into every tier when its prompt is computed, as with the connectors of vLLM and HiCache of SGLang, so that
a tier adds what is larger than those above. Each tier forgets its least recently used block. A prompt loads the blocks
behind those that HBM has, each from the fastest tier that holds it, as far as that brings its first token sooner than
computing them: the rule of ``physics.passes.prompts``. A tier's link into an attention rank loads one prompt after the
other, beside the steps of the instance, and the tiers of a prompt load side by side; then the prompt joins the queue.

**Assumptions:** storing takes no time from loading (links work both ways at once), and what waits loaded takes no
memory from running requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.hardware import KvTier, SystemSpec
from disagg_sim.physics.cache_tiers import loaded_bytes, rank_bandwidth, tier_tokens
from disagg_sim.physics.setup import Setup
from disagg_sim.simulation.instance_variants import bare
from disagg_sim.simulation.instances import Roster
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.site import Site
from disagg_sim.techniques.prefix.play import FreeMemory
from disagg_sim.techniques.prefix.play_stated import StatedPasts

#: Number under which a store keeps what all instances share.
ALL = -1


class Loaded(NamedTuple):
    """What one prompt took from below HBM."""

    request: int
    tokens: tuple[int, ...]  # by tier [token]
    bytes: tuple[float, ...]  # by tier [B]
    seconds: float  # until all of it was in HBM, waiting for the link included [s]
    computed: int  # found below HBM, and computed again since that was sooner [token]


class TierSpec(NamedTuple):
    """A tier as the instances of one mapping see it."""

    tokens: float  # that the share of an instance holds [token]
    bandwidth: float  # into one attention rank [B/s]
    latency_s: float  # [s]


class Loader:
    """Times of an instance: to load a past from each tier, and to compute a prompt behind one."""

    def __init__(self, at: Setup, mapping: Sharding, tiers: Sequence[KvTier], table: StepTable, prompt: float) -> None:
        cut = bare(mapping)
        self.specs = [
            TierSpec(
                tier_tokens(at, cut, tier.capacity, prompt),
                float(rank_bandwidth(at, cut, prompt, tier)),
                tier.latency_s,
            )
            for tier in tiers
        ]
        self.ranks = int(cut.dp_attn)
        self._at, self._table = at, table

    def bytes(self, past: int, held: int) -> float:
        """Of what lies between the first ``held`` tokens and ``past``. [B]"""
        return loaded_bytes(self._at, past, held)

    def seconds(self, tier: int, past: int, held: int) -> float:
        """Time to load that from a tier whose link is free. [s]"""
        spec = self.specs[tier]
        return spec.latency_s + self.bytes(past, held) / spec.bandwidth if past > held else 0.0

    def compute_s(self, prompt: int, past: int) -> float:
        """Latency of the pass of one prompt of which ``past`` tokens are there. [s]"""
        return self._table.pass_time(prompt - past, past)[0]


class Stores:
    """Blocks in the tiers below HBM of all instances, the least recently used of each first."""

    def __init__(self, shared: Sequence[bool], tokens: Callable[[int], Sequence[float]], *, block_tokens: int) -> None:
        self._shared, self._tokens, self._block_tokens = tuple(shared), tokens, block_tokens
        self._kept: list[dict[int, OrderedDict[int, None]]] = [{} for _ in shared]
        self._room = [0.0 for _ in shared]  # of what all share [block]
        self._joined: dict[int, tuple[float, ...]] = {}  # by instance: blocks of each tier [block]

    def tier_of(self, instance: int, block: int) -> int:
        """The first tier that holds a block; -1 = none."""
        for tier, kept in enumerate(self._kept):
            if block in kept.get(ALL if self._shared[tier] else instance, ()):
                return tier
        return -1

    def used(self, instance: int, blocks: Sequence[int]) -> None:
        """Every tier gets the blocks of a prompt, the first of which is the last to be forgotten."""
        if instance not in self._joined:  # it brings its shares of the tiers
            rooms = tuple(tokens // self._block_tokens for tokens in self._tokens(instance))
            self._joined[instance] = rooms
            self._room = [room + more for room, more in zip(self._room, rooms, strict=True)]
        for tier, shared in enumerate(self._shared):
            kept = self._kept[tier].setdefault(ALL if shared else instance, OrderedDict())
            room = self._room[tier] if shared else self._joined[instance][tier]
            for block in reversed(blocks):
                kept[block] = None
                kept.move_to_end(block)
                if len(kept) > room:
                    kept.popitem(last=False)

    def forget(self, instance: int) -> None:
        """An instance has lost what it does not share."""
        for kept in self._kept:
            kept.pop(instance, None)


class Tiers:
    """A memory of prompts in HBM, and tiers below it."""

    def __init__(
        self,
        memory: FreeMemory | StatedPasts,
        stores: Stores | StatedPasts,
        *,
        names: tuple[str, ...],
        loaders: Callable[[int], Loader],
        block_tokens: int,
    ) -> None:
        self.names = names
        self._memory, self._stores, self._loader, self._block_tokens = memory, stores, loaders, block_tokens
        self._ready: dict[tuple[int, int], int] = {}  # by instance and request: past that has been loaded [token]
        self._free: dict[tuple[int, int], list[float]] = {}  # by tier and instance: when a rank's link is free [s]
        self.loaded: list[Loaded] = []
        self.step, self.again, self.blocks_of = memory.step, memory.again, memory.blocks_of
        self.found_everywhere = memory.found_everywhere

    def load(self, instance: int, request: int, prompt: int, now: float) -> float:
        """Begin to load what lies below HBM of a prompt, if that is sooner than to compute it; when it is there. [s]"""
        for begun, other in self._memory.begun():  # since the last look
            self._stores.used(begun, self.blocks_of(other))
        held = min(self._memory.found(instance, request), prompt - 1) // self.step * self.step
        ends = self._ends(instance, request, held, prompt)
        if ends[-1] == held:
            return now
        loader = self._loader(instance)
        best = self._worth(loader, held, ends, prompt)
        until, start, tokens, sizes = now, held, [], []
        for tier, end in enumerate(ends):
            stop = max(min(end, best), start)
            tokens.append(stop - start)
            sizes.append(loader.bytes(stop, start) if stop > start else 0.0)
            if stop > start:
                until = max(until, self._take(loader, tier, instance, sizes[-1], now))
            start = stop
        self.loaded.append(Loaded(request, tuple(tokens), tuple(sizes), until - now, ends[-1] - best))
        if best > held:
            self._ready[instance, request] = best
        return until

    @staticmethod
    def _worth(loader: Loader, held: int, ends: Sequence[int], prompt: int) -> int:
        """As far as loading brings the first token of a prompt sooner than computing, its links free. [token]"""
        best, soonest = held, loader.compute_s(prompt, held)
        start, load = held, 0.0
        for tier, end in enumerate(ends):
            if end > start:
                load = max(load, loader.seconds(tier, end, start))
                if (time := load + loader.compute_s(prompt, end)) <= soonest:
                    best, soonest = end, time
                start = end
        return best

    def _take(self, loader: Loader, tier: int, instance: int, size: float, now: float) -> float:
        """When so many bytes have come over the link of the rank that is free first. [s]"""
        free = self._free.setdefault((tier, instance), [0.0] * loader.ranks)
        bandwidth, latency = loader.specs[tier].bandwidth, loader.specs[tier].latency_s
        end = max(free[0], now) + size / bandwidth
        heapreplace(free, end)
        return end + latency

    def _ends(self, instance: int, request: int, held: int, prompt: int) -> list[int]:
        """Where the part of a prompt in each tier ends, one behind the other from ``held`` on. [token]"""
        blocks, most = self.blocks_of(request), prompt - 1
        ends, last = [held] * len(self.names), 0
        for place in range(held // self._block_tokens, len(blocks)):
            tier = self._stores.tier_of(instance, blocks[place])
            if tier < 0:
                break
            last = max(tier, last)  # behind a block of a slower tier nothing is there sooner
            ends[last] = min((place + 1) * self._block_tokens, most) // self.step * self.step
        return list(accumulate(ends, max))

    def found(self, instance: int, request: int) -> int:
        """See ``PrefixMemory``: in HBM, or loaded into it for this request. [token]"""
        return max(self._memory.found(instance, request), self._ready.get((instance, request), 0))

    def keep(self, instance: int, request: int, segment: int, loaded: int = 0) -> None:  # noqa: ARG002  known here
        """See ``PrefixMemory``."""
        self._memory.keep(instance, request, segment, self._ready.pop((instance, request), 0))

    def forget(self, instance: int) -> None:
        """See ``PrefixMemory``."""
        self._memory.forget(instance)
        self._stores.forget(instance)
        self._ready = {key: past for key, past in self._ready.items() if key[0] != instance}


def tiered(
    memory: FreeMemory | StatedPasts,
    block_tokens: int,
    *,
    names: tuple[str, ...],
    site: Site,
    roster: Roster,
    tables: Callable[[Sharding], StepTable],
) -> Tiers:
    """Put the tiers of a run below what its instances remember in HBM."""

    @cache
    def loader(mapping: Sharding) -> Loader:
        at = site.setup_of(mapping)
        return Loader(at, mapping, below(at.system, names), tables(mapping), site.prompt_tokens)

    def of(instance: int) -> Loader:
        return loader(roster.mapping[instance])

    def tokens(instance: int) -> list[float]:
        return [spec.tokens for spec in of(instance).specs]

    shared = [tier.shared for tier in below(site.setup.system, names)]
    stores = memory if isinstance(memory, StatedPasts) else Stores(shared, tokens, block_tokens=block_tokens)
    return Tiers(memory, stores, names=names, loaders=of, block_tokens=block_tokens)


def below(system: SystemSpec, names: Sequence[str]) -> list[KvTier]:
    """Find tiers of a system below HBM, in the order of the names."""
    if len(set(names)) < len(names):
        raise InputError(f"tiers {', '.join(names)}: one stands there twice; allowed: each once")
    found = [system.tier(name) for name in names]
    if None in found:
        raise InputError(f"tiers {', '.join(names)}: hbm is above them all; allowed: {', '.join(system.kv_tiers)}")
    return [tier for tier in found if tier is not None]
