"""What launches take on an NVIDIA GPU, kernel by kernel, as PyTorch's profiler sees it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from specengine.core.errors import SpecEngineError
from specengine.core.platform import KernelSpan

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def kernel_spans(run: Callable[[], object]) -> list[KernelSpan]:
    """Raises SpecEngineError where the profiler sees nothing."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    spans = [KernelSpan(e["name"], float(e["dur"])) for e in events if e.get("cat") in _KINDS]
    if not spans:
        raise SpecEngineError("the profiler saw no kernels; is another profiler at work?")
    return spans
