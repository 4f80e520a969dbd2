"""Study of DynaServe: its measures by hand, its workloads, and the whole command on small samples."""

from types import SimpleNamespace

import numpy as np
import pytest
from reproducing import reproduced

from lab.studies.dynaserve import claims_equal as dynaserve_equal
from lab.studies.dynaserve import experiments as dynaserve
from lab.studies.dynaserve import setup as dynaserve_setup
from lab.studies.dynaserve.claims_equal import y14_more_cache
from lab.studies.dynaserve.setup import MIX, WORKLOADS, DynaServeBench, workloads


def test_served_by_hand():
    """From 4 s to 10 s: all of a request of 6 to 8 s, a quarter of one of 2 to 10 s is before, half of 7 to 13 s."""
    records = SimpleNamespace(
        arrival_s=np.array([1.0, 6.0, 10.0]),
        first_token_s=np.array([2.0, 6.0, 7.0]),
        finish_s=np.array([10.0, 8.0, 13.0]),
    )
    found = dynaserve_setup._served(SimpleNamespace(requests=records))
    assert found * 6.0 == pytest.approx([0.75, 1.0, 0.5])


def test_workloads_are_poisson_with_the_lengths_of_their_sources():
    found = workloads(None, quick=False)
    assert set(found) == {*WORKLOADS, dynaserve_setup.ARXIV, MIX}
    means = {"code": (2048, 28), "conversation": (1155, 211), "reasoning": (219, 1467), "arxiv": (2588, 291)}
    for name, mean in means.items():
        trace, stand_in = found[name].trace, found[name].stand_in
        gaps = np.diff(trace.arrival)
        assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)
        assert trace.input_tokens.mean() == pytest.approx(mean[0], rel=0.1)
        assert trace.output_tokens.mean() == pytest.approx(mean[1], rel=0.15)
        assert stand_in
    mixed = found[MIX].trace
    assert np.array_equal(mixed.input_tokens[::2], found["code"].trace.input_tokens[::2])
    assert np.array_equal(mixed.output_tokens[1::2], found["burstgpt"].trace.output_tokens[1::2])


def test_servers_hold_what_the_profile_assumes():
    """Start-up logs are known of vLLM 0.19, the paper's is 0.7.2."""
    at = DynaServeBench(workloads=workloads(None, quick=True)).setting("qwen2_5_14b")
    assert (at.engine, at.server_memory) == ("vllm", None)


def test_a_split_in_the_decode_moves_so_many_times_the_cache():
    finding = y14_more_cache(DynaServeBench(workloads=workloads(None, quick=True)))
    assert finding.holds
    assert finding.value.startswith("ratios 2, 3, 5 ")


@pytest.mark.rare
def test_the_command_writes_every_claim_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dynaserve_setup, "QUICK_REQUESTS", 30)
    monkeypatch.setattr(dynaserve_equal, "QUICK", 30)
    monkeypatch.setattr(dynaserve_equal, "COUNTED", 30)
    monkeypatch.setattr(dynaserve_equal, "PERCENTS", (50, 60, 70, 90))
    monkeypatch.setattr(dynaserve, "OTHERS", ())

    def once(met, *, start):
        met(start)
        return start, np.inf

    monkeypatch.setattr(dynaserve_setup, "bracket", once)
    claims = reproduced("dynaserve", tmp_path)
    assert claims.loc["Y14", "verdict"] == "by construction"
    both = ["Y5", "Y6", "Y7", "Y8", "Y9", "Y11", "Y12", "Y13", "Y15", "Y18", "Y19"]
    assert claims.index[claims["without"].notna()].tolist() == both
    assert claims["note"].str.startswith("stand-in: ").sum() >= 6
    assert "of 20 claims hold" in capsys.readouterr().out
