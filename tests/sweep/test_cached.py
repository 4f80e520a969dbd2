"""Cached shares as an axis of a sweep's traffic."""

from disagg_sim.sweep.cases import cases_of
from disagg_sim.sweep.spec import load_sweep

HEAD = "name: reuse\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\n"


def load(tmp_path, traffic):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{HEAD}traffic: [{traffic}]\n", encoding="utf-8")
    return load_sweep(str(path))


def test_a_case_for_every_share(tmp_path):
    spec = load(tmp_path, "{isl: 16384, osl: 256, cached: [0, 0.5, {share: 0.96, in_decode: 0.5}]}")
    cases = cases_of(spec)
    assert [str(case.traffic) for case in cases] == [
        "16384/256",
        "16384/256/cached0.5",
        "16384/256/cached0.96_decode0.5",
    ]
    assert [case.lengths.mean_new for case in cases] == [16384.0, 8192.0, 656.0]
    assert cases[1].name.endswith("-16384-256-cached0.5")


def test_a_distribution_keeps_its_share_in_its_equivalent(tmp_path):
    spec = load(tmp_path, "{name: log_normal_4096_512, cached: 0.9}")
    assert [str(each) for each in spec.traffic] == ["4096/512/cached0.9", "log_normal_4096_512/cached0.9"]
    assert cases_of(spec)[1].lengths.cached is not None
