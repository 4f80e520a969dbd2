"""Equal workers of one role, as a launcher starts them: mapping, count, limits of a step, nodes, checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from disagg_sim.certainty.rows import Origin, designs_of
from disagg_sim.domain import ServingMode, Sharding
from disagg_sim.errors import InputError, check_kinds, check_word, quoted, whole_number
from disagg_sim.facts.launcher import checkpoint_name
from disagg_sim.facts.load import load_checkpoints, load_model
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.speculation import MTP
from disagg_sim.facts.yaml_files import DIRECTORIES, shipped_root
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.design import Design
from disagg_sim.search.deployment import Deployment
from disagg_sim.simulation.deployment import Replicas, ServedDeployment, served, stage_tokens
from disagg_sim.simulation.instance_variants import ffn_of
from disagg_sim.simulation.options import MOST_SEQUENCES, MOST_TOKENS
from disagg_sim.workload.lengths import Lengths

#: What a worker does; pairs split each request between two instances, encode pools make embeddings of images.
ROLES = ("encode", "prefill", "decode", "colocated", "pairs")
#: GPUs of a node where its file names none. [1]
NODE_GPUS = 8
#: Most instances of a role: a hundred of the largest clusters that are known. [1]
MOST_INSTANCES = 10**7
#: Limits of an engine over the lengths that were planned, before they are rounded up to whole ``ROOM_STEP``: room for
#: the words of a chat template, and for texts that another tokeniser counted; an assumption. [1], [token]
ROOM, ROOM_STEP = 1.25, 1024
#: Standard deviations above the mean up to which a prompt fits a pass whole, as in the memory of ``prefill_grid``. [1]
WHOLE_DEVIATIONS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Equal instances of one role.

    ``batch`` and ``token_budget`` mean what they mean in ``Replicas``: over all attention ranks of an instance.
    """

    role: str  # of ``ROLES``
    mapping: Sharding
    instances: int  # [1]
    setup: Setup = field(compare=False, repr=False)
    batch: int | None = None  # None = as the engine takes it [request]
    token_budget: int | None = None  # None = as the engine takes it [token]
    hold_steps: int = 0  # most decode steps that prompts wait until every attention rank can take one; 0 = none [1]
    name: str = ""  # in files and manifests; empty = the role
    node_gpus: int | None = None  # of a node; None = as its system's file says, else 8 [1]
    tiers: tuple[str, ...] = ()  # below HBM in which it keeps prompts, of ``kv_tiers`` of its system
    lengths: Lengths | None = field(default=None, compare=False, repr=False)  # that were planned; None = not known

    def __post_init__(self) -> None:
        """``InputError`` for a value of another kind, an odd name, or no instance."""
        check_kinds(self)
        whole_number("instances", self.instances, most=MOST_INSTANCES)
        ranks = int(self.mapping.dp_attn)
        if self.batch is not None:
            whole_number("batch", self.batch, most=MOST_SEQUENCES * ranks)
        if self.token_budget is not None:
            whole_number("token_budget", self.token_budget, most=MOST_TOKENS * ranks)
        if self.node_gpus is not None:
            whole_number("node_gpus", self.node_gpus)
        check_word("role", self.role, ROLES)
        if not re.fullmatch("(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)?", self.name):
            raise InputError(
                f"name {quoted(self.name)} of workers; allowed: up to 63 of a to z, 0 to 9, dashes inside, as of pods"
            )
        if self.name in ("router", "frontend"):
            raise InputError(f"name {self.name} of workers: files and manifests have it already")

    @property
    def label(self) -> str:
        """Its name in files and manifests."""
        return self.name or self.role

    @property
    def gpus(self) -> int:
        """Of one instance. [1]"""
        return int(self.mapping.gpus)

    @property
    def sequences(self) -> int | None:
        """Most sequences of an attention rank, in all stages of a pipeline together. [request]"""
        if self.batch is None:
            return None
        in_flight = int(self.mapping.pp) if self.role == "prefill" else 1  # each stage has a pass of its own
        return self._share(self.batch) * in_flight

    @property
    def context(self) -> int | None:
        """Most tokens of a request, input and output; None = as many as the model takes. [token]"""
        return None if self.lengths is None else self._roomy(longest_of(self.lengths))

    def _roomy(self, tokens: float) -> int:
        """A limit with room, within the model's. [token]"""
        return min(math.ceil(tokens * ROOM / ROOM_STEP) * ROOM_STEP, self.setup.model.max_context)

    @property
    def tokens(self) -> int | None:
        """Most tokens of a step of an attention rank; all but the longest prompts fit where none are cut. [token]"""
        if self.mapping.chunk_tokens:
            return self._share(stage_tokens(self.mapping, self.batch or int(self.mapping.dp_attn), 0))
        if self.token_budget is None:
            return None
        if self.role == "prefill" and self.batch is not None and self.mapping.pp > 1:
            return self._share(stage_tokens(self.mapping, self.batch, self.token_budget))
        own = self._share(self.token_budget)
        if self.role != "prefill" or self.lengths is None:
            return own
        return max(own, self._roomy(self.lengths.mean_isl + WHOLE_DEVIATIONS * self.lengths.isl_deviation))

    def _share(self, whole: int) -> int:
        """Of one attention rank, rounded up."""
        return -(-whole // int(self.mapping.dp_attn))

    @property
    def local_gpus(self) -> int:
        """Of a node. [1]"""
        return self.node_gpus or self.setup.system.node_gpus or NODE_GPUS

    def nodes(self) -> int:
        """Fewest equal nodes that hold an instance, none with a part of one attention rank beside a whole one. [1]

        >>> from disagg_sim.physics.setup import setup
        >>> at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
        >>> wide = Workers(role="decode", mapping=Sharding(dp_attn=32, ep=32), instances=1, setup=at)
        >>> wide.nodes(), replace(wide, node_gpus=8).nodes()
        (8, 4)
        """
        rank = int(self.mapping.tp_attn * self.mapping.pcp * self.mapping.pp)
        for nodes in range(math.ceil(self.gpus / self.local_gpus), self.gpus):
            own, odd = divmod(self.gpus, nodes)
            if not odd and (own % rank == 0 or rank % own == 0):
                return nodes
        return self.gpus if self.gpus > 1 else 1


def workers_of(
    deployment: Design | Deployment | ServedDeployment | pd.DataFrame | Sequence[Workers],
) -> tuple[Workers, ...]:
    """Read the workers of a deployment."""
    lengths = None
    if isinstance(deployment, pd.DataFrame):
        found = list(_of_row(deployment))
    elif isinstance(deployment, Design):
        found, lengths = list(_of_design(deployment)), deployment.work.lengths
    elif isinstance(deployment, Deployment | ServedDeployment):
        found = list(_of_parts(deployment))
        lengths = deployment.lengths if isinstance(deployment, Deployment) else None
    else:
        found = list(deployment)
    if not found or not all(isinstance(each, Workers) for each in found):
        raise InputError(
            f"deployment {quoted(deployment)} has no instances; allowed: a Design, a Deployment, a ServedDeployment, "
            "a row of a table of points, or Workers"
        )
    known: dict[str, int] = {}
    named = []
    for each in found if lengths is None else [replace(one, lengths=lengths) for one in found]:
        known[each.label] = number = known.get(each.label, 0) + 1
        named.append(replace(each, name=f"{each.label}-{number}") if number > 1 else each)
    return tuple(named)


def _of_design(design: Design) -> Iterator[Workers]:
    """The pools of a plan, an encoder on each GPU of its pool; halves of a layer are no workers of any engine."""
    tiers = _tiers(design.work.lengths)
    for pool in design.pools:
        if ffn_of(pool.mapping) is not None:
            raise InputError(
                "no engine ships attention-FFN disaggregation (vllm-project/afd-plugin is experimental): there are no "
                "launch files for attention and ffn pools; plan with encode, prefill and decode"
            )
        found = _workers(pool.role, pool.replicas, pool.setup)
        if pool.role == "encode":
            yield replace(found, batch=None)
        else:
            yield replace(found, tiers=() if pool.role == "decode" else tiers)


def _of_parts(deployment: Deployment | ServedDeployment) -> Iterator[Workers]:
    if isinstance(deployment, Deployment):
        for role, pool in (("prefill", deployment.prefill), ("decode", deployment.decode)):
            alone = served(Deployment(prefill=pool, decode=pool))  # pools of a pair may have systems of their own
            for (instance, _), replicas in zip(pool.members, alone.prefill, strict=True):
                yield _workers(role, replicas, instance.setup)
        return
    if len(deployment.models) > 1:
        raise InputError(
            f"deployment {deployment.name!r} serves {' and '.join(deployment.models)}; allowed: one model a launch"
        )
    pools = {"prefill": deployment.prefill, "decode": deployment.decode}
    if not all(pools.values()):
        pools = {"colocated": deployment.colocated} if deployment.colocated else {"pairs": deployment.pairs}
    for role, entries in pools.items():
        for each in entries:
            yield _workers(role, each, each.setup or deployment.setup)


def _workers(role: str, each: Replicas, at: Setup | None) -> Workers:
    if at is None:
        raise InputError("the deployment has no setup, which says what it serves; give setup=")
    return Workers(
        role=role,
        mapping=each.mapping,
        instances=each.instances,
        setup=at,
        batch=each.batch,
        token_budget=each.token_budget,
        hold_steps=each.hold_steps or 0,
    )


def longest_of(lengths: Lengths) -> float:
    """Find the longest request, input and output; of a law of lengths what hardly any request exceeds. [token]"""
    return float(lengths.resident.most) if lengths.requests.joint else lengths.requests.reach


def _tiers(lengths: Lengths) -> tuple[str, ...]:
    """Tiers below HBM that prompts are found in."""
    return () if lengths.cached is None else lengths.cached.reuse.below


def _of_row(points: pd.DataFrame) -> Iterator[Workers]:
    if len(points) != 1:
        raise InputError(f"the table has {len(points)} rows; a deployment is one, such as table.loc[[3]]")
    (each,) = designs_of(points, Origin(exact=False))
    batch, instances, mixed = (int(column[0]) for column in (each.batch, each.instances, each.mixed_chunk))
    known = each.lengths if "traffic" in points else None  # other tables hold no more than the means
    budget = batch + mixed if each.mode == ServingMode.PIGGYBACK else None
    role, tiers = "colocated" if each.shared else "decode", _tiers(each.lengths)
    last = Workers(
        role=role,
        mapping=each.mapping[0],
        lengths=known,
        instances=instances,
        setup=each.at,
        batch=batch,
        token_budget=budget,
        hold_steps=int(each.hold_steps[0]),
        tiers=tiers if each.shared else (),
    )
    if not each.shared:
        prompts = int(each.prefill_batch[0])
        yield Workers(
            role="prefill",
            mapping=replace(each.prefill_mapping[0], chunk_tokens=int(each.chunk_tokens[0])),
            lengths=known,
            instances=int(each.prefill_instances[0]),
            setup=each.prefill_at,
            batch=prompts,
            token_budget=math.ceil(prompts * each.lengths.mean_new),
            tiers=tiers,
        )
    yield last


#: In files, where no published checkpoint is known, of the model and of its drafter.
UNKNOWN, UNKNOWN_DRAFTER = "CHECKPOINT", "DRAFT_CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and how the engine reads it."""

    checkpoint: str
    quantised: str = ""  # format that the engine makes of it; empty = as it is
    note: str = ""  # what the reader must know
    drafter: Weights | None = None  # of a head or a draft model; None without, and where it lies in the checkpoint


def weights_of(at: Setup, checkpoint: str = "", *, quantises: bool = True) -> Weights:
    """Find the checkpoint of a setup's model in the formats of its recipe; ``UNKNOWN`` with a note where none is."""
    if checkpoint:
        try:
            checkpoint_name(checkpoint)
        except ValueError as error:
            raise InputError(f"checkpoint {error}") from None
    own = replace(at, speculation=None)
    return replace(_of_model(own, checkpoint, quantises=quantises), drafter=_of_drafter(at, quantises=quantises))


def format_of(at: Setup) -> str:
    """Name the format of most weights of a recipe."""
    return (at.precision.expert if at.model.is_moe else at.precision.ffn).name


def _of_drafter(at: Setup, *, quantises: bool) -> Weights | None:
    """Checkpoint of a head or a draft model."""
    speculation, own = at.speculation, at.draft_model
    if speculation is None or speculation.method == MTP:
        return None
    if speculation.checkpoint:
        return Weights(checkpoint=speculation.checkpoint)
    if own is None:
        said = f"no checkpoint of the {speculation.method} head {speculation.name} is known: put its name or path"
        return Weights(checkpoint=UNKNOWN_DRAFTER, note=f"{said} in place of {UNKNOWN_DRAFTER}")
    found = _of_model(own, "", quantises=quantises)
    if found.checkpoint != UNKNOWN:
        return found
    return replace(found, checkpoint=UNKNOWN_DRAFTER, note=found.note.replace(UNKNOWN, UNKNOWN_DRAFTER))


def _of_model(at: Setup, checkpoint: str, *, quantises: bool) -> Weights:
    """Checkpoint of one model."""
    model, kind = at.model, format_of(at)
    if checkpoint:
        alone = ", and no format of its own for the KV cache" if at.precision.cache.name == "bf16" else ""
        return Weights(checkpoint=checkpoint, note=f"{checkpoint} must have its weights in {kind}{alone}")
    known = load_checkpoints().models.get(model.name, {})
    other = _of_another(model)
    if kind in known:
        return Weights(checkpoint=known[kind], note=other and known[kind] + other)
    if kind == "fp8" and "bf16" in known and quantises:
        said = f"{known['bf16']} is quantised to fp8 as it loads"
        return Weights(checkpoint=known["bf16"], quantised="fp8", note=said + other)
    said = f"no published checkpoint of {model.name} in {kind} is known: give its name or path for {UNKNOWN}"
    return Weights(checkpoint=UNKNOWN, note=said)


def _of_another(model: ModelSpec) -> str:
    """A warning of a model that is not the shipped one of its name, by which checkpoints are found."""
    shipped = shipped_root() / DIRECTORIES["model"] / f"{model.name}.yaml"
    if not shipped.is_file() or model == load_model(shipped):
        return ""
    return f" is a checkpoint of the {model.name} that is shipped, from which yours differs: say --checkpoint"
