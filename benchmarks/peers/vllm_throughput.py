"""The work of `specengine bench throughput` on vLLM, in an environment that has it.

    python benchmarks/peers/vllm_throughput.py --model smollm2-shape --json vllm.json
    python benchmarks/peers/vllm_throughput.py --model llama-3.1-8b-shape --algorithm EAGLE3 \
        --random-draft 32000 --json vllm-eagle3.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import LEAST_CONTEXT, MTP, NGRAM, Generate, Model, Outcome, Spec, Workload, run

_COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def start(model: Model, spec: Spec, work: Workload) -> tuple[Generate, dict[str, Any]]:
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": max(LEAST_CONTEXT, work.longest + 64),
        "tensor_parallel_size": model.tp_size,
        "max_num_seqs": max(work.batch_sizes),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **({"load_format": "dummy"} if model.is_shape else {}),
        **model.options,
    }
    speculative = _speculative(spec)
    if speculative is not None:
        options["speculative_config"] = dict(speculative)  # vLLM writes its own things into it
    llm = LLM(model=str(model.folder), **options)
    params = SamplingParams(
        temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False
    )

    def generate(prompts: list[list[int]]) -> Outcome:
        before = _counted(llm)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        tokens = [len(one.outputs[0].token_ids) for one in outputs]
        if speculative is None:
            return Outcome(tokens)
        after = _counted(llm)
        return Outcome(tokens, **{name: after[name] - before[name] for name in _COUNTERS})

    shown = {name: value for name, value in (speculative or {}).items() if name != "model"}
    return generate, {**options, "speculative_config": shown}


def _speculative(spec: Spec) -> dict[str, Any] | None:
    if spec.algorithm is None:
        return None
    if spec.algorithm == NGRAM:
        return {
            "method": "ngram",
            "num_speculative_tokens": spec.num_steps,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 12,
        }
    own = {"method": "eagle3", "model": str(spec.draft)}
    if spec.algorithm == MTP:  # in the model's own folder
        own = {"method": "mtp"}
    return {
        **own,
        "num_speculative_tokens": spec.num_steps,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": spec.accept_length,
    }


def _counted(llm: Any) -> dict[str, int]:
    values = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
    return {name: int(values.get(metric, 0)) for name, metric in _COUNTERS.items()}


if __name__ == "__main__":
    run("vLLM", "vllm", start)
