"""aiperf's profile of a streamed chat, by its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checks import BASE_URL, MODEL, TOKENIZER, passed

COMMAND = Path(sys.executable).with_name("aiperf")
for kind in ("chat", "completions"):
    subprocess.run(
        [
            *(
                str(COMMAND),
                "profile",
                "--model",
                MODEL,
                "--url",
                BASE_URL,
                "--tokenizer",
                TOKENIZER,
            ),
            *("--endpoint-type", kind, "--streaming", "--request-count", "8", "--concurrency", "2"),
            *("--isl", "48", "--osl", "24"),
            *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--output-artifact-dir", kind),
        ],
        check=True,
        timeout=600,
    )
    (path,) = Path(kind).rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == 8, report
    assert not (report.get("error_request_count") or {}).get("avg"), report
    passed(f"8 streamed requests to {kind}, 2 at once")
