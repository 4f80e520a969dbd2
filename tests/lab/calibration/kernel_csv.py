"""Small kernel tables for tests: written by the rules of the forms, from laws with known numbers."""

from pathlib import Path

import pandas as pd

GEMM = "system,framework,version,kernel_source,dtype,m,n,k,latency_us"
QUANTIZE = "system,framework,version,kernel_source,op,dtype,m,k,latency_us"


def write(path: Path, header: str, *lines: str) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def write_lists(path: Path, header: str, rows: list[list[object]]) -> Path:
    pd.DataFrame(rows, columns=header.split(",")).to_csv(path, index=False)
    return path


def quantize_rows(t0: float, share: float, *, bandwidth: float, system: str = "h100_sxm") -> list[str]:
    """Rows of a copy of 2 bytes in and 1 out an element: ``t0`` [us] + bytes/(share*bandwidth)."""
    return [
        f"{system},vllm,1,kernel,scale_matrix,fp8,{m},{k},{t0 + 3 * m * k / (share * bandwidth) * 1e6:.6g}"
        for m in (1, 64, 512, 4096, 32768)
        for k in (512, 1024, 4096, 8192)
    ]


def frame(columns: dict[str, object]) -> pd.DataFrame:
    """A table as a fitter gets it: numbers in columns, one library unless told."""
    table = pd.DataFrame(columns)
    for name, word in (("framework", "vllm"), ("version", "1"), ("kernel_source", "kernel"), ("dtype", "bfloat16")):
        if name not in table:
            table[name] = word
    return table
