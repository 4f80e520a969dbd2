"""``explain`` of a co-located design says what holding prompts back costs and gains."""

import json

import pytest

import disagg_sim as ds
from disagg_sim.cli.main import run

R1 = ["explain", "--model", "deepseek_r1", "--system", "h200_sxm", "--precision", "fp8", "--dp", "8", "--ep", "8"]
R1 += ["--batch", "64", "--isl", "8192", "--osl", "1024"]


def test_a_design_by_hand_tells_both_sides_of_its_wait(capsys):
    """43.6 ms in place of 83.1: the numbers of the search with and without a wait."""
    assert run([*R1, "--phase", "colocated", "--hold-prompts", "tuned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["held_prompts"]
    at, wide = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8)
    both = [
        ds.colocated(
            at, wide, ds.lengths(8192, 1024), ftl_limit=1e9, options=ds.Colocation(batch=(64,), hold_steps=steps)
        )
        for steps in ((found["steps"],), ())
    ]
    assert [found["ttl"], found["ttl_without"]] == pytest.approx([float(rows["ttl_s"].iloc[0]) for rows in both])
    slots = [float(rows["ftl_with_slot_wait_s"].iloc[0]) for rows in both]
    assert [found["ftl"], found["ftl_without"]] == pytest.approx(slots)
    assert found["ttl"] < 0.6 * found["ttl_without"]
    assert found["ftl"] > found["ftl_without"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--phase", "piggyback"], "--hold-prompts is of --phase colocated; piggyback has chunks in decode steps"),
        (["--phase", "decode"], "--hold-prompts is of --phase colocated; decode is of one phase"),
        (["--phase", "colocated", "--dp", "1", "--tp", "8"], "--hold-prompts 7: no gain for this design"),
    ],
)
def test_waits_that_a_design_has_not_are_one_clear_line(more, said, capsys):
    assert run([*R1, *more, "--hold-prompts", "7"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
