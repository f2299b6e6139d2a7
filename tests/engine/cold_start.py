"""Starts an engine with graphs, in a process of its own; prints what was compiled, and its tokens.

Arguments: target, draft.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine import build
from specengine.kernels.compilations import tally


class _Counts(logging.Handler):
    """First numbers of an engine's messages, by their text."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args:
            self.seen[str(record.msg)] = record.args[0]


def main(target: str, draft: str) -> None:
    counts = _Counts()
    build.logger.addHandler(counts)
    build.logger.setLevel(logging.INFO)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=draft, num_steps=3)
    with tally() as compiled:
        llm = LLM(target, spec, dtype="bfloat16", max_running_requests=64, max_total_tokens=8192)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7], [8, 9] * 4], params)
    compiled_late = counts.seen.get("compiled %d more kernels while capturing", 0)
    answer = [one.token_ids for one in outputs]
    seen = {"compiled": compiled.kernels, "compiled_late": compiled_late, "tokens": answer}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
