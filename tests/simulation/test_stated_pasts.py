"""Pasts as they are stated: which share, in which tier, held by decode; and drafts beside them, as the physics says."""

import math
from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import BetaShare, ConstantShare, EmpiricalShare, Reuse
from disagg_sim.physics.cache_tiers import load_time
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.workload.synthetic import drawn_pasts

SLO = ds.Slo(ttft=100.0, tpot=10.0)
LLAMA, ONE = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), Sharding()


def stated(share=0.5, **more):
    return Reuse(share=ConstantShare(share=share), **more)


def served(at, prefill, decode, mapping, batch=None):
    parts = {
        "prefill": (ds.Replicas(mapping=replace(mapping, draft_tokens=0), instances=prefill, batch=1),),
        "decode": (ds.Replicas(mapping=mapping, instances=decode, batch=batch),),
    }
    return ds.ServedDeployment(name="pools", gpus=(prefill + decode) * int(mapping.gpus), setup=at, **parts)


def trace(requests, isl, osl, gap=0.0):
    ends = {"input_tokens": np.full(requests, isl), "output_tokens": np.full(requests, osl)}
    return ds.Trace(arrival=gap * np.arange(requests), **ends)


def alone(reuse, tiers=(), requests=1, isl=8192):
    """Requests that come one by one, on an instance for each phase."""
    options = RunOptions(reuse=reuse, tiers=tiers)
    many = trace(requests, isl, 20, gap=10.0)
    return ds.simulate(served(LLAMA, 1, 1, ONE), many, "disaggregated", slo=SLO, options=options).records


class TestPasts:
    def test_a_tier_that_holds_nothing_need_not_be_there(self):
        """A share of 0 in SSD asks for no SSD."""
        found, plain = (
            alone(stated(tiers=tiers)).requests.prefill_end_s for tiers in ((("hbm", 1.0), ("ssd", 0.0)), ())
        )
        np.testing.assert_array_equal(found, plain)

    def test_shares_that_are_none_are_refused(self):
        with pytest.raises(InputError, match="in_decode is 3; allowed"):
            alone(stated(in_decode=3.0))

    def test_a_past_in_a_tier_costs_its_load(self):
        """4,096 tokens of 65,536 B at the tier's bandwidth, before a pass that is the same."""
        first = {
            name: alone(stated(tiers=((name, 1.0),)), () if name == "hbm" else (name,)).requests.prefill_end_s[0]
            for name in ("hbm", "dram")
        }
        load = float(load_time(LLAMA, ONE, batch=1, past=4096.0, tier=LLAMA.system.tier("dram")))
        assert first["dram"] - first["hbm"] == pytest.approx(load, rel=1e-6)

    def test_what_decode_holds_is_not_handed_over(self):
        """Half of the cached half: three quarters of the prompt move, and no more descriptors."""
        whole, part = (alone(stated(in_decode=share)).requests for share in (0.0, 0.5))
        assert part.transferred_tokens[0] / whole.transferred_tokens[0] == 0.75
        assert part.transfer_s[0] / whole.transfer_s[0] == pytest.approx(0.75, rel=0.02)
        assert part.prefill_end_s[0] == whole.prefill_end_s[0]

    def test_a_part_that_the_second_instance_holds_already_moves_nothing(self):
        """DynaServe cuts each request behind a fifth, and the second instance holds the first half of the prompt."""
        parts = ds.ServedDeployment(name="pair", gpus=2, setup=LLAMA, pairs=(ds.Replicas(mapping=ONE, instances=2),))
        options = RunOptions(reuse=stated(in_decode=1.0))
        policy = policy_named("dynaserve", ratio=0.2)
        found = ds.simulate(parts, trace(3, 8192, 20, gap=1.0), policy, slo=SLO, options=options).records.requests
        assert found.transferred_tokens.tolist() == [0, 0, 0]
        assert np.isfinite(found.finish_s).all()

    def test_pasts_lie_in_tiers_by_their_shares(self):
        """Of 400 prompts half lie in DRAM, three in ten in SSD: within three standard deviations of a binomial."""
        reuse = stated(share=0.9, tiers=(("dram", 0.5), ("hbm", 0.2), ("ssd", 0.3)))
        found = alone(reuse, ("dram", "ssd"), requests=400, isl=65_536)
        loads = found.requests.loads
        dram, ssd = (np.asarray(loads.tokens) > 0).sum(axis=0).tolist()
        for count, share in ((dram, 0.5), (ssd, 0.3)):
            assert abs(count / 400 - share) < 3 * math.sqrt(share * (1 - share) / 400)

    @pytest.mark.parametrize(
        "law", [BetaShare(alpha=2.0, beta=3.0), EmpiricalShare(probabilities=(0.0, 0.5, 1.0), shares=(0.1, 0.4, 0.7))]
    )
    def test_shares_that_follow_a_distribution_are_drawn_with_its_mean(self, law):
        pasts = drawn_pasts(np.full(20_000, 16_000.0), Reuse(share=law, block_tokens=1), np.random.default_rng(3))
        assert pasts.mean() / 16_000 == pytest.approx(0.4, abs=0.005)

    def test_a_migrated_prompt_keeps_its_past(self):
        """Its second instance computes the rest alone, as the first did."""
        two, plain = served(LLAMA, 2, 1, ONE), RunOptions(reuse=stated(share=0.9))
        one = trace(1, 65_536, 2)
        alone = ds.simulate(two, one, "disaggregated", slo=SLO, options=plain).records.requests
        ends = []
        for when in (0.1, 0.2):
            event = FailureEvent(at_s=when, kind="instance", number=int(alone.prefill_instance[0]))
            failures = Failures(events=(event,), restart_s=math.inf, migration_limit=1)
            options = replace(plain, failures=failures)
            found = ds.simulate(two, one, "disaggregated", slo=SLO, options=options).records.requests
            ends.append(float(found.prefill_end_s[0]))
        assert ends[1] - ends[0] == pytest.approx(0.1)
        assert alone.prefill_end_s[0] < ends[0] < alone.prefill_end_s[0] + 0.1  # the host has taken it in before

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"prefix_cache": True}, "reuse states what caches find; allowed: without prefix_cache"),
            ({"tiers": ("dram",)}, "pasts lie in ssd, and the tiers of the run are dram"),
        ],
    )
    def test_what_does_not_go_together_is_said(self, options, said):
        with pytest.raises(InputError, match=said):
            RunOptions(reuse=stated(tiers=(("ssd", 1.0),)), **options)
