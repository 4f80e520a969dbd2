"""The language of ``--exclude``: what it means, what it refuses, and that it runs nothing."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_csv import GEMM, write

from lab.calibration.kernels.conditions import LONGEST, ConditionError, parse_condition
from lab.calibration.kernels.tables import TableError, read_exclusions

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
        ("__import__('os')", "\"__import__('os')\" stands where a comparison is allowed"),
        ("mm == 1", "no column 'mm', did you mean 'm'?; columns: dtype, m, n, system"),
        ("m == '1'", "\"'1'\" stands where a number is allowed"),
        ("dtype == 8", "'8' stands where a text in quotation marks is allowed"),
        ("dtype < 'fp8'", "column 'dtype' holds words; allowed: ==, != and in"),
        ("dtype*m == 1", "column 'dtype' holds words, and only numbers can be multiplied"),
        ("m == n", "'n' stands where a number is allowed"),
        ("m == 1 or m == 2", "'1 or m == 2' stands where a number is allowed"),
        ("m == True", "'True' stands where a number is allowed"),
        ("m in []", "'[]' stands where a list of such: a number is allowed"),
        ("1 == m", "no column '1'"),
        ("", "'' stands where a comparison is allowed"),
        ("m == 1" + "0" * 400, "stands where a number is allowed"),
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


def test_no_condition_of_a_file_runs_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    condition = '"@pd.io.common.os.system(""touch ran"") == 0 or m > 0"'
    path = write(tmp_path / "mask.csv", "file,system,framework,condition,reason", f"gemm.csv,*,*,{condition},odd")
    with pytest.raises(TableError) as refusal:
        read_exclusions(path)
    assert not (tmp_path / "ran").exists()
    said = str(refusal.value)
    assert said.startswith("mask.csv: line 2: condition '@pd.io.common.os.system(")
    assert "a condition is made of columns compared by" in said
    assert len(said.splitlines()) == 1


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    path = write(tmp_path / "mask.csv", "file,system,framework,condition,condition", "gemm.csv,*,*,m > 0,odd")
    with pytest.raises(TableError, match="column 'condition' occurs twice in the header"):
        read_exclusions(path)
    from lab.calibration.kernels.tables import read_tables

    path = write(tmp_path / "twice.csv", GEMM.replace(",n,", ",m,"), "h100_sxm,trtllm,1,k,bfloat16,128,4096,4096,20.5")
    with pytest.raises(TableError, match=r"twice.csv: column 'm' occurs twice in the header"):
        read_tables(path)
