"""From tables to an efficiency file: known numbers come back, the same data give the same bytes, bad data nothing."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_csv import GEMM, QUANTIZE, quantize_rows, write

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.units import US
from lab.calibration.kernels.efficiency_yaml import efficiency_text, find_assumptions, write_efficiency
from lab.calibration.kernels.fit import Calibration, calibrate_kernels
from lab.calibration.kernels.judge import judge_kernels, summarise

H100 = load_system("h100_sxm")


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "q.csv", QUANTIZE, *quantize_rows(2.5, 0.75, bandwidth=H100.hbm_bandwidth))


def test_a_known_law_comes_back(table):
    done = calibrate_kernels([table], "h100_sxm")
    (fit,) = done.fits["elementwise"]
    assert fit.t0 == pytest.approx(2.5 * US, rel=0.01)
    assert fit.e_memory == pytest.approx(0.75, rel=0.01)
    assert (fit.engine, fit.version, fit.parameters) == ("vllm", "1", 2)
    assert fit.points + fit.held_out_points == 20
    assert fit.held_out_points == done.files[0].held_out > 0
    assert max(fit.held_out_p90_error, fit.sigma_log) < 0.01
    assert ("m", 1.0, 32768.0) in fit.valid


def test_rows_that_a_fit_never_saw_do_not_change_it(table):
    """Held-out rows three times slower: the same numbers, and their error is told."""
    rows = [line.split(",") for line in table.read_text().splitlines()]
    before = calibrate_kernels([table], "h100_sxm")
    held = before.residuals["held_out"].tolist()
    slow = [
        ",".join([*line[:-1], str(float(line[-1]) * 3)]) if out else ",".join(line)
        for line, out in zip(rows[1:], held, strict=True)
    ]
    (first,), (other,) = (
        done.fits["elementwise"] for done in (before, calibrate_kernels([write(table, QUANTIZE, *slow)], "h100_sxm"))
    )
    assert (other.t0, other.e_memory) == (first.t0, first.e_memory)
    assert other.held_out_median_error == pytest.approx(2 / 3, abs=0.01)
    assert other.sigma_log == pytest.approx(np.log(3) / 1.2816, rel=0.02)


def text_of(path, **options):
    done = calibrate_kernels([path], "h100_sxm", **options)
    return efficiency_text(done, data="toy", date="2026-01-01", assumptions=find_assumptions("h100_sxm"))


def test_the_same_data_give_the_same_bytes_and_load(table, tmp_path):
    text = text_of(table)
    assert text == text_of(table)
    write_efficiency(tmp_path / "h100_sxm.yaml", text)
    spec = load_efficiency(tmp_path / "h100_sxm.yaml")
    done = calibrate_kernels([table], "h100_sxm")
    (read,), (made,) = spec.elementwise, done.fits["elementwise"]
    assert read.t0 == pytest.approx(made.t0, rel=1e-12)  # written in us
    assert replace(read, t0=made.t0) == made
    assert spec.files == done.files
    assert (spec.data, spec.date, spec.engine_order[0]) == ("toy", "2026-01-01", "trtllm")


def test_what_is_assumed_stands_beside_what_is_fitted():
    nothing = Calibration(load_system("gb200_nvl72"), {}, (), None)
    text = efficiency_text(nothing, data="none", date="never", assumptions=find_assumptions("gb200_nvl72"))
    assert "# assumed, not measured\n  - {engine: assumed, " in text
    assert "inherits_rows:" in text


LIMIT = "line 2: latency_us 20 is above the physical peak of h100_sxm, which allows 277"
BAD = "h100_sxm,trtllm,1,k,bfloat16,{m},4096,4096,{t}"


def test_bad_data_are_refused_in_one_line_and_nothing_is_written(tmp_path, capsys):
    path, out = write(tmp_path / "a.csv", GEMM, BAD.format(m=8192, t=20)), tmp_path / "out" / "h100_sxm.yaml"
    assert run(["calibrate", "kernels", str(path), "--system", "h100_sxm", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert LIMIT in error
    assert len(error.splitlines()) == 1
    assert not out.parent.exists()


def test_a_masked_row_may_beat_physics(tmp_path):
    """8192 x 4096 x 4096 in 20 us is 14 times the peak: refused, unless the mask knows it."""
    (tmp_path / "mask.csv").write_text("file,system,framework,condition,reason\ngemm.csv,*,*,m == 8192,impossible\n")
    lines = [BAD.format(m=m, t=f"{2 * m * 4096**2 / 6e14 * 1e6 + 15:.5g}") for m in (1, 64, 512, 1024, 2048, 4096)]
    path = write(tmp_path / "a.csv", GEMM, *lines, BAD.format(m=8192, t=20))
    done = calibrate_kernels([path], "h100_sxm", exclude=tmp_path / "mask.csv", split=False)
    assert done.files[0].dropped == {"impossible": 1}
    assert done.files[0].fitted == 6


def test_a_table_of_held_out_shapes_alone_says_how_it_can_be_fitted(tmp_path, table):
    held = calibrate_kernels([table], "h100_sxm").residuals["held_out"]
    lines = [line for line, out in zip(table.read_text().splitlines()[1:], held, strict=True) if out]
    few = write(tmp_path / "few.csv", QUANTIZE, *lines)
    with pytest.raises(InputError, match=rf"few.csv; {len(lines)} rows are of shapes that are held out, --no-split"):
        calibrate_kernels([few], "h100_sxm")
    whole = calibrate_kernels([few], "h100_sxm", split=False)
    assert (whole.files[0].fitted, whole.fits["elementwise"][0].held_out_points) == (len(lines), 0)


def test_a_row_is_told_by_its_name_where_the_table_gives_one(tmp_path, table):
    lines = table.read_text().splitlines()[1:4]
    named = [f"{name},{line}" for name, line in zip(("third", "1st", "odd, 2"), lines, strict=True)]
    named[2] = named[2].replace("odd, 2", '"odd, 2"')
    verdicts = judge_kernels([write(tmp_path / "named.csv", f"row_id,{QUANTIZE}", *named), table])
    assert verdicts[verdicts["part"] == "new"]["row"].tolist()[:3] == ["third", "1st", "odd, 2"]
    assert verdicts["row"].tolist()[3:] == list(range(2, 22))


def test_fits_of_all_rows_have_seen_all_rows(tmp_path, table):
    write_efficiency(tmp_path / "h100_sxm.yaml", text_of(table, split=False))
    assert set(judge_kernels([table], efficiency=tmp_path)["part"]) == {"fitted"}


def test_validation_keeps_every_row_and_tells_why_one_is_not_evaluated(tmp_path, table):
    write_efficiency(tmp_path / "eff" / "h100_sxm.yaml", text_of(table))
    lines = table.read_text().splitlines()[1:]
    first = lines[0]
    odd = [first.replace("scale_matrix", "melt"), first.rpartition(",")[0] + ",0", first.replace("h100", "h200")]
    odd.append("h100_sxm,vllm,1,kernel,scale_matrix,fp8,65536,8192,900")  # outside the fitted sizes
    verdicts = judge_kernels(
        [table, write(tmp_path / "odd.csv", QUANTIZE, lines[1], *odd)], efficiency=tmp_path / "eff"
    )
    assert len(verdicts) == 25
    assert verdicts["evaluated"].sum() == 22
    inside = verdicts[verdicts["evaluated"] & verdicts["in_range"]]
    assert len(inside) == 21
    assert (inside["relative_error"].abs() < 0.02).all()
    reasons = verdicts.loc[~verdicts["evaluated"], "reason"].tolist()
    zero = "latency_us '0' is not a time above 0"
    assert reasons == ["no fit of vllm kernel melt fp8", zero, "no fits of h200_sxm"]
    parts = verdicts.groupby("file", sort=False)["part"].agg(set).tolist()
    assert [{"fitted", "held out"}, {"new"}] in (parts, parts[::-1])
    summary = summarise(verdicts)
    assert summary[(summary["system"] == "all") & (summary["size"] == "all")]["rows"].sum() == 22


def test_validate_writes_tables(tmp_path, table, capsys):
    write_efficiency(tmp_path / "eff" / "h100_sxm.yaml", text_of(table))
    out = tmp_path / "out"
    code = run(["validate", "kernels", str(table), "--out", str(out), "--efficiency", str(tmp_path / "eff")])
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["rows.csv", "summary.csv"]
    assert "20 of 20 rows evaluated, 0 masked" in capsys.readouterr().out
