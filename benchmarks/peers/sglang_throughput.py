"""The work of `specengine bench throughput` on SGLang, in an environment that has it.

    python benchmarks/peers/sglang_throughput.py --model smollm2-shape --json sglang.json
    python benchmarks/peers/sglang_throughput.py --model llama-3.1-8b-shape --algorithm EAGLE3 \
        --random-draft 32000 --json sglang-eagle3.json
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import LEAST_CONTEXT, MTP, NGRAM, Generate, Model, Outcome, Spec, Workload, run

# Names that depend on the version: of the environment, and of options.
_FORCED_LENGTH = ("SGLANG_SIMULATE_ACC_LEN", "SIMULATE_ACC_LEN")
# Otherwise every token is the same one, and a mixture of experts reads few of them.
_FORCED_TOKENS = {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
_LARGEST_GRAPH = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
_DRAFT_FORMAT = "speculative_draft_load_format"
_PREFILL_GRAPHS = "cuda_graph_bs_prefill"
# Tokens of its graphs for prompts, up to those of a measured batch: its own list has fifty sizes up
# to 4,096, whose capture takes minutes with experts.
_PREFILLS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096)


def start(model: Model, spec: Spec, work: Workload) -> tuple[Generate, dict[str, Any]]:
    if spec.accept_length is not None:
        for name in _FORCED_LENGTH:  # read when SGLang is imported
            os.environ[name] = str(spec.accept_length)
        os.environ.update(_FORCED_TOKENS)
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = {one.name for one in fields(ServerArgs)}
    largest_graph = next(name for name in _LARGEST_GRAPH if name in known)
    speculative = _speculative(spec)
    if _DRAFT_FORMAT not in known:
        speculative.pop(_DRAFT_FORMAT, None)
    most = max(work.batch_sizes) * work.prompt_len
    prefills = [one for one in _PREFILLS if one <= 1.5 * most] or [_PREFILLS[0]]
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "context_length": max(LEAST_CONTEXT, work.longest + 64),
        "tp_size": model.tp_size,
        "max_running_requests": max(work.batch_sizes),
        largest_graph: max(work.batch_sizes),
        **({_PREFILL_GRAPHS: prefills} if _PREFILL_GRAPHS in known else {}),
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        **({"load_format": "dummy"} if model.is_shape else {}),
        **speculative,
        **model.options,
    }
    place = model.folder if spec.algorithm == MTP else spec.draft
    draft = {} if place is None else {"speculative_draft_model_path": str(place)}
    engine = sglang.Engine(model_path=str(model.folder), **options, **draft)
    params = {"temperature": 0.0, "max_new_tokens": work.new_tokens, "ignore_eos": True}

    def generate(prompts: list[list[int]]) -> Outcome:
        facts = [
            one["meta_info"] for one in engine.generate(input_ids=prompts, sampling_params=params)
        ]
        tokens = [one["completion_tokens"] for one in facts]
        rounds = sum(one.get("spec_verify_ct", 0) for one in facts)
        if not speculative or not rounds:
            return Outcome(tokens)
        # A round emits what it accepts and one more; the first token comes from the prefill.
        return Outcome(tokens, rounds, accepted=sum(tokens) - len(tokens) - rounds)

    return generate, options


def _speculative(spec: Spec) -> dict[str, Any]:
    if spec.algorithm is None:
        return {}
    nodes = {"speculative_num_draft_tokens": spec.num_steps + 1}
    if spec.algorithm == NGRAM:
        return {"speculative_algorithm": "NGRAM", **nodes}
    chain = {"speculative_num_steps": spec.num_steps, "speculative_eagle_topk": 1, **nodes}
    if spec.algorithm == MTP:
        return {"speculative_algorithm": "NEXTN", **chain}
    # The draft has weights where the target has none.
    return {"speculative_algorithm": "EAGLE3", _DRAFT_FORMAT: "auto", **chain}


if __name__ == "__main__":
    run("SGLang", "sglang", start)
