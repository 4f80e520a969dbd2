"""Reading kernel tables: forms, faults in one line each, the mask and its language, a split that never moves."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_csv import GEMM, write

from lab.calibration.files import HELD_OUT_SHARE
from lab.calibration.kernels.conditions import LONGEST, ConditionError, parse_condition
from lab.calibration.kernels.tables import FORMS, TableError, form_of, held_out, read_exclusions, read_tables

GOOD = "h100_sxm,trtllm,1,k,bfloat16,128,4096,4096,20.5"


def read(path, **options):
    (table,) = read_tables(path, **options)
    return table


def test_every_form_is_told_by_its_columns():
    for name, form in FORMS.items():
        assert form_of(form.columns) is form, name
        assert set(form.key) <= {*form.words, *form.sizes}


def test_a_row_keeps_its_line_and_gets_si_units(tmp_path):
    table = read(write(tmp_path / "a.csv", GEMM, GOOD, GOOD.replace("h100_sxm", "gb200")))
    assert table.form.name == "gemm"
    assert table.rows["row"].tolist() == [2, 3]
    assert table.rows["system"].tolist() == ["h100_sxm", "gb200_nvl72"]
    assert table.rows["latency"].tolist() == pytest.approx([20.5e-6] * 2)


@pytest.mark.parametrize(
    ("header", "line", "said"),
    [
        (GEMM.replace("latency_us", "latency"), GOOD, "unknown column 'latency', did you mean 'latency_us'?"),
        (GEMM, GOOD.replace("20.5", "nan"), "line 2: latency_us 'nan' is not a time above 0"),
        (GEMM, GOOD.replace("h100_sxm", "h100_smx"), "line 2: system 'h100_smx' is unknown, did you mean 'h100_sxm'?"),
        ("a,b,c", "1,2,3", "columns of no known table; known tables: gemm, "),
    ],
)
def test_faults_are_told_in_one_line(tmp_path, header, line, said):
    with pytest.raises(TableError) as refusal:
        read(write(tmp_path / "a.csv", header, line))
    assert len([text for text in str(refusal.value).splitlines() if said in text]) == 1
    assert all("a.csv: " in text for text in str(refusal.value).splitlines())


def test_a_lenient_reader_keeps_bad_rows_with_their_fault(tmp_path):
    table = read(write(tmp_path / "a.csv", GEMM, GOOD, GOOD.replace("20.5", "0")), strict=False)
    assert table.rows["fault"].tolist() == ["", "latency_us '0' is not a time above 0"]
    assert table.rows["latency"].isna().tolist() == [False, True]


def test_the_mask_marks_rows_and_a_broken_condition_is_named(tmp_path):
    mask = "file,system,framework,condition,reason\ngemm.csv,*,*,\"m == 128 and system == 'h100_sxm'\",odd\n"
    (tmp_path / "mask.csv").write_text(mask)
    path = write(tmp_path / "a.csv", GEMM, GOOD, GOOD.replace(",128,", ",256,"))
    assert read(path, exclusions=read_exclusions(tmp_path / "mask.csv")).rows["masked"].tolist() == ["odd", ""]
    (tmp_path / "mask.csv").write_text(mask.replace("m == 128", "batch == 128"))
    with pytest.raises(TableError, match=r"mask.csv: line 2: condition .* of gemm: no column 'batch'"):
        read(path, exclusions=read_exclusions(tmp_path / "mask.csv"))
    (tmp_path / "mask.csv").write_text(mask.replace("gemm.csv", "gem.csv"))
    with pytest.raises(TableError, match=r"mask.csv: line 2: no table 'gem', did you mean 'gemm'\?"):
        read_exclusions(tmp_path / "mask.csv")


def test_known_sides_and_the_share_held_out():
    """The split is a promise to everyone who compares errors: these sides never change."""
    many = pd.DataFrame([(n, k) for n in range(1, 61) for k in range(1, 61)], columns=["n", "k"])
    sides = held_out(FORMS["gemm"], many)
    assert sides.mean() == pytest.approx(HELD_OUT_SHARE, abs=0.02)
    some = pd.DataFrame({"n": [4096, 7168, 1024, 2048, 512], "k": [4096, 2048, 8192, 7168, 512]})
    assert held_out(FORMS["gemm"], some).tolist() == [False, False, False, True, False]


ROWS = pd.DataFrame(
    {"system": ["a100", "h100", "h100"], "dtype": ["fp8", "fp8", "bf16"], "m": [1, 64, 4096], "n": [2, 2, 2]}
)


def marks(text: str, rows: pd.DataFrame = ROWS) -> list[bool]:
    return parse_condition(text, words=("system", "dtype"), numbers=("m", "n"))(rows).tolist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("m > 1", [False, True, True]),
        ("system == 'h100' and dtype == \"fp8\"", [False, True, False]),
        ("dtype in ['bf16', 'nvfp4']", [False, False, True]),
        ("dtype not in ['bf16', 'nvfp4']", [True, True, False]),
        ("m not in [1, 64]", [False, False, True]),
        ("m*n >= 1.28e2", [False, True, True]),
        ("m * n<=128 and m != 1", [False, True, False]),
    ],
)
def test_a_condition_means_what_it_says(text, rows):
    assert marks(text) == rows


def test_a_product_of_large_sizes_does_not_overflow():
    """3e9 * 6e9 is beyond 64 bits, where whole numbers would wrap below zero."""
    assert marks("m*n > 1e19", pd.DataFrame({"m": [3 * 10**9, 10**9], "n": [6 * 10**9, 6 * 10**9]})) == [True, False]


@pytest.mark.filterwarnings("error")
def test_a_product_beyond_all_floats_is_infinite():
    assert marks("m" + "*m" * 99 + " > 1e308", pd.DataFrame({"m": [3 * 10**9, 1], "n": [1, 1]})) == [True, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('@pd.io.common.os.system("touch x") == 0', "no column '@pd.io.common.os.system"),
        ("m == '1'", "\"'1'\" stands where a number is allowed"),
        ("dtype < 'fp8'", "column 'dtype' holds words; allowed: ==, != and in"),
        ("m == 1 and " * LONGEST + "m == 1", f"allowed: up to {LONGEST}"),
    ],
)
def test_what_is_no_condition_is_told_where(text, said):
    with pytest.raises(ConditionError) as refusal:
        marks(text)
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@given(st.text(alphabet="mn ()[]'\"=<>*,.@`_1e9+-andorti\n\t\\#", max_size=60))
def test_any_text_is_a_condition_or_refused(text):
    """Nothing but ``ConditionError`` leaves the parser, and a condition gives a mark for each row."""
    try:
        found = marks(text)
    except ConditionError:
        return
    assert len(found) == len(ROWS)
