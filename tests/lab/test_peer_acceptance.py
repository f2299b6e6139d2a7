"""The acceptance of a drafter in whole engines, with peers that only pretend."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
TINY = [str(ROOT / "target/zoo/tiny"), str(ROOT / "draft/zoo/tiny-eagle3")]
STOP = 9


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Scripts put their own folder on the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("acceptance", PEERS / "acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["acceptance"] = module
    spec.loader.exec_module(module)
    yield module
    for name in ("acceptance", "acceptance_engines"):
        del sys.modules[name]


def pretend(
    monkeypatch: pytest.MonkeyPatch, acceptance: Any, package: str, contents: dict[str, Any]
) -> None:
    module = ModuleType(package)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(acceptance, "find_spec", lambda name: object())
    monkeypatch.setattr(sys.modules["acceptance_engines"], "version", lambda name: "9.9")


def earlier(tmp_path: Path, tokens: list[list[int]]) -> Path:
    """The file of a run of this engine: two prompts, up to 4 tokens, two steps."""
    work = {
        "num_steps": 2,
        "max_tokens": 4,
        "stop_token_ids": [STOP],
        "prompts": {"set": [[1], [2]]},
    }
    result = {"rounds": 4, "accepted": [3, 1], "tokens": tokens}
    record = {"engine": "ours", "dtype": "float32", "options": {}, "environment": {}}
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(record | {"work": work, "results": {"set": result}}))
    return file


class FakeVllm:
    """Counted two rounds before this run, and counts three in it."""

    def __init__(self, **options: Any) -> None:
        assert options["speculative_config"]["num_speculative_tokens"] == 2
        assert options["max_num_seqs"] == 3
        self.runs = 0

    def generate(self, inputs: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert [one["prompt_token_ids"] for one in inputs] == [[1], [2]]
        assert (params.temperature, params.stop_token_ids) == (0.0, [STOP])
        self.runs += 1
        answers = [[5, 6, 7, 8], [5, 6, STOP]]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one)]) for one in answers]

    def get_metrics(self) -> list[Any]:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        accepted = [2 + 3 * self.runs, 1 + 2 * self.runs]
        rounds = SimpleNamespace(name="vllm:spec_decode_num_drafts", value=2 + 3 * self.runs)
        return [rounds, SimpleNamespace(name=name, values=accepted)]


def test_vllm_beside_an_earlier_run(
    acceptance: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, acceptance, "vllm", {"LLM": FakeVllm, "SamplingParams": SimpleNamespace})
    beside = earlier(tmp_path, [[5, 6, 7, 8], [5, 0]])
    file = tmp_path / "vllm.json"
    argv = ["vllm", *TINY, "--beside", str(beside), "--option", "max_num_seqs=3"]
    acceptance.main([*argv, "--json", str(file)])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == ("| set | 2 | 3 | 4 | [3, 2] | [3, 1] | 2.667 | 2.000 | 1 of 2 | 83.3% |")
    record = acceptance.Record.read(file)
    assert record.engine == "vLLM 9.9"
    assert record.results["set"].tokens == [[5, 6, 7, 8], [5, 6]]
    assert record.work == acceptance.Record.read(beside).work


def test_sglang_tells_how_many_rounds_accepted_how_much(
    acceptance: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, **options: Any) -> None:
            started.append(options)

        def generate(self, input_ids: list[Any], sampling_params: Any) -> list[Any]:
            facts = {"spec_accept_histogram": [1, 0, 2]}
            return [
                {"meta_info": facts, "output_ids": [5, STOP]},
                {"meta_info": {}, "output_ids": [5]},
            ]

    pretend(monkeypatch, acceptance, "sglang", {"Engine": Engine})
    file = tmp_path / "sglang.json"
    beside = earlier(tmp_path, [[5], [5]])
    acceptance.main(["sglang", *TINY, "--beside", str(beside), "--json", str(file)])
    [options] = started
    assert (options["speculative_num_steps"], options["speculative_num_draft_tokens"]) == (2, 3)
    result = acceptance.Record.read(file).results["set"]
    assert (result.rounds, result.accepted, result.tau) == (3, [2, 2], pytest.approx(7 / 3))
    assert result.tokens == [[5], [5]]


def test_this_engine_fills_its_last_round(acceptance: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "some.jsonl"
    prompts.write_text('{"turns": ["Say one word."]}\n{"turns": ["Say it again."]}\n')
    options = ["--option", 'device="cpu"', "--option", "max_total_tokens=512"]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    argv = ["specengine", *TINY, *options, "--num-steps", "3", "--max-tokens", "6"]
    acceptance.main([*argv, "--prompts", str(prompts), "--json", str(files[0])])
    acceptance.main(
        ["specengine", *TINY, *options, "--beside", *map(str, files[:1]), "--json", str(files[1])]
    )
    first, second = map(acceptance.Record.read, files)
    assert first.results == second.results
    result = first.results["some"]
    assert all(0 < len(tokens) <= 6 for tokens in result.tokens)
    # Every token but the first of each comes from a round; the last round may go beyond the end.
    emitted = sum(result.accepted) + result.rounds
    short = sum(map(len, result.tokens)) - len(result.tokens)
    assert short <= emitted <= short + 2 * (1 + 3)


def test_agreement_counts_what_comes_before_the_first_difference(acceptance: Any) -> None:
    def answers(*tokens: list[int]) -> Any:
        return acceptance.Answers(1, [0], list(tokens))

    agreement = acceptance.agree(answers([1, 2, 3], [4, 5]), answers([1, 0, 3], [4, 5, 6]))
    assert (agreement.answers, agreement.tokens) == (0, 0.5)


def test_a_peer_that_is_not_installed_is_named(acceptance: Any, tmp_path: Path) -> None:
    argv = ["sglang", *TINY, "--beside", str(earlier(tmp_path, [[5], [5]])), "--json", "x"]
    with pytest.raises(SystemExit, match="sglang is not installed in this environment"):
        acceptance.main(argv)


def test_prompts_must_come_from_somewhere(acceptance: Any) -> None:
    with pytest.raises(SystemExit, match="--prompts names the prompt sets"):
        acceptance.main(["specengine", *TINY, "--json", "x"])
