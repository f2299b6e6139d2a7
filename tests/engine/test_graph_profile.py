"""Tables of the kernels of captured graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import GrammarSpec, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.platform import KernelSpan
from specengine.core.platforms.cpu import CpuPlatform
from specengine.engine.graph_profile import KernelRow, captured_graphs, kernel_rows, table_of
from tests.support.device_rounds import make_on_device
from tests.support.fake_platform import use_fake_platform
from tests.support.rounds import GREEDY, ON_CPU, ON_GPU, PROMPTS, make


class Spans(CpuPlatform):
    def kernel_spans(self, run: object) -> list[KernelSpan]:
        assert callable(run)
        run()
        names = ["gemm", "norm", "gemm"] * 2
        return [KernelSpan(name, 3.0 if name == "norm" else 5.0) for name in names]


class Counted:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_kernels_are_those_of_one_replay_the_costliest_first() -> None:
    graph = Counted()
    rows = kernel_rows(graph, Spans())
    assert rows == [KernelRow("gemm", 2, 10.0), KernelRow("norm", 1, 3.0)]
    assert graph.replays % 2 == 0, "rounds take turns"
    lines = table_of("round 4", rows).splitlines()
    assert lines[0] == "## round 4"
    assert lines[2] == "3 kernels, 13.0 us"
    assert lines[-1] == "| norm | 1 | 3.0 |"


@ON_CPU
def test_profile_has_a_table_for_each_graph(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [one.token_ids for one in make(target, None, device="cpu").generate(PROMPTS, GREEDY)]
    fake, file = use_fake_platform(monkeypatch), tmp_path / "graphs.md"
    flags = {"cuda_graph_bs": (1, 4), "cuda_graph_profile": str(file)}
    llm = make(target, None, device="cpu", **flags)
    titles = [line for line in file.read_text().splitlines() if line.startswith("## ")]
    assert len(titles) == len({*titles}) == fake.num_captures
    assert {title.split()[1] for title in titles} == {"decode", "prefill", "round"}
    assert file.read_text().count("| replay | 1 | 2.0 |") == len(titles)
    assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected


@ON_CPU
def test_profile_leaves_out_rounds_that_wait_for_token_masks(target: Path) -> None:
    llm, rounds = make_on_device("cpu", target, None)
    grammar = GrammarSpec.regex("[a-f]{3}")
    for params in (GREEDY, replace(GREEDY, grammar=grammar)):
        llm.generate(PROMPTS[:1], params)
    masked = {key for key in rounds.captured if key.sampling.masks}
    assert 0 < len(masked) < len(rounds.captured)
    found = {key for _, key, _ in captured_graphs(llm.engine.parts.worker.runner, rounds)}
    assert found == rounds.captured.keys() - masked


@ON_CPU
def test_profile_without_graphs_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are none"):
        make(target, None, device="cpu", cuda_graph_profile=str(tmp_path / "x"))


@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU)])
def test_profile_of_a_gpu_tells_kernels(
    _: None, target: Path, drafters: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "graphs.md"
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=drafters["EAGLE3"], num_steps=2)
    flags = {"cuda_graph_bs": (1, 2), "cuda_graph_profile": str(file)}
    llm = make(target, spec, dtype="bfloat16", **flags)
    plain = make(target, spec, dtype="bfloat16", cuda_graph_bs=(1, 2))
    found = [[one.token_ids for one in each.generate(PROMPTS[:2], GREEDY)] for each in (llm, plain)]
    assert found[0] == found[1]
    assert llm.engine.device_rounds is not None
    text = file.read_text()
    assert text.count("## round") >= len(llm.engine.device_rounds.captured) > 2
    counts = [float(line.split()[0]) for line in text.splitlines() if line.endswith(" us")]
    assert min(counts) >= 1
    assert torch.cuda.is_available()
