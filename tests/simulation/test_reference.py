"""The compiled kernel, the network and the cluster do what the reference does, step by step, to 1e-9."""

import functools
import hashlib
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from random import Random

import numpy as np
import pytest
from reference import Cache, Reference
from reference_rank import BLOCK
from sites import SIMPLE, deployment, served, small_setup

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.attention import GqaAttention
from disagg_sim.facts.ffn import DenseFfn
from disagg_sim.facts.layers import LayerKind
from disagg_sim.facts.linear_attention import GdnAttention
from disagg_sim.facts.load import load_engine, load_model, load_scheduler
from disagg_sim.facts.speculation import stated_speculation
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.layout import AdmissionRule, Mode, RankChoice, Scheduling
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.kv_link import PUSHES, LinkSpec
from disagg_sim.simulation.metrics import ServiceClass
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site
from disagg_sim.simulation.transfers import FIRST_TOKENS, WAYS
from disagg_sim.simulation.wishes import Leg, Limits, Role
from disagg_sim.workload.request_columns import Labels, PrefixBlocks
from disagg_sim.workload.trace import Trace

SEQUENCES = 16
#: Ways of transfers whose caches take all their blocks together.
AT_ONCE = tuple(way for way in WAYS if way != "chunks")
#: Instances differ in their speed, and arrivals are no round numbers: what falls on one instant then does so exactly.
ODD = math.pi / 3.0


@functools.lru_cache
def table(number, kind, drafts=0):
    """Step times of an instance: a formula, or a table of ranks, stages and chunks."""
    accepted = (0.8, 0.5, 0.4)[:drafts]
    if kind == "formula":
        rate = 1.0 + 0.01 * ODD * number
        each = {"per_sequence": 1e-5, "per_context": 1e-7, "per_token": 1e-6}
        return StepTable.affine(step=rate * 1e-3, **each, max_sequences=SEQUENCES, accepted=accepted)
    mapping = {
        "ranks": Sharding(dp_attn=2, ep=2),
        "four": Sharding(dp_attn=4, ep=4),
        "stages": Sharding(pp=2),
        "both": Sharding(dp_attn=2, ep=2, pp=2),
        "chunks": Sharding(dp_attn=2, ep=2, pp=2, chunk_tokens=64),
    }[kind]
    drafter = stated_speculation("mtp", accepted) if drafts else None
    at = setup("mixtral_8x7b", "h100_sxm", "bf16", speculation=drafter)
    return StepTable.build(at, replace(mapping, draft_tokens=drafts), max_sequences=SEQUENCES)


#: Llama-3.1-8B in bf16: keys and values of 8 heads of 128 numbers, in 32 layers.
CACHE = Cache(token_bytes=2 * 8 * 128 * 32 * 2.0, layers=32, tensors=64)


class Scripted:
    """Requests follow given routes over instances of given specs."""

    needs = ("colocated",)

    def __init__(self, specs, mappings, routes):
        self.specs, self.mappings, self.routes = specs, mappings, [list(route) for route in routes]

    def build(self, site):
        return Parts(start=tuple((mapping, Role.BOTH) for mapping in self.mappings), routing=self, steps=self)

    def limits(self, mapping, role):
        spec = self.specs[self.mappings.index(mapping)]
        names = ("mode", "token_budget", "max_sequences", "max_prompts", "step_limit_s", "least_prefill")
        return Limits(**{name: getattr(spec, name) for name in names})

    def place(self, view, request):
        return self.routes[request].pop(0)

    def proceed(self, view, request, origin):
        return self.routes[request].pop(0)


def by_kernel(requests, routes, specs, options, ids, priorities, at):
    """The run of the kernel and the cluster, and the bandwidths of its instances."""
    slo, kinds = Slo(ttft=2.0, tpot=0.1), sorted(set(priorities))
    options = replace(options, classes=tuple(ServiceClass(name=str(each), slo=slo, priority=each) for each in kinds))
    mappings = [Sharding(redundant_slots=number) for number in range(len(specs))]
    engine = Engine(0)
    spec_of = dict(zip(mappings, specs, strict=True))
    rules = replace(
        load_scheduler("vllm_v1_2026"),
        admission=specs[0].admission.name.lower(),
        watermark=specs[0].watermark,
        keeps_preempted=specs[0].keeps_preempted,
        rank_choice=specs[0].rank_choice.name.lower(),
        prefix_found="computed" if specs[0].finds_computed else "taken",
    )
    part = Replicas(mapping=mappings[0], instances=len(specs))
    ahead = replace(load_engine("vllm"), steps_ahead=specs[0].steps_ahead, request_host=0.0)
    site = Site(
        setup=replace(at, overheads=ahead),
        deployment=ServedDeployment(name="small", gpus=len(specs), colocated=(part,)),
        slo=slo,
        link=options.link,
        link_bandwidth=options.link.bandwidth,
        link_latency_s=options.link.latency_s,
        link_descriptor_s=options.link.descriptor_s,
        tables=lambda mapping, sequences: spec_of[mapping].table,
        blocks=lambda mapping, limits: spec_of[mapping].blocks,
        rng=engine.rng,
        start_up_s=0.0,
        flip_s=0.0,
        prompt_tokens=100.0,
        output_tokens=100.0,
        scheduler=rules,
        scheduling=specs[0].scheduling,
        swap_s=lambda mapping: (spec_of[mapping].swap_block_s, spec_of[mapping].swap_first_s),
    )
    arrival, inputs, outputs = (np.array(column) for column in zip(*requests, strict=True))
    offsets = np.cumsum([0, *(len(own) for own in ids)])
    prefix = PrefixBlocks(offsets=offsets, ids=np.array([one for own in ids for one in own], int), block_tokens=BLOCK)
    classes = Labels(names=tuple(map(str, kinds)), number=np.array([kinds.index(each) for each in priorities]))
    trace = Trace(arrival=arrival, input_tokens=inputs, output_tokens=outputs, prefix=prefix, classes=classes)
    found = serve(trace, Scripted(specs, mappings, routes), site, engine, options)
    return found, [site.instance_bandwidth(mapping) for mapping in mappings]


def compare(requests, routes, specs, options, ids=None, priorities=None, *, at=None, saves=1):
    """Hold the records of the kernel to those of the reference, which is returned; where it has no rule, to nothing.

    ``ids`` are those of the blocks of every prompt; ``saves`` is by hand how far apart a model saves states.
    """
    ids, priorities = ids or [[] for _ in requests], priorities or [0] * len(requests)
    found, bandwidths = by_kernel(requests, routes, specs, options, ids, priorities, at or small_setup())
    stream = int(Engine(0).rng("accepted drafts").integers(2**32))
    reference = Reference(requests, routes, specs, bandwidths, options, CACHE, ids, priorities, saves, stream)
    reference.run()
    if reference.network.tied:
        return reference
    expected = reference.records()
    for name, column in expected.items():
        np.testing.assert_allclose(getattr(found.requests, name), column, rtol=1e-9, atol=1e-9, err_msg=name)
    if options.gap_limit_s < math.inf:
        done, late = found.requests.status == 0, reference.late_gaps(options.gap_limit_s)
        np.testing.assert_array_equal(found.requests.late_gaps[done], np.array(late)[done], err_msg="late_gaps")
    for name in ("decode_steps", "decode_tokens", "prefill_tokens", "busy_s"):
        column = [getattr(each, name) for each in reference.instances]
        np.testing.assert_allclose(getattr(found.instances, name), column, rtol=1e-9, atol=1e-9, err_msg=name)
    return reference


# --- random cases -----------------------------------------------------------------------------------------------


class Draw(Random):
    """Random numbers of one case."""

    def up_to(self, *ends):
        """A whole number from 0 up to one of some ends: small ones are met, too."""
        return self.randint(0, self.choice(ends))

    def length(self):
        """Tokens."""
        return 1 + self.up_to(39, 399)


#: Prompts, outputs and the longest gap. Long prompts that all come at once fill the senders of caches until these wait
#: for each other.
LOADS = ((Draw.length, Draw.length, 200), (lambda draw: draw.randint(150, 400), lambda draw: draw.randint(1, 60), 3))


#: Prompts that fit together, and outputs that do not.
GROWING = (lambda draw: draw.randint(1, 80), lambda draw: draw.randint(50, 300), 3)


#: Short prompts among long ones, half of which are all that an instance does for a request.
UNLIKE = (
    lambda draw: draw.choice([draw.randint(1, 20), draw.randint(400, 3000)]),
    lambda draw: draw.choice([1, draw.randint(1, 40)]),
    60,
)


def swapping(draw, specs):
    """Preemption by swap on instances of one rank, short of memory: at no cost, or for longer than a step takes."""
    times = {"swap_block_s": draw.choice([0.0, 1e-4 * ODD]), "swap_first_s": draw.choice([0.0, 1e-3 * ODD])}
    return [spec if spec.table.ranks > 1 else replace(spec, **times, blocks=26) for spec in specs]


def case(seed, most, drafts, swaps=False, chunks=False, stages=False, ahead=False):
    draw = Draw(seed)
    count = draw.randint(1, most)
    rules = {
        "admission": draw.choice([*AdmissionRule]),
        "watermark": draw.choice([0.0, 0.01, 0.1]),
        "keeps_preempted": draw.choice([False, True]),
        "finds_computed": draw.choice([False, True]),
        "rank_choice": draw.choice([*RankChoice]),
        "scheduling": draw.choice([*Scheduling]),
    }
    least_blocks = draw.choice([52, 30, 20])  # with 52 any request fits
    kinds = draw.sample(["formula"] * 4 + ["ranks", "ranks", "four", "stages", "both", "chunks"], count)
    modes = [mode for mode in Mode if mode != Mode.MANUAL]
    if stages:
        kinds = draw.choices(["stages", "both", "chunks"], k=count)
        least_blocks, modes = 200, [Mode.PREFILL_FIRST]  # blocks of the longest request
    tables = [table(number, kind, draw.choice(drafts)) for number, kind in enumerate(kinds)]
    specs = [
        InstanceSpec(
            table=each,
            blocks=draw.randint(least_blocks, least_blocks + 60 if stages else 60) * each.ranks,
            mode=draw.choice(modes),
            token_budget=draw.choice([8, 64, 512]),
            max_sequences=draw.choice([SEQUENCES, 4, 1]),
            max_prompts=draw.choice([1, 3, 100]),
            step_limit_s=draw.choice([1.2e-3, 5e-3, 2e-2, math.inf]),
            least_prefill=draw.choice([1, 16]),
            **rules,
        )
        for each in tables
    ]
    remembers = draw.choice([False, False, True, True])
    options = RunOptions(
        prefix_cache=remembers or draw.choice([False, True]),
        transfer=draw.choice(AT_ONCE),
        first_token=draw.choice(FIRST_TOKENS),
        link=LinkSpec(
            bandwidth=draw.choice([3e8, 3e9, 3e10]),
            latency_s=draw.choice([0.0, 1e-3 * ODD]),
            descriptor_s=draw.choice([0.0, 1e-6]),
            push=draw.choice(PUSHES),
            chunk_tokens=32,
        ),
    )
    prompts, outputs, gap = GROWING if swaps else UNLIKE if stages else draw.choice(LOADS)
    clock, requests, ways, ids, priorities = 0, [], [], [], []
    for _ in range(draw.randint(10, 25)):
        clock += draw.up_to(0, 20, gap)
        prompt, output = prompts(draw), outputs(draw)
        requests.append((clock * 1e-3 * ODD, prompt, output))
        ways.append(route(draw, count, prompt, output))
        priorities.append(draw.choice([0, -1, 1]))
        family = draw.randint(0, 3)
        ids.append([1000 * family + block for block in range(math.ceil(prompt / BLOCK))])
    if swaps:
        specs, options = swapping(draw, specs), replace(options, prefix_cache=False)
    options = replace(options, gap_limit_s=draw.choice([math.inf, 1.5e-3 * ODD, 3e-3 * ODD, 1e-2 * ODD]))
    if chunks or (options.transfer == "push" and draw.choice([False, True])):
        link = replace(options.link, push="chunk", chunk_tokens=draw.choice([16, 32, 40, 100]))
        options = replace(options, transfer="chunks", link=link)
    if chunks:  # the instance after a leg is known when it begins, and short of room
        specs = [replace(spec, blocks=draw.randint(26, 34) * spec.table.ranks) for spec in specs]
        ways = [[*way[:-2], way[-2]._replace(then=way[-1].instance)] if way[1:] else way for way in ways]
    return requests, ways, [replace(spec, steps_ahead=int(ahead)) for spec in specs], options, ids, priorities


def route(draw, instances, prompt, output):
    """One to three legs: the prefill may end anywhere in the prompt, the decode anywhere in the output."""
    ends = draw.choice(["whole", "prefill", "prefill", "anywhere", "three"])
    anywhere = [draw.randint(1, prompt + output) for _ in range(3)]
    cuts = {"whole": [], "prefill": [prompt + 1], "anywhere": anywhere[:1], "three": sorted({*anywhere[1:]})}[ends]
    legs = [Leg(draw.randrange(instances), cut) for cut in cuts if cut != prompt]
    last = draw.randrange(instances)
    if legs and draw.choice([False, True]):
        return [*legs[:-1], legs[-1]._replace(then=last)]
    return [*legs, Leg(last)]


def hold(seeds, most=4, drafts=(0,), swaps=False, chunks=False, stages=False, ahead=False, **model):
    """Compare a random case of each seed; how often things happened in them that make a scheduler hard."""
    seen = Counter()
    for seed in seeds:
        try:
            reference = compare(*case(seed, most, drafts, swaps, chunks, stages, ahead), **model)
        except Exception as error:
            error.add_note(f"case of seed {seed}, at most {most} instances")
            raise
        seen["preempted"] += sum(turn.preemptions > 0 for turn in reference.turns)
        seen["swapped"] += sum(rank.swaps for each in reference.instances for rank in each.ranks)
        seen["waits for blocks"] += sum(wait > 0 for _, _, _, wait, _ in reference.moved)
        seen["leaves early"] += sum(whole > exposed + 1e-9 for _, exposed, whole, _, _ in reference.moved)
        seen["remembered"] += sum(turn.hit > 0 for turn in reference.turns)
        seen["shared"] += sum(turn.hit > 0 for turn in reference.turns if reference.shares)
        seen["shared and preempted"] += sum(turn.preemptions > 0 for turn in reference.turns if reference.shares)
        seen["rejected"] += len(reference.rejected)
        seen["circle"] += reference.circles
        seen["chunks"] += sum(turn.feeds is not None for turn in reference.turns)
        seen["tied"] += reference.network.tied
        seen["late"] += sum(reference.late_gaps(1.5e-3 * ODD))
    return seen


FULL = dict.fromkeys(("preempted", "waits for blocks", "leaves early"), 0)
#: Seeds, options of ``case``, and what happens there more often than so many times.
WAYS = {
    "one instance": (range(25), {"most": 1}, {"preempted": 0}),
    "hand-overs": (range(50), {}, FULL | {"remembered": 0, "rejected": 0, "shared": 10, "shared and preempted": 10}),
    "drafts": (range(15), {"most": 2, "drafts": (0, 1, 3)}, FULL | {"remembered": 0}),
    "swaps": (
        *(range(3000, 3040), {"most": 2, "drafts": (0, 0, 2), "swaps": True}),
        {"swapped": 100, "waits for blocks": 0, "leaves early": 0},
    ),
    "chunks": (range(30000, 30030), {"chunks": True}, FULL | {"chunks": 100, "circle": 0, "rejected": 0}),
    "short passes behind long ones": (range(40000, 40030), {"stages": True}, FULL | {"shared": 0}),
    "more drafts": (range(2000, 2025), {"drafts": (0, 1, 2, 3)}, {"rejected": 0}),
    "many more": (range(1060, 1135), {}, {"circle": 0}),
    "many more in chunks": (range(31000, 31100), {"chunks": True, "drafts": (0, 0, 2)}, {"circle": 2}),
    "many more with swaps": (range(5000, 5100), {"most": 3, "drafts": (0, 0, 2), "swaps": True}, {"swapped": 500}),
}
MARKS = {"more drafts": pytest.mark.long} | {way: pytest.mark.rare for way in WAYS if way.startswith("many more")}


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_the_kernel_does_what_the_reference_does(way):
    seeds, options, happens = WAYS[way]
    seen = hold(seeds, **options)
    assert all(seen[name] > times for name, times in happens.items()), seen


@pytest.mark.parametrize("way", [{}, {"drafts": (0, 1, 3)}, {"swaps": True}, {"chunks": True}])
def test_steps_formed_ahead_do_what_the_reference_does(way):
    assert hold(range(60000, 60015), ahead=True, **way)["preempted"] > 0


@functools.lru_cache
def recurrent_setup():
    """Two layers of gated DeltaNet and one of attention that caches 256 B a token.

    States of 32 x 64 fp32 and 3 x 128 bf16 take 8,960 B a layer: as much as 35 tokens, so a block has 48.
    """
    linear = GdnAttention(key_heads=1, value_heads=1, key_dim=32, value_dim=64)
    full = GqaAttention(q_heads=1, kv_heads=1, head_dim=64)
    layers = tuple(LayerKind(attention, DenseFfn(width=64)) for attention in (linear, linear, full))
    model = replace(load_model("llama_3_1_8b"), hidden=64, layers=layers)
    return setup(model, "h100_sxm", "bf16", "ideal")


def test_prompts_are_taken_up_where_a_state_was_saved():
    seen = hold(range(40), most=1, at=recurrent_setup(), saves=48)
    assert seen["remembered"] > 0


def test_a_cache_from_another_instance_is_found_when_it_has_landed():
    """Instance 1 gets the cache of the first prompt, then two prompts that are alike: one before it has landed."""
    rules = {"admission": AdmissionRule.PROMPT_FITS, "max_sequences": 16, "token_budget": 512}
    specs = [InstanceSpec(table=table(number, "formula"), blocks=200, **rules) for number in range(2)]
    routes = [[Leg(0, 161), Leg(1)], [Leg(1)], [Leg(1)]]
    requests = [(0.0, 160, 20), (0.003, 160, 1), (0.2, 160, 1)]
    link = LinkSpec(bandwidth=3e8, latency_s=0.0, descriptor_s=0.0)  # 70 ms for 21 MB
    ids = [list(range(10))] * 3
    reference = compare(requests, routes, specs, RunOptions(prefix_cache=True, link=link), ids)
    assert [turn.hit for turn in reference.turns if turn.prompt == 160] == [0, 0, 144]
    late = compare(
        requests[:1] + requests[2:], [routes[0], [Leg(1)]], specs, RunOptions(prefix_cache=True, link=link), ids[:2]
    )
    assert [turn.hit for turn in late.turns if turn.prompt == 160] == [0, 144]


def test_a_cache_without_a_token_gives_back_the_block_that_it_reserved_for_the_next():
    """The decode instance computes a prompt of one token again: nothing of it is cached, one block was reserved.

    The block goes back to the front of those that are free, and nothing that is cached behind it is lost.
    """
    rules = {"admission": AdmissionRule.PROMPT_FITS, "watermark": 0.1, "keeps_preempted": True, "max_sequences": 4}
    limits = {"step_limit_s": 1.2e-3, "least_prefill": 16}
    specs = [
        InstanceSpec(table=table(0, "formula"), blocks=53, mode=Mode.PREFILL_FIRST, max_prompts=1, **limits, **rules),
        InstanceSpec(table=table(1, "formula"), blocks=54, mode=Mode.SLO_AWARE, token_budget=64, **limits, **rules),
    ]
    times = (0.196, 0.230, 0.230, 0.245, 0.245)
    lengths = ((19, 128), (25, 171), (374, 310), (29, 222), (1, 1))
    routes = [[Leg(0)], [Leg(0, 26, 0)], [Leg(0, 375), Leg(0)], [Leg(1, 30), Leg(0)], [Leg(1, 2), Leg(0)]]
    requests = [(ODD * time, *both) for time, both in zip(times, lengths, strict=True)]
    options = RunOptions(first_token="decode", link=LinkSpec(bandwidth=3e10, latency_s=1e-3 * ODD, descriptor_s=1e-6))
    reference = compare(requests, routes, specs, options)
    assert any(turn.preemptions > 0 for turn in reference.turns)


def test_what_a_cache_has_overwritten_stays_lost_when_it_gives_a_block_back():
    """The second prompt gives way, and the cache of the third takes a block of it; then both begin in one step."""
    rules = {"mode": Mode.PREFILL_FIRST, "keeps_preempted": True, "max_sequences": 2, "token_budget": 512}
    specs = [
        InstanceSpec(table=table(k, "formula"), blocks=blocks, admission=AdmissionRule.PROMPT_FITS, **rules)
        for k, blocks in enumerate((11, 60))
    ]
    requests = [(ODD * 0.019, 64, 32), (ODD * 0.028, 87, 79), (ODD * 0.047, 48, 59)]
    options = RunOptions(first_token="prefill", link=LinkSpec(bandwidth=3e9, latency_s=0.0, descriptor_s=0.0))
    reference = compare(requests, [[Leg(0)], [Leg(0)], [Leg(1, 49), Leg(0)]], specs, options)
    assert [turn.preemptions for turn in reference.turns] == [0, 1, 0, 1]


def test_what_waits_begins_at_once_where_the_only_prompt_of_a_step_was_preempted():
    """It gave its sequence and its blocks away: a cache that has landed begins to decode, and nobody waits for ever."""
    rules = {"admission": AdmissionRule.FIRST_CHUNK, "watermark": 0.1}
    limits = {"token_budget": 8, "max_sequences": 1, "max_prompts": 1, "least_prefill": 16}
    several = {"mode": Mode.PREFILL_FIRST, "max_sequences": 16}
    specs = [
        InstanceSpec(table=table(0, "formula"), blocks=45, mode=Mode.SLO_AWARE, **limits, **rules),
        InstanceSpec(table=table(1, "both"), blocks=52, max_prompts=3, token_budget=512, **several, **rules),
        InstanceSpec(table=table(2, "chunks"), blocks=58, max_prompts=100, token_budget=64, **several, **rules),
        InstanceSpec(table=table(3, "formula"), blocks=51, token_budget=512, max_sequences=16, max_prompts=3, **rules),
    ]
    times = (7, 9, 9, 9, 28, 47)
    lengths = ((278, 56), (366, 11), (267, 12), (229, 28), (311, 36), (181, 21))
    routes = [
        [Leg(3, 38), Leg(0, 180, 1)],
        [Leg(0, 279), Leg(3, 376, 1)],
        [Leg(1, 268), Leg(0)],
        [Leg(2, 165), Leg(0)],
        [Leg(0, 312, 1)],
        [Leg(3, 182), Leg(0)],
    ]
    requests = [(ODD * 1e-3 * time, *both) for time, both in zip(times, lengths, strict=True)]
    link = LinkSpec(bandwidth=2e8, latency_s=0.0, descriptor_s=1e-6, push="chunk", chunk_tokens=32)
    reference = compare(requests, routes, specs, RunOptions(transfer="push", first_token="decode", link=link))
    assert any(turn.preemptions > 0 for turn in reference.turns)
    assert np.isfinite(reference.records()["finish_s"]).all()


def test_a_prompt_that_preempts_itself_for_ever_breaks_a_circle_as_an_idle_instance_does():
    """Caches that wait for each other hold all but a few blocks, in which the first chunk of a prompt fits, no more.

    It is admitted, computed, and gives its blocks up for want of the next ones, again and again: without the notice of
    a stall the run would not end.
    """
    rules = {"admission": AdmissionRule.FIRST_CHUNK, "token_budget": 64}
    limits = {"max_sequences": 4, "max_prompts": 1, "step_limit_s": 5e-3}
    specs = [
        InstanceSpec(table=table(0, "formula"), blocks=59, mode=Mode.SLO_AWARE, **limits, **rules),
        InstanceSpec(
            table=table(1, "chunks"), blocks=120, mode=Mode.PREFILL_FIRST, max_sequences=1, max_prompts=3, **rules
        ),
    ]
    times = (12, 12, 14, 36, 39, 39, 59, 61)
    lengths = ((379, 50), (260, 5), (384, 47), (319, 4), (400, 48), (358, 59), (309, 11), (259, 38))
    routes = [
        [Leg(0, 380, 0)],
        [Leg(1, 261, 0)],
        [Leg(0, 385, 0)],
        [Leg(0, 320, 1)],
        [Leg(1, 35), Leg(0, 263, 1)],
        [Leg(1)],
        [Leg(1, 310, 0)],
        [Leg(1, 260, 0)],
    ]
    requests = [(ODD * 1e-3 * time, *both) for time, both in zip(times, lengths, strict=True)]
    link = LinkSpec(bandwidth=3e10, latency_s=0.0, descriptor_s=1e-6, push="whole", chunk_tokens=32)
    reference = compare(requests, routes, specs, RunOptions(transfer="push", first_token="prefill", link=link))
    assert reference.circles > 0
    assert np.isfinite(reference.records()["finish_s"]).all()


def test_without_the_compiler_runs_are_the_same_to_the_last_bit():
    """Five random runs, two short of memory, of one rank and several, and one of every policy."""
    script = "import test_reference; print(test_reference.digest_of_runs())"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest_of_runs()


def digest_of_runs():
    """Of the records of requests and instances."""
    cases = [case(seed, 4, (0, 1, 3) if seed % 2 else (0,)) for seed in range(50_002, 50_006)]
    cases.append(case(50_006, 4, (0,), ahead=True))
    found = [by_kernel(*each, small_setup())[0] for each in cases]
    requests = [(0.05 * each, 20 + 90 * (each % 7), 3 + each % 9) for each in range(24)]
    parts = deployment(prefill=2, decode=2, colocated=2, pairs=2)
    found += [served(requests, policy_named(name), parts, table=SIMPLE) for name in sorted(policies())]
    columns = [asdict(part) for each in found for part in (each.requests, each.instances)]
    there = [one.tobytes() for each in columns for one in each.values() if one is not None]
    return hashlib.sha256(b"".join(there)).hexdigest()
