"""A server of several engines: copies of a model, and engines that share its experts."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Served, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def text(served: Served, prompt: str, **fields: Any) -> str:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
    answer = served.complete(**body, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_copies_serve_behind_one_address_and_one_may_end(tp_size: str, tmp_path: Path) -> None:
    """Each on ranks of its own."""
    flags = ("--api-workers", "1", "--dp-size", "2", "--served-model-name", "m")
    flags += ("--tp-size", tp_size)
    with serving(tmp_path, *flags, "--max-restarts", "5") as served:
        until(lambda: len(served.engines()) == 2 and served.is_ready())
        expected = text(served, "Once upon a time")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: text(served, "Once upon a time"), range(12)))
        assert found == [expected] * 12
        os.kill(served.engines()[0], signal.SIGKILL)
        # Until the front end has heard of it, a request may still go there, and fail.
        until(lambda: served.complete(model="m").status_code == 200)
        for _ in range(6):
            assert text(served, "Once upon a time") == expected  # the other serves
        until(lambda: len(served.engines()) == 2)


@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_engines_that_share_experts_end_together(
    tp_size: str, tmp_path: Path, small_models: dict[str, Path]
) -> None:
    flags = ("--api-workers", "1", "--dp-size", "2", "--served-model-name", "m")
    model = str(small_models["qwen3moe"])
    with serving(tmp_path, *flags[:2], *flags[4:], model=model) as alone:
        until(alone.is_ready)
        expected = {prompt: text(alone, prompt) for prompt in ("abc", "0123456789" * 5, "x")}
    more = ("--enable-dp-attention", "--max-restarts", "5", "--admin-api-key", "secret")
    more += ("--tp-size", tp_size, "--enable-sleep-mode")
    with serving(tmp_path, *flags, *more, model=model) as served:
        until(served.is_ready)
        with ThreadPoolExecutor(3) as pool:
            found = dict(zip(expected, pool.map(lambda p: text(served, p), expected), strict=True))
        assert found == expected
        updated = httpx.post(
            f"{served.url}/update_weights_from_disk",
            json={"model_path": model},
            headers={"Authorization": "Bearer secret"},
            timeout=60,
        )
        assert updated.status_code == 200, updated.text
        assert text(served, "abc") == expected["abc"]
        for path in ("/sleep", "/wake_up"):
            answer = httpx.post(served.url + path, headers={"Authorization": "Bearer secret"})
            assert answer.status_code == 200, answer.text
        assert text(served, "abc") == expected["abc"]
        before = served.engines()
        os.kill(before[1], signal.SIGKILL)
        until(lambda: len(served.engines()) == 2 and not {*before} & {*served.engines()})
        until(served.is_ready)
        assert text(served, "abc") == expected["abc"]
