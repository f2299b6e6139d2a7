"""What no interpreter tells: whether kernels of published sizes compile for an H100, fit in its
shared memory and registers, and let products end before their operands are overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.kernels.dispatch import MOST_SHARED
from tests.kernels import offline_triton

HEADS = ("64", "80", "96", "112", "128", "256")
FORMS = [
    *((head, "bfloat16") for head in HEADS),
    *(("64", "float16"), ("128", "float32"), ("256", "float32")),
    *(("latents", "bfloat16"), ("delta", "bfloat16"), ("delta", "float32"), ("moves", "bfloat16")),
    *(("experts", "bfloat16"), ("experts", "float32")),
    *(("packed experts", "bfloat16"), ("packed experts", "float16"), ("packed experts", "float32")),
]
# Bytes that a thread keeps in memory for want of registers: more cost more than they spare.
MOST_LOCAL = 1536


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("group", "dtype"), FORMS)
def test_forms_compile_for_hopper_and_fit(group: str, dtype: str, triton_cache: Path) -> None:
    found = offline_triton.run("tests.kernels.offline_forms", triton_cache, group, dtype)
    assert found
    for kernel, form, shared, local, is_overwritten in found:
        what = f"{kernel} of {form}"
        assert shared <= MOST_SHARED, f"{what} takes {shared} bytes of shared memory"
        assert local <= MOST_LOCAL, f"{what} keeps {local} bytes a thread in memory"
        assert not is_overwritten, f"{what} overwrites what a running product reads"
