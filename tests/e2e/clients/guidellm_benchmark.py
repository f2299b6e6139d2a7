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
        *(str(COMMAND), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={BASE_URL},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=24"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--output", "kind=json,path=out.json"),
    ],
    check=True,
    timeout=600,
)
report = json.loads(Path("out.json").read_text())
(benchmark,) = report["benchmarks"]
# Its metrics leave out a request that ends after the one which was counted last.
totals = benchmark["scheduler_metrics"]["requests_made"]
assert totals["successful"] == totals["total"] == 8, totals
passed("8 requests, 2 at once")
