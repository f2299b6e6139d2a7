"""Verifications prepared while drafts are made: the same bits, an event at each hand-over, and no
race where one of them is late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import AttentionLimits, LogitsOutput
from specengine.core.sampling import SpecControl
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.empty import EmptyDrafter
from specengine.engine.plan_ahead import PlanAhead, PlannedVerify, make_plan_ahead
from specengine.engine.round import host
from specengine.engine.round.host import HostRound
from specengine.runner.model_runner import ModelRunner
from specengine.runner.plan_stream import GraphAhead, PlanStream
from tests.support.cpu_graphs import graphs_on_the_cpu, use_functions
from tests.support.fake_platform import FakePlatform, FakeStream

PROMPTS = ["One day, Tom went to", "x", "The cat and the dog", "Once upon a time"]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
CHAIN: dict[str, Any] = {"num_steps": 3, "adaptive": False}
TREE: dict[str, Any] = CHAIN | {"eagle_topk": 3, "num_draft_tokens": 9}
SHAPES = {
    "chain": SpecConfig(algorithm="EAGLE3", **CHAIN),
    "tree": SpecConfig(algorithm="EAGLE3", **TREE),
    "sampled chain": SpecConfig(algorithm="STANDALONE", **CHAIN, draft_sampling=True),
}
BATCHES: dict[str, list[SamplingParams]] = {
    "greedy": [GREEDY] * 4,
    "sampled": [replace(GREEDY, temperature=0.8, seed=3), replace(GREEDY, logprobs=2), GREEDY],
    "limited": [replace(GREEDY, speculative=SpecControl(num_steps=2)), GREEDY],
    "under a grammar": [replace(GREEDY, grammar=GrammarSpec.regex("[a-f ]{60}")), GREEDY],
}


class Logits:
    """The logits of every verification."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        self.rows.append(output.logits.clone())


def make(spec: SpecConfig, **flags: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048, **flags}
    return LLM("tiny", spec, **settings)


def plan_ahead(llm: LLM) -> Counter[str]:
    """An engine prepares verifications whatever its backend; counts of how, by round."""
    parts, counts = llm.engine.parts, Counter[str]()
    llm.engine.host_round.plan_ahead = Counting(
        PlanStream(parts.worker.runner), parts.drafter, counts
    )
    return counts


class Counting(PlanAhead):
    def __init__(self, stream: PlanStream, drafter: Any, counts: Counter[str]) -> None:
        super().__init__(stream, drafter)
        self.counts = counts

    def begin(self, batch: ScheduleBatch, most_levels: int | None) -> PlannedVerify | None:
        planned = super().begin(batch, most_levels)
        self.counts["not predicted" if planned is None else type(planned.ahead).__name__] += 1
        return planned


def logits_of(llm: LLM, params: list[SamplingParams]) -> tuple[list[list[int]], list[Tensor]]:
    logits = Logits()
    llm.engine.host_round.recorders = [logits]
    tokens = [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]
    llm.engine.scheduler.check_invariant()
    return tokens, logits.rows


def check_same_bits(one: LLM, other: LLM, params: list[SamplingParams]) -> None:
    (tokens, logits), (tokens_ahead, logits_ahead) = (
        logits_of(one, params),
        logits_of(other, params),
    )
    assert tokens_ahead == tokens
    assert len(logits_ahead) == len(logits)
    assert all(map(torch.equal, logits_ahead, logits))


@pytest.mark.parametrize("shape", SHAPES)
def test_prepared_verifications_give_the_same_bits(shape: str) -> None:
    on_the_spot, ahead = make(SHAPES[shape]), make(SHAPES[shape])
    counts = plan_ahead(ahead)
    for name, params in BATCHES.items():
        counts.clear()
        check_same_bits(on_the_spot, ahead, params)
        is_predicted = name != "under a grammar" and not (name == "limited" and "tree" in shape)
        assert (counts["EagerAhead"] > 2) == is_predicted, (name, counts)


def test_verifications_are_prepared_in_the_buffers_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_functions(monkeypatch)
    for shape in ("chain", "tree"):
        on_the_spot, ahead = make(SHAPES[shape]), make(SHAPES[shape])
        for llm in (on_the_spot, ahead):
            graphs_on_the_cpu(llm)
        counts = plan_ahead(ahead)
        params = [replace(GREEDY, max_tokens=24)] * 2
        check_same_bits(on_the_spot, ahead, params)
        assert counts["not predicted"] > 0  # what a graph was yet to be captured for
        check_same_bits(on_the_spot, ahead, params)
        assert counts["GraphAhead"] > 2


def test_drafts_of_another_shape_than_predicted_are_planned_again() -> None:
    on_the_spot, ahead = make(SHAPES["chain"]), make(SHAPES["chain"])
    counts = plan_ahead(ahead)
    drafter: Any = ahead.engine.parts.drafter
    predict = drafter.predict_shape
    drafter.predict_shape = lambda batch: [max(2, count - 1) for count in predict(batch)]
    check_same_bits(on_the_spot, ahead, BATCHES["greedy"])
    assert counts["EagerAhead"] > 2


def test_plan_stream_is_made_where_the_host_plans(caplog: pytest.LogCaptureFixture) -> None:
    llm = make(SHAPES["chain"], enable_plan_stream=True)
    assert llm.engine.host_round.plan_ahead is None
    parts, runner = llm.engine.parts, llm.engine.parts.worker.runner
    with caplog.at_level("INFO"):
        assert make_plan_ahead(parts.config, runner, parts.drafter) is None
    assert "torch plans on the device" in caplog.text
    backend: Any = runner.attn_backend
    backend.limits = AttentionLimits(plans_on_host=True)
    assert make_plan_ahead(parts.config, runner, parts.drafter) is not None
    with caplog.at_level("INFO"):
        assert make_plan_ahead(parts.config, runner, EmptyDrafter()) is None
    assert "known afterwards" in caplog.text


class Log:
    """Streams and events that note what is called."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.streams = ["main"]
        log = self

        class Event:
            def record(self, stream: Stream) -> None:
                log.lines.append(f"{stream.name} records")

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                log.lines.append(f"{self.name} waits for all of {other.name}")

            def wait_event(self, event: Event) -> None:
                log.lines.append(f"{self.name} waits for the event")

        @contextmanager
        def using(stream: Stream) -> Iterator[None]:
            log.streams.append(stream.name)
            yield
            log.streams.pop()

        self.plan: Any = Stream("plan")
        self.platform: Any = SimpleNamespace(
            new_event=Event, on_stream=using, current_stream=lambda: Stream(self.streams[-1])
        )

    def watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.lines.append(f"{self.streams[-1]} {name}")
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


def test_streams_wait_for_events_at_each_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(SHAPES["tree"])
    logits_of(llm, [GREEDY])
    plan_ahead(llm)
    runner = llm.engine.parts.worker.runner
    log = Log()
    monkeypatch.setattr(runner, "platform", log.platform)
    assert llm.engine.host_round.plan_ahead is not None
    llm.engine.host_round.plan_ahead.stream.stream = log.plan
    log.watch(runner, "new_forward_batch", monkeypatch)
    log.watch(runner.attn_backend, "init_forward_metadata", monkeypatch)
    log.watch(runner.model, "forward", monkeypatch)
    logits_of(llm, [replace(GREEDY, max_tokens=4)])
    start = log.lines.index("plan waits for all of main")
    round_of_target = [line for line in log.lines[start:] if "main init" not in line]
    expected = [
        "plan waits for all of main",
        "plan new_forward_batch",
        "plan init_forward_metadata",
        "plan records",
        "main waits for the event",
    ]
    drafting = len(expected) - 1
    while round_of_target[drafting] == "main new_forward_batch":  # of the drafter
        del round_of_target[drafting]
    assert round_of_target[: len(expected)] == expected
    assert "main forward" in round_of_target


def test_dropped_plan_is_waited_for_before_its_buffers_are_used() -> None:
    log = Log()
    unused: Any = None
    GraphAhead(unused, unused, log.platform, log.platform.new_event()).drop()
    assert log.lines == ["main waits for the event"]


HAS_CUDA = torch.cuda.is_available()
SLEEP = 20_000_000  # cycles, about 10 ms
STALLS = ["producer", "plan", "planned", "draft", "consumer", "consumed"]


def late(call: Callable[..., Any], before: int, after: int) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(before)  # type: ignore[no-untyped-call]
        found = call(*args, **kwargs)
        torch.cuda._sleep(after)  # type: ignore[no-untyped-call]
        return found

    return slow


def stall(llm: LLM, where: str) -> None:
    """The device is late at one hand-over, while the host goes on."""
    runner, drafter = llm.engine.parts.worker.runner, llm.engine.parts.drafter
    ahead = llm.engine.host_round.plan_ahead
    assert ahead is not None
    before, after = SLEEP * (where in ("plan", "producer", "consumer")), 0
    if where in ("planned", "draft", "consumed"):
        before, after = 0, SLEEP
    if where == "producer":
        ahead.stream.begin = late(ahead.stream.begin, before, after)  # type: ignore[method-assign]
    elif where == "draft":
        drafter.draft = late(drafter.draft, before, after)  # type: ignore[method-assign]
    elif where in ("consumer", "consumed"):
        runner.model.forward = late(runner.model.forward, before, after)  # type: ignore[method-assign]
        graphs = runner.ragged_graphs
        if graphs is not None:
            graphs.launch = late(graphs.launch, before, after)  # type: ignore[method-assign]
    else:
        for name in ("init_forward_metadata", "init_forward_metadata_replay"):
            plan = getattr(runner.attn_backend, name)
            setattr(runner.attn_backend, name, late_beside(ahead, plan, before, after))


def late_beside(
    ahead: PlanAhead, plan: Callable[..., Any], before: int, after: int
) -> Callable[..., Any]:
    """Late on the plan stream alone."""
    slow = late(plan, before, after)

    def run(*args: Any) -> Any:
        is_beside = torch.cuda.current_stream() == ahead.stream.stream
        return slow(*args) if is_beside else plan(*args)

    return run


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("where", STALLS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_no_race_where_a_hand_over_is_late(backend: str, shape: str, where: str) -> None:
    if backend == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    flags = {"device": "cuda", "attention_backend": backend, "disable_cuda_graph": True}
    flags["dtype"] = "bfloat16" if backend == "flashinfer" else "float32"
    on_the_spot, ahead = make(SHAPES[shape], **flags), make(SHAPES[shape], **flags)
    counts = plan_ahead(ahead)
    check_same_bits(on_the_spot, ahead, BATCHES["greedy"])
    stall(ahead, where)
    for _ in range(2):
        check_same_bits(on_the_spot, ahead, BATCHES["greedy"])
    assert counts["EagerAhead"] > 6


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("where", STALLS)
def test_no_race_in_the_buffers_of_graphs(where: str) -> None:
    if find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    flags = {"device": "cuda", "attention_backend": "flashinfer", "dtype": "bfloat16"}
    on_the_spot, ahead = (make(SHAPES["tree"], **flags, cuda_graph_bs=(1, 4)) for _ in range(2))
    counts = plan_ahead(ahead)
    for llm in (on_the_spot, ahead):
        logits_of(llm, BATCHES["greedy"])  # captures
    counts.clear()
    stall(ahead, where)
    check_same_bits(on_the_spot, ahead, BATCHES["greedy"])
    assert counts["GraphAhead"] > 2


def test_current_stream_goes_on_behind_a_plan_that_fails() -> None:
    """What it has launched into the buffers of a graph runs all the same."""
    fake = FakePlatform()
    plans = PlanStream(cast(ModelRunner, SimpleNamespace(platform=fake)))
    assert isinstance(plans.stream, FakeStream)
    with pytest.raises(MemoryError), plans._beside():
        raise MemoryError
    assert plans.stream.seen <= fake.current_stream().seen


def test_plan_is_dropped_where_drafting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next forward writes the buffers of a graph beside the plan stream."""
    dropped, ahead = list[bool](), SimpleNamespace(drop=lambda: dropped.append(True))
    rounds = HostRound(*cast(Any, [None] * 3))
    begin = lambda *_: SimpleNamespace(ahead=ahead)  # noqa: E731
    rounds.plan_ahead = cast(PlanAhead, SimpleNamespace(begin=begin))

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(host, "draft_within_limits", fail)
    with pytest.raises(MemoryError):
        rounds.run(cast(ScheduleBatch, None))
    assert dropped == [True]
