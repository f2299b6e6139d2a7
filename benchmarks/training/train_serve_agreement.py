"""What training's evaluation says of a drafter, and what serving accepts of it, on the same text.

    python benchmarks/training/train_serve_agreement.py smollm2 draft/zoo/smollm2-135m-eagle3 \
        --prompts mt_bench humaneval gsm8k --data-dir DATA --count 6 --max-tokens 96

The engine answers the prompts greedily with the drafter; the training task reads the same prompts
and answers as held-out documents, and walks them in rounds of the same depth.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.config import SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.sampling import SamplingParams
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.eagle3 import Eagle3Draft
from specengine.draft.train.eagle3_task import Eagle3Config, Eagle3Task, draft_shape
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.unroll import Borrowed, rotary_table
from specengine.draft.train.vocabulary import DraftVocabulary
from specengine.engine.build import build_engine, load
from specengine.engine.chat_template import render_chat
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.accept.prompts import find_prompt_sets
from specengine.runner.loader.loaded_model import LoadedModel

Answer = tuple[list[int], list[int]]  # prompt, answer


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, sampling)
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers[output.rid] = list(output.token_ids)
    return [(prompt, answers[str(i)]) for i, prompt in enumerate(prompts)]


def trained(loaded: LoadedModel, directory: Path, num_steps: int) -> Eagle3Task:
    """The training task, with the weights of an export."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    teacher = Teacher(loaded, layers)
    size = config["draft_vocab_size"]
    ids = torch.arange(size) + tensors.pop("d2t", torch.zeros(size)).long()
    tensors.pop("t2d", None)
    vocabulary = DraftVocabulary(ids, teacher.vocab_size)
    own_head = "lm_head.weight" in tensors
    settings = Eagle3Config(
        draft_vocab_size=size,
        own_head=own_head,
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        num_steps=num_steps,
        chain_steps=num_steps,
    )
    shape = draft_shape(teacher.model, settings)
    head = teacher.head_table()[ids]
    borrowed = Borrowed(
        teacher.embed_table, None if own_head else head, rotary_table(teacher, shape)
    )
    start = head.cpu() if own_head else None
    module = Eagle3Draft(shape, len(layers) * teacher.hidden_size, borrowed, start)
    module.load_state_dict({k: v.float() for k, v in tensors.items()})
    return Eagle3Task(module, teacher, settings, shape, vocabulary)


def as_batch(answer: Answer) -> PackedBatch:
    prompt, tokens = answer
    ids = torch.tensor([*prompt, *tokens])
    count = len(ids)
    return PackedBatch(
        input_ids=ids,
        positions=torch.arange(count),
        document_ids=torch.zeros(count, dtype=torch.int64),
        lens=[count],
        loss_mask=torch.arange(count) >= len(prompt),
    )


def evaluate(task: Eagle3Task, answers: list[Answer]) -> dict[str, float]:
    sums: dict[str, Any] = {}
    for answer in answers:
        for name, value in task.evaluate(as_batch(answer)).items():
            sums[name] = sums.get(name, 0) + value
    return task.summary(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--count", type=int, default=6, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--name", default="train-serve-agreement")
    args = parser.parse_args()
    spec = SpecConfig(
        algorithm="EAGLE3", draft_model_path=str(args.draft), num_steps=args.num_steps
    )
    flags = {"model": args.model, "dtype": "float32", "device": "cpu", "max_total_tokens": 16384}
    config = config_from_flags(flags, spec)
    loaded = load(config, Phases())
    engine = build_engine(config, loaded)
    rows = []
    task = trained(loaded, args.draft, args.num_steps)
    for prompt_set in find_prompt_sets(args.prompts, args.data_dir):
        texts = [one.turns[0] for one in prompt_set.prompts[: args.count]]
        prompts = [
            render_chat(loaded.tokenizer, [{"role": "user", "content": text}]) for text in texts
        ]
        before = engine.stats().spec
        drafts, accepted = before.num_drafts, list(before.accepted_per_pos)
        total = before.num_accepted_tokens
        answers = serve(engine, prompts, args.max_tokens)
        after = engine.stats().spec
        rounds = after.num_drafts - drafts
        first = after.accepted_per_pos[0] - (accepted[0] if accepted else 0)
        said = evaluate(task, answers)
        rows.append(
            {
                "prompts": f"{prompt_set.name} ({len(prompts)})",
                "rounds": rounds,
                "position 0, training": said["acceptance_0"],
                "position 0, served": first / rounds,
                "accepted length, training": said["accepted_length"],
                "accepted length, served": 1 + (after.num_accepted_tokens - total) / rounds,
            }
        )
        print(rows[-1], flush=True)
    notes = (
        "Served: the rounds that drafted, the last ones of answers cut short. Training: a chain "
        "of full depth from every round's start."
    )
    print(report.write("training", args.name, "Acceptance in training and in serving", rows, notes))


if __name__ == "__main__":
    main()
