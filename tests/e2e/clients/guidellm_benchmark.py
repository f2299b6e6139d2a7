"""guidellm's benchmark, by its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checks import BASE_URL, MODEL, TOKENIZER, passed

COMMAND = Path(sys.executable).with_name("guidellm")
subprocess.run(
    [
        *(str(COMMAND), "benchmark", "run", "--target", BASE_URL, "--model", MODEL),
        *("--profile", "concurrent", "--rate", "2", "--max-requests", "8"),
        *("--data", "prompt_tokens=48,output_tokens=24", "--processor", TOKENIZER),
        *("--output-path", "out.json"),
    ],
    check=True,
    timeout=600,
)
report = json.loads(Path("out.json").read_text())
(benchmark,) = report["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert totals["successful"] >= 8, totals
assert not totals["errored"], totals
passed("8 requests, 2 at once")
