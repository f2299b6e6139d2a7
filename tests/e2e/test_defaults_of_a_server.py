"""How a model's files say that tokens are chosen, across the processes of a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.support.processes import serving

pytestmark = pytest.mark.slow
PROMPT = [3, 14, 15, 9, 2, 6]


@pytest.mark.parametrize(("option", "greedy"), [("model", True), ("openai", False)])
def test_requests_of_a_server(
    option: str, greedy: bool, small_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_models["llama"], tmp_path / "m"))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0, "top_k": 20}))
    flags = ("--api-workers", "2", "--sampling-defaults", option)
    with serving(tmp_path, *flags, model=str(folder)) as served:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}

        def text(**fields: float) -> str:
            answer = httpx.post(f"{served.url}/v1/completions", json=body | fields, timeout=60)
            return str(answer.json()["choices"][0]["text"])

        best = text(temperature=0)
        assert (text(seed=1) == best, text(seed=2) == best) == (greedy, greedy)
        told = served.get("/model_info").json()["sampling_defaults"]
        assert told == ({"temperature": 0, "top_k": 20} if greedy else {})
        said = (
            "temperature 0, top_k 20 unless a request says other" in (tmp_path / "log").read_text()
        )
        assert said is greedy
