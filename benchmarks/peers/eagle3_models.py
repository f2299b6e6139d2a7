"""An EAGLE-3 drafter in the model code of SGLang and of vLLM, beside this engine, round by round.

    pip download --no-deps sglang==0.5.23 vllm==0.33.0
    for W in *.whl; do unzip -q $W -d peers; done
    python benchmarks/peers/eagle3_models.py smollm2 draft/zoo/smollm2-135m-eagle3 --peers peers \
        --prompts mt_bench humaneval gsm8k --data-dir DATA --count 4 --max-tokens 96

The engine answers greedily, and every round's draft is kept. Then each peer's own EAGLE-3 model, on
stand-ins for the layers that need a GPU or several processes (plain_layers.py), reads the same
directory with its own code for configuration and weights, takes features of the target in
transformers from the layers that its own code picks, and drafts at the start of each round. Drafts
should be the same token by token; so is the accepted length then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eagle3_peers import Peer, in_sglang, in_vllm
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.config import ModelConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.sampling import SamplingParams
from specengine.draft.eagle.convert import Conversion, convert
from specengine.engine.build import build_engine, load
from specengine.engine.chat_template import render_chat
from specengine.engine.phases import Phases
from specengine.lab.accept.prompts import find_prompt_sets
from specengine.runner.loader.source import resolve_model


@dataclass(frozen=True)
class Round:
    """`text` ends with the root; `after` is what follows it in the greedy answer."""

    text: list[int]
    drafted: list[int]
    after: list[int]

    def accepted(self, drafted: list[int]) -> int:
        pairs = zip(drafted, self.after, strict=False)
        return next((i for i, (one, two) in enumerate(pairs) if one != two), len(drafted))


class Drafting:
    """Greedy chains of a peer through one text. Rows of the text itself are run once: in every
    engine, rows of accepted tokens are run again on the target's features."""

    def __init__(self, peer: Peer, tokens: list[int], features: Tensor) -> None:
        """features [T - 1, F]: of all tokens but the last."""
        self.peer = peer
        (self.attention,) = (one for one in peer.model.modules() if hasattr(one, "keys"))
        self.attention.keep(0)
        rows = torch.arange(len(features))
        self.outputs, self.states = peer.step(torch.tensor(tokens[1:]), rows, features)
        self.kept = self.attention.keys, self.attention.values

    def chain(self, root: int, num_steps: int) -> list[int]:
        """Past the token at `root`, whose row is the one before."""
        row = slice(root - 1, root)
        output, state = self.outputs[row], self.states[row]
        self.attention.keys, self.attention.values = self.kept
        self.attention.keep(root)
        drafted = [self.peer.best(output)]
        while len(drafted) < num_steps:
            position = torch.tensor([root + len(drafted) - 1])
            output, state = self.peer.step(torch.tensor(drafted[-1:]), position, state)
            drafted.append(self.peer.best(output))
        return drafted


class RoundKeeper:
    """A RoundRecorder of chains."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[tuple[int, list[int]]]] = {}  # tokens before, drafted

    def record(self, batch: Any, proposal: Any, output: Any, result: Any) -> None:
        for req, tokens, count in zip(
            batch.reqs, proposal.tokens.tolist(), proposal.num_nodes, strict=True
        ):
            mine = self.rounds.setdefault(req.rid.partition("#")[0], [])
            mine.append((len(req.token_ids), tokens[1:count]))


def serve(args: argparse.Namespace) -> tuple[dict[str, list[Round]], dict[str, list[list[int]]]]:
    """Rounds that drafted, and whole texts, by prompt set."""
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=args.draft, num_steps=args.num_steps)
    flags = {
        "model": args.model,
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 32768,
        # Of a prefix that requests share, the last row may have seen another next token.
        "disable_radix_cache": True,
    }
    config = config_from_flags(flags, spec)
    loaded = load(config, Phases())
    engine = build_engine(config, loaded)
    keeper = RoundKeeper()
    engine.host_round.recorders.append(keeper)
    rounds: dict[str, list[Round]] = {}
    texts: dict[str, list[list[int]]] = {}
    for prompt_set in find_prompt_sets(args.prompts, args.data_dir):
        keeper.rounds.clear()
        prompts = [
            render_chat(loaded.tokenizer, [{"role": "user", "content": one.turns[0]}])
            for one in prompt_set.limited(args.count).prompts
        ]
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
            engine.add_request(str(i), prompt, sampling)
        answers = [list[int]() for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                answers[int(output.rid)] = list(output.token_ids)
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        texts[prompt_set.name] = whole
        rounds[prompt_set.name] = [
            Round(whole[int(rid)][:count], drafted, whole[int(rid)][count:])
            for rid, mine in keeper.rounds.items()
            for count, drafted in mine
            if drafted
        ]
    return rounds, texts


def target_features(model: Any, tokens: list[int], capture: tuple[int, ...]) -> Tensor:
    """[T - 1, F]: what the layers read, as transformers keeps it; both peers add the residual."""
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    read = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    hook.remove()
    states = [*read[:-1], *last]  # the last that transformers gives is normed already
    return torch.cat([states[layer][0] for layer in capture], dim=-1)


def compare(
    peer: Peer, target: Any, rounds: list[Round], texts: list[list[int]], num_steps: int
) -> dict[str, Any]:
    drafting = {
        tuple(text): Drafting(peer, text, target_features(target, text, peer.capture))
        for text in texts
    }
    same = 0
    positions, own_positions = [0] * num_steps, [0] * num_steps
    for one in rounds:
        found = drafting[tuple(one.text + one.after)]
        drafted = found.chain(len(one.text) - 1, len(one.drafted))
        same += drafted == one.drafted
        for total, draft in ((positions, drafted), (own_positions, one.drafted)):
            for position in range(one.accepted(draft)):
                total[position] += 1
    accepted, own = sum(positions), sum(own_positions)
    return {
        "rounds": len(rounds),
        "same drafts": same,
        "accepted, peer": positions,
        "accepted, engine": own_positions,
        "tau, peer": 1 + accepted / len(rounds),
        "tau, engine": 1 + own / len(rounds),
    }


def main() -> None:
    args = parsed()
    draft = Path(args.draft)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        rounds, texts = serve(args)
        from transformers import AutoModelForCausalLM

        directory = resolve_model(ModelConfig(model=args.model)).directory
        target: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        other = Path(scratch) / "speculators"
        convert(str(draft), other, Conversion("speculators", "target", ("LlamaForCausalLM",)))
        rows = []
        for name, opened, folder in (
            ("SGLang, as exported", in_sglang, draft),
            ("vLLM, as exported", in_vllm, draft),
            ("vLLM, converted to speculators", in_vllm, other),
        ):
            with opened(args.peers, folder, target) as peer:
                for prompts, mine in rounds.items():
                    found = compare(peer, target, mine, texts[prompts], args.num_steps)
                    rows.append(
                        {"model code": name, "layers read": peer.capture, "prompts": prompts}
                        | found
                    )
                    print(rows[-1], flush=True)
    title = "An EAGLE-3 drafter in the model code of SGLang and vLLM"
    print(report.write("peers", args.name, title, rows, args.notes))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--peers", type=Path, required=True, help="unpacked wheels")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--count", type=int, default=4, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--name", default="eagle3-in-peers")
    parser.add_argument("--notes", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
