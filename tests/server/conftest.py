"""A scripted engine behind the real application, on a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.core.config import EngineConfig, ServerConfig
from specengine.core.errors import EngineStoppedError, RequestError
from specengine.core.request import FinishReason, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import DepthChoice, SpecStats
from specengine.core.spec_totals import SpecTotals
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.outputs import EngineStats, RequestOutput, RequestTimes
from specengine.engine.tokens import encode_text
from specengine.server.app import create_app
from specengine.server.run import background_server
from specengine.server.service import Service

KEY = "secret"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ '(' + m.name + ')' if m.name }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> Any:
    """Byte-level: a token a byte, ids 0..255, and <eos> = 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE
    )


DEPTHS = [  # of rounds, in turns
    DepthChoice(4, "batch 2: K=4, 1.50x of none; acceptance 0.80", 1.5),
    DepthChoice(6, "batch 2: K=6 tried for a round; K=4 is kept", 1.45),
]


@dataclass
class FakeEngine:
    """Says `script` (choice k: k more exclamation marks) a few tokens a chunk, then EOS."""

    tokenizer: Any = field(default_factory=make_tokenizer)
    config: EngineConfig = field(default_factory=EngineConfig)
    model_name: str = "fake"
    context_length: int = 200
    is_ready: bool = True
    is_embedding: bool = False
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    script: str = "Hi, é😀 there"
    delay: float = 0.0
    holds_after: float = float("inf")  # so many chunks it says no more
    error: Exception | None = None  # raised instead of a chunk ...
    error_after: int = 0  # ... after so many chunks
    final_kind: str = "stop"
    prompts: list[str] = field(default_factory=list)
    samplings: list[SamplingParams] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    given_up: list[list[str] | None] = field(default_factory=list)  # names, of each call
    updates: list[tuple[str | None, str | None]] = field(default_factory=list)  # of weights
    refreshes: int = 0
    level: int = 0  # of sleep

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        self.samplings.append(sampling)
        self.rids.append(rid)
        choices = [self._choice(prompt_ids, sampling, rid, k) for k in range(sampling.n)]
        running, chunks = list(choices), 0
        try:
            while running:
                for choice in list(running):
                    if self.error is not None and chunks >= self.error_after:
                        raise self.error
                    await asyncio.sleep(self.delay)
                    while chunks >= self.holds_after and self.is_ready:
                        await asyncio.sleep(0.002)
                    if not self.is_ready:
                        raise EngineStoppedError("the engine has stopped")
                    chunks += 1
                    output = next(choice)
                    if output.finish_reason is not None:
                        running.remove(choice)
                    elif not stream:
                        continue
                    yield output
        finally:
            if running:
                self.aborted.append(rid)

    def _choice(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, index: int
    ) -> Iterator[RequestOutput]:
        ids = [*encode_text(self.tokenizer, self.script + "!" * index), 256]
        limit = sampling.max_tokens or self.context_length - len(prompt_ids)
        detokenizer = Detokenizer(self.tokenizer, sampling)
        spec, made, started = SpecStats(), 0, time.monotonic()
        for size in [1, 3, 2, 4] * 100:
            new = ids[made : made + size][: limit - made]
            made += len(new)
            spec.record(4, len(new) - 1, DEPTHS[spec.num_rounds % 2])
            finish = self._finish(new, made, limit)
            delta = detokenizer.add(new, finish)
            if detokenizer.stopped:
                finish = FinishReason("stop", sampling.stop[0])
            yield RequestOutput(
                rid=rid,
                index=index,
                new_token_ids=new,
                token_ids=ids[:made],
                text_delta=delta,
                text=detokenizer.text,
                finish_reason=finish,
                logprobs=logprobs(new, sampling.logprobs),
                all_logprobs=logprobs(ids[:made], sampling.logprobs),
                prompt_logprobs=[None, *logprobs(prompt_ids[1:], sampling.prompt_logprobs)],
                num_prompt_tokens=len(prompt_ids),
                num_cached_tokens=5,
                spec=spec if finish is not None else SpecStats(),  # told at the end, as engines do
                times=RequestTimes(started, started + 0.1, started + 0.3),
            )
            if finish is not None:
                return

    def _finish(self, new: list[int], made: int, limit: int) -> FinishReason | None:
        if 256 in new:
            return FinishReason(self.final_kind, 256, "gave up")
        return FinishReason("length") if made == limit else None

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=2,
            num_waiting=3,
            num_slots=100,
            num_free_slots=75,
            num_prompt_tokens=40,
            num_cached_tokens=10,
            num_generated_tokens=7,
            spec=SpecTotals(8, 5, 20, 9, [5, 4]),
            depth=DepthChoice(2, "batch 64: K=2, 1.34x of none; acceptance 0.71 0.55", 1.34, 6),
        )

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """Length and first token."""
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        self.rids.append(rid)
        return [float(len(prompt_ids)), prompt_ids[0] / 3]

    async def give_up(self, names: list[str] | None = None) -> int:
        self.given_up.append(names)
        return 3

    async def flush_cache(self) -> int:
        return 17

    async def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        if model == "nowhere":
            raise RequestError("there is no model 'nowhere'")
        self.updates.append((model, draft_model))
        return 5

    async def sleep(self, level: int = 1) -> int:
        self.level = level
        return 99

    async def wake(self) -> None:
        self.level = 0

    async def is_sleeping(self) -> bool:
        return self.level > 0

    async def refresh(self) -> None:
        self.refreshes += 1

    def shutdown(self) -> None:
        self.is_ready = False


def logprobs(tokens: list[int], top: int | None) -> list[TokenLogprob]:
    """Token t gets -t/100; its alternatives are the tokens after it. EOS is impossible."""
    if top is None:
        return []
    return [
        TokenLogprob(
            t,
            -t / 100 if t < 256 else float("-inf"),
            [((t + k) % 256, -(t + k) / 100) for k in range(top)],
        )
        for t in tokens
    ]


@dataclass
class Site:
    """One running server."""

    url: str
    service: Service
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def refusal(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error that this body is refused with."""
        return refusal(self.post(path, **body), status)


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    content: dict[str, Any] = response.json()
    assert list(content) == ["error"]
    assert list(content["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = content["error"]
    return error


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    service = Service()
    app = create_app(service, [KEY])
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        background_server(app, ServerConfig(port=0, log_level="warning")) as url,
        httpx.Client(base_url=url, headers=headers, timeout=20) as http,
    ):
        yield Site(url, service, http)


@pytest.fixture
def engine(site: Site) -> FakeEngine:
    """A fresh engine behind the running server."""
    engine = FakeEngine()
    site.service.engine = engine
    return engine


def connect(site: Site, strict: bool) -> OpenAI:
    return OpenAI(
        base_url=site.url + "/v1",
        api_key=KEY,
        max_retries=0,
        timeout=20,
        _strict_response_validation=strict,
    )


@pytest.fixture(scope="session")
def openai_client(site: Site) -> Iterator[OpenAI]:
    """Strict: a response that does not fit OpenAI's schema raises."""
    with connect(site, strict=True) as client:
        yield client


@pytest.fixture(scope="session")
def lenient_client(site: Site) -> Iterator[OpenAI]:
    """For text completions with a null finish_reason or logprob: OpenAI sends them too, though its
    schema does not say so."""
    with connect(site, strict=False) as client:
        yield client
