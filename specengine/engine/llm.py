"""Offline inference: `LLM(...).generate(prompts)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torch import Tensor

from specengine.core.config import SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError, RequestError
from specengine.core.request import FinishReason, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import SpecStats
from specengine.engine.build import build_engine
from specengine.engine.chat_template import render_chat
from specengine.engine.loop import Engine
from specengine.engine.outputs import RequestOutput
from specengine.engine.tokens import encode_text
from specengine.runner.layer_hooks import AddedHook, LayerHook

# A list this long takes long enough to want a progress bar.
PROGRESS_FROM = 16


@dataclass
class Completion:
    """One finished choice. Logprobs are those asked for in its SamplingParams.

    finish_reason: of the kind "error" or "abort" where the engine gave the choice up, with the
    reason in its `message`; text and tokens are then those that came before.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    spec: SpecStats


@dataclass
class Generation:
    """What came of one prompt: n choices."""

    prompt_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def spec(self) -> SpecStats:
        return self.completions[0].spec


class LLM:
    """A model and its engine in this process.

    model: built-in name, directory, GGUF file or hub id. spec: how to speculate; None is plain
    decoding. Other keywords are the flags of `specengine serve` with underscores, such as
    `max_total_tokens=8192` or `dtype="float32"`. Raises ConfigError, ModelLoadError or
    OutOfMemoryError.
    """

    def __init__(self, model: str = "smollm2", spec: SpecConfig | None = None, **flags: Any):
        # SamplingParams says all: what the model's files say is neither read nor refused.
        flags = {"model": model, "sampling_defaults": "openai", **flags}
        self._use(build_engine(config_from_flags(flags, spec)))

    @classmethod
    def of(cls, engine: Engine) -> LLM:
        """Around an engine that was built by other means (engine.build)."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    @property
    def tokenizer(self) -> Any:
        return self.engine.parts.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Complete prompts (text, or token ids), in their order. One SamplingParams serves all, or
        one each. progress: show a bar; by default for long lists. Raises RequestError for a prompt
        or parameter that cannot be served, before any work is done. A choice that the engine has
        to give up later raises nothing, for others are done: see Completion.finish_reason."""
        ids = [self._encode(p) for p in ([prompts] if isinstance(prompts, str) else prompts)]
        params = self._params(sampling, len(ids))
        rids = []
        try:
            for prompt_ids, one in zip(ids, params, strict=True):
                rids.append(self._add(prompt_ids, one))
            return self._run(rids, ids, len(ids) >= PROGRESS_FROM if progress is None else progress)
        except BaseException:
            for rid in rids:
                self.engine.abort(rid)
            raise

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Answer a conversation, formatted with the model's chat template."""
        return self.generate([render_chat(self.tokenizer, messages)], sampling)[0]

    def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """Put other weights in the place of the model's, its drafter's or both: a directory, or
        whatever else `model` could be. Returns the tokens of KV forgotten. Raises ConfigError or
        ModelLoadError where they do not fit; nothing has changed then."""
        return self.engine.update_weights(model, draft_model)

    def update_weights_from_tensors(
        self, tensors: Mapping[str, Tensor], draft: bool = False
    ) -> int:
        """The same, of a whole checkpoint's tensors by name. draft: of the draft model."""
        assert self.engine.weights is not None
        with self.engine.weights.directory_of(tensors, draft) as directory:
            return self.update_weights(*(None, directory) if draft else (directory, None))

    def add_layer_hook(self, pattern: str, hook: LayerHook) -> AddedHook:
        """Call `hook` with a LayerOutput, in copies, for each layer whose name ("layers.0" and so
        on) matches `pattern` ("layers.1?"), in every forward of the target. No graphs run
        meanwhile: forwards run eagerly, and rounds on the host; prompts run whole. `remove()`
        of what this returns ends it. Raises ConfigError where no layer matches, and for several
        ranks."""
        parts = self.engine.parts
        if parts.link.communicator.size > 1 or parts.sharers is not None:
            raise ConfigError("layers of several ranks have no hooks: --tp-size 1, --dp-size 1")
        self.engine.finish_rounds()
        return parts.worker.runner.hooks.add(pattern, hook)

    def sleep(self, level: int = 1) -> int:
        """Give the memory of weights and KV back to the machine, of an engine with
        `enable_sleep_mode=True`; CUDA graphs stay valid. level: 1 keeps the weights on the host (of
        a CPU in a file), 2 forgets them, and `wake` reads them again. Returns the bytes given back.
        Raises ConfigError where it cannot; nothing has changed then."""
        return self.engine.sleep(level)

    def wake(self) -> None:
        """Take the memory again. Raises OutOfMemoryError or ModelLoadError where it cannot; it
        sleeps on then."""
        self.engine.wake()

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        return list(prompt)

    def _params(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * count
        if len(sampling) != count:
            raise RequestError(f"{len(sampling)} SamplingParams for {count} prompts; give one each")
        return list(sampling)

    def _add(self, prompt_ids: list[int], sampling: SamplingParams) -> str:
        self._count += 1
        rid = f"offline-{self._count}"
        self.engine.add_request(rid, prompt_ids, sampling, stream=False)
        return rid

    def _run(self, rids: list[str], prompts: list[list[int]], progress: bool) -> list[Generation]:
        generations = {
            rid: Generation(ids, [], 0, []) for rid, ids in zip(rids, prompts, strict=True)
        }
        with progress_bar(len(rids), progress) as advance:
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.finish_reason is not None and output.rid in generations:
                        collect(generations[output.rid], output)
                        advance(len(output.token_ids))
        for generation in generations.values():
            generation.completions.sort(key=lambda completion: completion.index)
        return list(generations.values())


def collect(generation: Generation, output: RequestOutput) -> None:
    """Add a finished choice to its generation."""
    assert output.finish_reason is not None
    generation.num_cached_tokens = max(generation.num_cached_tokens, output.num_cached_tokens)
    generation.prompt_logprobs = output.prompt_logprobs
    generation.completions.append(
        Completion(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            logprobs=output.all_logprobs,
            spec=output.spec,
        )
    )


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to call for each finished choice, with the tokens it has."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), "{task.fields[rate]}", TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total, rate="")
        start, made = monotonic(), 0

        def advance(tokens: int) -> None:
            nonlocal made
            made += tokens
            bar.update(task, advance=1, rate=f"{made / (monotonic() - start):.0f} tok/s")

        yield advance
