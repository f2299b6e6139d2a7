"""What the table of a prompt's kernels says of a profile."""

from __future__ import annotations

from typing import Any

from benchmarks.step.prompts import kernel_table


def event(kind: str, name: str, start: float, took: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": took}


def test_kernels_are_summed_and_gaps_told_with_what_the_host_did() -> None:
    table = kernel_table(
        [
            event("cuda_runtime", "cudaLaunchKernel", 90, 5),
            event("kernel", "product", 100, 40),
            event("kernel", "norm", 141, 10),
            event("cuda_runtime", "cudaEventSynchronize", 130, 60),
            event("kernel", "product", 251, 30),
            event("cpu_op", "aten::mm", 0, 500),
        ]
    )
    assert "span 181 us, busy 80, gaps 101, first call 10 before the first kernel" in table
    product, norm = (line for line in table.splitlines() if "gaps before" in line)
    assert product.split()[:6] == ["70", "us", "2", "x", "35.00", "(gaps"]
    assert "100)  product" in product
    assert "1)  norm" in norm
    (gap,) = table.partition("us:\n")[2].splitlines()
    assert gap.split()[0] == "100.0"
    assert "norm -> product; cudaEventSynchronize 60" in gap


def test_profile_without_kernels_says_so() -> None:
    assert kernel_table([event("cpu_op", "aten::mm", 0, 5)]) == "no kernels"
