"""The study of DOPD: what follows from equations is exact, its bench by hand, the command on short samples."""

from types import SimpleNamespace

import numpy as np
import pytest
from reproducing import reproduced

from lab.studies.dopd import TEXT
from lab.studies.dopd import claims as dopd_claims
from lab.studies.dopd.setup import OPT, OPT_POSITIONS, SHAPES, DopdBench, _second_pass, steady_rate


@pytest.fixture(scope="module")
def bench():
    return DopdBench(None, quick=True)


def test_table_one_at_its_own_points():
    """Columns of the table: 193 ms for 1,200 tokens; 35 and 57 ms a step of 104 and 248 sequences there."""
    assert dopd_claims.table_one_prefill(1200) == pytest.approx(0.193, abs=0.003)
    assert dopd_claims.table_one_step(104, 1200) == pytest.approx(0.035, abs=0.003)
    assert dopd_claims.table_one_step(248, 1200) == pytest.approx(0.057, abs=0.003)


def test_concurrencies_by_hand(bench):
    """(2 * 0.9 * 85.52 GB - 72.65 GB)/(1,075 * 327,680 B), and the same over 3,150 tokens."""
    spare = 2 * 0.9 * 79.65 * 2**30 - 72.65e9
    found = [each.requests for each in dopd_claims.concurrencies(bench)]
    assert found == pytest.approx([spare / (1075 * 327_680), spare / (3150 * 327_680)], rel=1e-3)


def test_ratios_of_table_one_by_hand(bench):
    """230.76 * 166 ms/(54.0 ms * 150) at the first shape: t_d = 18 + 27.88 + 7.86 ms."""
    assert dopd_claims.ratios(bench, own=False)[0] == pytest.approx(230.76 * 0.166 / (0.053740 * 150), rel=1e-3)


@pytest.mark.parametrize("name", ["D1", "D2", "D3", "D6", "D7", "D8", "D11", "D16"])
def test_what_follows_from_equations_holds(bench, name):
    finding = next(claim for claim in TEXT.claims if claim.id == name)(bench)
    assert finding.holds, finding


def test_the_second_pass_by_hand():
    """Requests 2 and 3 of four: TTFT 1 and 3 s, gaps of 0.05 and 0.1 s; both ends inside [4, 8] but one."""
    requests = SimpleNamespace(
        arrival_s=np.array([0.0, 0.0, 4.0, 8.0]),
        first_token_s=np.array([1.0, 1.0, 5.0, 11.0]),
        finish_s=np.array([4.0, 5.0, 6.0, 12.0]),
        output_tokens=np.array([2, 2, 21, 11]),
    )
    found = _second_pass(SimpleNamespace(requests=requests), 2)
    assert found.attainment == 0.5
    assert found.goodput == pytest.approx(0.5 * 2 / 4)
    assert found.ttft_p90 == pytest.approx(2.8)
    assert found.tpot_p90 == pytest.approx(0.095)


def test_the_steady_rate_is_that_of_the_middle():
    finish = np.concatenate([np.zeros(2), np.arange(1.0, 5.0), [100.0, 200.0]])
    assert steady_rate(SimpleNamespace(requests=SimpleNamespace(finish_s=finish))) == pytest.approx(4 / 99.0)


def test_stand_ins_are_named_and_opt_takes_what_it_has_positions_for(bench):
    assert bench.stand_in.startswith("stand-in: ")
    assert bench.azure.input_tokens.mean() == pytest.approx(1024, rel=0.2)
    opt = bench._suited(OPT)
    assert 0 < len(opt) < len(bench.azure)
    assert (opt.input_tokens + opt.output_tokens).max() <= OPT_POSITIONS


@pytest.mark.rare
def test_the_command_writes_every_claim_and_table(tmp_path, capsys):
    claims = reproduced("dopd", tmp_path)
    assert (claims.loc[["D1", "D2", "D3", "D6", "D11"], "verdict"] == "holds").all()
    assert (claims.loc[["D7", "D8", "D16"], "verdict"] == "by construction").all()
    assert claims.index[claims["without"].notna()].tolist() == ["D4", "D5", "D9", "D10", "D14", "D15"]
    assert claims.loc[["D12", "D13", "D14"], "note"].str.startswith("stand-in: ").all()
    assert "of 15 claims hold" in capsys.readouterr().out


def test_a_decode_instance_takes_what_it_holds_to_the_end(bench):
    assert bench.full_batch * sum(SHAPES[0]) <= 248_000 < (bench.full_batch + 1) * sum(SHAPES[0]) + 500
