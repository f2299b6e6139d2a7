"""Servers of the engines that are compared: their commands, and how they start and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = 2.5
NUM_STEPS = 3
CONTEXT = 8448  # tokens

# KV slots of each server where several share a card; no engine may be held back by them. At once
# there are at most 64 streams of 1,024 + 256 tokens, 81,920 slots (82,944 in vLLM, which rounds a
# request and the slots of its drafts up to blocks of 16), or 8 of 7,900 + 4, 63,232. No server
# keeps KV of finished requests. A token of Llama-3.1-8B takes 32 layers x 2 x 8 heads x 128 x 2
# bytes = 128 KiB, and 132 KiB with the draft's layer: 16.5 GiB. With 15 GiB of weights, 1 of the
# draft and some 5 of graphs and activations, a server takes 38 GiB, and three take 114 of an H200's
# 140.
KV_SLOTS = 131_072

# Seconds that ours is ahead of the others of a card, unless it is ready before. It plans its memory
# after 13, captures graphs until 34, and counts what others take meanwhile as its own; they import
# for 15 to 20 before they take any.
HEAD_START = 20.0


@dataclass(frozen=True)
class Shape:
    """What is served. name: of a built-in model. folder: its configuration and tokenizer, for
    peers. draft: folder of an EAGLE-3 draft; None does not speculate. slot_bytes: of KV, the
    draft's layer included. context: tokens of a request, no more than the model has positions."""

    name: str
    folder: Path
    draft: Path | None
    slot_bytes: int
    context: int = CONTEXT


@contextmanager
def shape_of(name: str, draft_vocab: int | None) -> Iterator[Shape]:
    """Its folders are deleted afterwards. draft_vocab: of the draft; None writes none."""
    from transformers import AutoConfig

    from specengine.lab.throughput.random_draft import write_random_eagle3
    from specengine.runner.loader.builtin import BUILTIN_MODELS
    from specengine.runner.loader.tokenizer import byte_tokenizer

    built_in = BUILTIN_MODELS[name]
    with tempfile.TemporaryDirectory(prefix="served-") as place:
        folder, draft = Path(place) / "model", Path(place) / "draft"
        if not built_in.is_shape:  # it has a draft of its own
            drafter = None if draft_vocab is None else ROOT / "draft/zoo/tiny-eagle3"
            yield Shape(name, folder, drafter, 0)
            return
        config: Any = AutoConfig.for_model(**built_in.config)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        layer = 2 * 2 * config.num_key_value_heads * config.head_dim  # bytes
        context = min(CONTEXT, config.max_position_embeddings)
        if draft_vocab is None:
            yield Shape(name, folder, None, config.num_hidden_layers * layer, context)
            return
        draft.mkdir()
        write_random_eagle3(draft, config, draft_vocab)
        yield Shape(name, folder, draft, (config.num_hidden_layers + 1) * layer, context)


def ours(shape: Shape, port: int, share: float | None) -> list[str]:
    """share: of the card, where other servers have the rest; None where it has all. So for all
    commands, whose first word, the interpreter, is the caller's."""
    command = ["-m", "specengine", "serve", shape.name, "--port", str(port)]
    command += ["--disable-radix-cache"]  # as the peers: all prompts differ
    if shape.name.endswith("-shape"):
        command += ["--load-format", "dummy", "--context-length", str(shape.context)]
    if shape.draft is not None:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
        command += [str(shape.draft), "--speculative-num-steps", str(NUM_STEPS)]
        command += ["--speculative-simulate-accept-length", str(ACCEPTED)]
    if share is not None:
        # Of a third of 140 GiB it needs 40; half of what the share leaves of the card is its budget
        # of graphs. What others take before it has captured them counts in both.
        command += ["--mem-fraction-static", f"{share:.2f}", "--max-total-tokens", str(KV_SLOTS)]
    return command


def vllm(shape: Shape, port: int, share: float | None) -> list[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.folder)]
    command += [
        "--load-format",
        "dummy",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(shape.context),
    ]
    command += ["--max-num-seqs", "256", "--no-enable-prefix-caching", "--port", str(port)]
    if share is not None:
        # The share must be free when it starts, and means nothing beside a size of KV. Without
        # that size it would count what others take while it loads as its own.
        command += ["--gpu-memory-utilization", f"{share:.2f}"]
        command += ["--kv-cache-memory-bytes", str(KV_SLOTS * shape.slot_bytes)]
    if shape.draft is None:
        return command
    asked = {
        "method": "eagle3",
        "model": str(shape.draft),
        "num_speculative_tokens": NUM_STEPS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": ACCEPTED,
    }
    return [*command, "--speculative-config", json.dumps(asked)]


def sglang(shape: Shape, port: int, share: float | None) -> list[str]:
    command = ["-m", "sglang.launch_server", "--model-path", str(shape.folder)]
    command += [
        "--load-format",
        "dummy",
        "--dtype",
        "bfloat16",
        "--context-length",
        str(shape.context),
    ]
    command += ["--disable-radix-cache", "--max-running-requests", "256", "--port", str(port)]
    if share is not None:
        # Its fraction is of what was free when it started, and what others take while it loads
        # counts against it: at 0.9 its slots fit whether it starts first (0.9 x 139 GiB, less 16
        # of weights and 78 of others) or last (0.9 x 61, less 16).
        command += ["--mem-fraction-static", "0.9", "--max-total-tokens", str(KV_SLOTS)]
    if shape.draft is not None:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
        command += ["--speculative-draft-model-path", str(shape.draft)]
        command += ["--speculative-num-steps", str(NUM_STEPS)]
        command += ["--speculative-num-draft-tokens", str(NUM_STEPS + 1)]
        command += ["--speculative-draft-load-format", "auto"]  # the draft has weights
    return command


ASKED_EACH = 0.5  # seconds between questions whether a server is ready
GIVEN_BACK = 1.0  # seconds in which a card's memory is given back after a server has ended
COMMANDS: dict[str, Callable[[Shape, int, float | None], list[str]]] = {
    "specengine": ours,
    "vllm": vllm,
    "sglang": sglang,
}


@dataclass(eq=False)
class Server:
    """seconds: until it is ready, at most. head_start: seconds until the next may start, unless it
    is ready before."""

    name: str
    command: list[str]
    port: int
    log: Path
    seconds: float
    head_start: float = 0.0
    is_ready: bool = False
    started: float = 0.0  # of time.monotonic
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        names = ("SGLANG_SIMULATE_ACC_LEN", "SIMULATE_ACC_LEN")  # the latter of older versions
        environment = os.environ | dict.fromkeys(names, str(ACCEPTED))
        self.started = time.monotonic()
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def is_awaited(self) -> bool:
        """Whether it may still become ready. One that is late is ended: it would load while others
        are measured."""
        assert self.process is not None
        passed = time.monotonic() - self.started
        if answers(self.url):
            self.is_ready = True
            say(f"{self.name}: ready after {passed:.0f} s")
            return False
        if self.process.poll() is not None:
            say(f"{self.name}: ended with status {self.process.returncode}; see {self.log.name}")
            return False
        if passed > self.seconds:
            say(f"{self.name}: not ready in {self.seconds:g} s; see {self.log.name}")
            self.end()
            return False
        return True

    def end(self) -> None:
        """With all that it started."""
        self.is_ready = False
        process, self.process = self.process, None
        if process is None:
            return
        for how, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            try:
                os.killpg(process.pid, how)
                process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        time.sleep(GIVEN_BACK)


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """All start, one after the head start of the one before. Within it each is ready, or will not
    be. All that were not ended are ended afterwards."""
    waiting: list[Server] = []
    try:
        for one in servers:
            one.start()
            waiting.append(one)
            while one in waiting and time.monotonic() < one.started + one.head_start:
                waiting = awaited(waiting)
        while waiting:
            waiting = awaited(waiting)
        yield
    finally:
        for one in servers:
            one.end()


def awaited(servers: Sequence[Server]) -> list[Server]:
    """Those that may still become ready, a while later."""
    time.sleep(ASKED_EACH)
    return [one for one in servers if one.is_awaited()]


def answers(url: str) -> bool:
    """Whether it completes a prompt. Servers listen, and some say that they are well, before."""
    body = {"model": model_of(url), "prompt": [1, 2, 3], "max_tokens": 2}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def model_of(url: str) -> str:
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError):
        return ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
