"""The peers' benchmarks, with engines that only pretend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
WORK = ["--batch-sizes", "1", "3", "--new-tokens", "8", "--prompt-len", "4", "--repeats", "2"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Scripts put their own folder on the path."""
    monkeypatch.setattr(sys, "path", [str(PEERS), *sys.path])
    before = set(sys.modules)
    yield load("common")
    for name in set(sys.modules) - before:
        if name in ("common", "vllm_throughput", "sglang_throughput"):
            del sys.modules[name]


def pretend(
    monkeypatch: pytest.MonkeyPatch, common: Any, package: str, contents: dict[str, Any]
) -> None:
    module = ModuleType(package)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(common, "find_spec", lambda name: object())
    monkeypatch.setattr(common, "version", lambda name: "9.9")


class FakeVllm:
    """Accepts 3 drafts of 4 in each of two rounds a request."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.drafts = 0
        FakeVllm.last = self
        speculative = options.get("speculative_config")
        if speculative is not None and "model" in speculative:
            assert (Path(speculative["model"]) / "model.safetensors").is_file()
        if speculative is not None:
            speculative["target_model_config"] = object()  # as vLLM does, to the very dictionary
        assert (Path(options["model"]) / "config.json").is_file()

    last: FakeVllm

    def generate(self, inputs: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.drafts += 2 * len(inputs)
        assert all(len(one["prompt_token_ids"]) == 4 for one in inputs)
        output = SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in inputs]

    def get_metrics(self) -> list[Any]:
        counts = {"drafts": 1, "draft_tokens": 4, "accepted_tokens": 3}
        return [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=each * self.drafts)
            for name, each in counts.items()
        ]


@pytest.mark.parametrize("algorithm", [None, "EAGLE3", "NGRAM"])
def test_vllm(
    algorithm: str | None, common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contents = {"LLM": FakeVllm, "SamplingParams": SimpleNamespace}
    pretend(monkeypatch, common, "vllm", contents)
    result = tmp_path / "vllm.json"
    chosen = [] if algorithm is None else ["--algorithm", algorithm]
    argv = [*WORK, *chosen, "--random-draft", "64", "--json", str(result)]
    common.run("vLLM", "vllm", load("vllm_throughput").start, argv)
    written = json.loads(result.read_text())
    assert written["engine"] == "vLLM 9.9"
    assert written["model"]["name"] == "smollm2-shape"
    [setting] = written["settings"]
    assert setting["name"] == algorithm or setting["name"] == "no speculation"
    assert setting["is_lossy"] == (algorithm == "EAGLE3")
    assert [point["batch_size"] for point in setting["points"]] == [1, 3]
    for point in setting["points"]:
        assert len(point["rates"]) == 2
        expected = (None, None, None) if algorithm is None else (4.0, 2.0, 4.0)
        assert (point["tau"], point["rounds"], point["drafted"]) == expected
    assert FakeVllm.last.options["load_format"] == "dummy"
    assert str(tmp_path) not in json.dumps(setting["options"])
    if algorithm == "EAGLE3":
        assert setting["options"]["speculative_config"]["synthetic_acceptance_length"] == 2.5


def test_first_tokens_are_timed_by_length_of_the_prompt(
    common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []

    class Vllm(FakeVllm):
        def generate(self, inputs: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            asked.append((len(inputs[0]["prompt_token_ids"]), params.max_tokens))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0])])]

    pretend(monkeypatch, common, "vllm", {"LLM": Vllm, "SamplingParams": SimpleNamespace})
    result = tmp_path / "vllm.json"
    argv = ["--first-token", "32", "8000", "--repeats", "2", "--json", str(result)]
    argv += ["--option", "max_num_seqs=5", "--option", "attention_backend=fa3"]
    common.run("vLLM", "vllm", load("vllm_throughput").start, argv)
    assert asked == [(32, 1)] * 3 + [(8000, 1)] * 3
    assert Vllm.last.options["max_model_len"] > 8000
    assert Vllm.last.options["max_num_seqs"] == 5
    assert Vllm.last.options["attention_backend"] == "fa3"
    written = json.loads(result.read_text())
    assert written["engine"] == "vLLM 9.9"
    assert {*written["first_token"]} == {"32", "8000"}
    assert min(written["first_token"].values()) > 0


@pytest.mark.parametrize(
    "options_known",
    [("cuda_graph_max_bs_decode", "speculative_draft_load_format"), ("cuda_graph_max_bs",)],
)
def test_sglang(
    common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options_known: tuple[str, ...]
) -> None:
    started: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, **options: Any) -> None:
            started.append(options)

        def generate(self, input_ids: list[Any], sampling_params: Any) -> list[Any]:
            facts = {"completion_tokens": 8, "spec_verify_ct": 3}
            return [{"meta_info": facts} for _ in input_ids]

    pretend(monkeypatch, common, "sglang", {"Engine": Engine})
    known = {"ServerArgs": make_dataclass("ServerArgs", options_known)}
    pretend(monkeypatch, common, "sglang.srt.server_args", known)
    script = load("sglang_throughput")
    for name in script._FORCED_LENGTH:
        monkeypatch.setenv(name, "")
    argv = [*WORK, "--algorithm", "EAGLE3", "--random-draft", "64", "--json"]
    common.run("SGLang", "sglang", script.start, [*argv, str(tmp_path / "sglang.json")])
    [options] = started
    assert options["speculative_num_draft_tokens"] == 4
    assert [options[name] for name in options if "graph" in name] == [
        options["max_running_requests"]
    ]
    names = {"cuda_graph_max_bs_decode", "cuda_graph_max_bs", "speculative_draft_load_format"}
    assert names & options.keys() == {*options_known}
    assert script.os.environ["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    [setting] = json.loads((tmp_path / "sglang.json").read_text())["settings"]
    assert [point["rounds"] for point in setting["points"]] == [3, 3]
    assert setting["points"][0]["tau"] == pytest.approx(7 / 3)
    assert "speculative_draft_model_path" not in setting["options"]


def test_a_peer_that_is_not_installed_is_named(
    common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="vLLM is not installed in this environment"):
        common.run("vLLM", "vllm", load("vllm_throughput").start, ["--json", str(tmp_path / "x")])


def test_requests_that_end_early_are_no_result(common: Any) -> None:
    work = common.Workload((2,), prompt_len=4, new_tokens=8, repeats=1)
    with pytest.raises(SystemExit, match="8 new tokens were asked of each request"):
        common.measure(lambda prompts: common.Outcome([8, 7]), work, 2, 100)


def test_an_unknown_model_is_named(common: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="neither a folder nor one of the shapes"):
        common.run("vLLM", "vllm", lambda *_: None, ["--model", "absent", "--json", "x"])


FORKS = """
import gc
gc.disable()  # what is imported stays
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import common, torch

fields = {"num_hidden_layers": 30, "vocab_size": 49152, "hidden_size": 576}
fields |= {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
config = SimpleNamespace(to_dict=lambda: fields, **fields)
reads = SimpleNamespace(from_pretrained=lambda folder: config)
given = SimpleNamespace(AutoConfig=reads, LlamaConfig=lambda: config)
sys.modules["transformers"] = given  # takes seconds to import
args = common._parse("peer", ["--algorithm", "EAGLE3", "--random-draft", "512", "--json", "x"])
with common._spec(args, common.Model("a shape", Path("none"), True, 49152, 1, {})) as spec:
    assert (spec.draft / "model.safetensors").is_file()
    assert torch.get_num_threads() == 2
    if os.fork() == 0:
        signal.alarm(120)  # ends it, where it waits for threads that are not there
        torch.ones(4_000_000).mul(2).sum()
        os._exit(0)
    sys.exit(os.wait()[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_an_engine_that_is_forked_behind_a_random_draft_can_compute() -> None:
    paths = os.pathsep.join([str(PEERS), *sys.path])
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
