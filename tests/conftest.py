"""Fixtures shared by the whole suite: small random models on disk, and SmolLM2."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import ssl
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specengine.core.trim import trim_memory
from tests import caught_logs, fewer_messages
from tests.interpreter import quicken

if TYPE_CHECKING:
    from tests.kernels.emulated_cuda import Compiled

CacheFolder = Callable[[str], Path]
TESTS = Path(__file__).parent
USUAL = gc.get_threshold()

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def hands_out_tests() -> bool:
    """Whether this process has others run them: with `-n` of pytest-xdist, and no worker. They
    start when it has read this file, so that it imports none of the large libraries."""
    given = sys.argv[sys.argv.index("-n") :] if "-n" in sys.argv else []
    return given[1:2] not in ([], ["0"]) and "PYTEST_XDIST_WORKER" not in os.environ


if not hands_out_tests():
    # Collections of garbage are rare: imports make half a million objects that stay, and each test
    # file begins with a collection.
    gc.set_threshold(10_000, 10, 10)

    from hypothesis import HealthCheck, settings

    # Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton is
    # imported anywhere in the process.
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Nothing is timed in a test: on a busy machine examples take as long as they take.
    checks = [HealthCheck.too_slow]
    settings.register_profile("untimed", deadline=None, suppress_health_check=checks)
    settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    if not hands_out_tests() and has_gpu():  # whose memory objects may keep
        gc.set_threshold(*USUAL)
    caught_logs.quicken()
    fewer_messages.quicken(config)


def pytest_runtest_logstart() -> None:
    caught_logs.look_again()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """All is looked through once for garbage: pytest, which does so twice, passes over what is
    left. A process of a run then leaves at once."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.register(leave_at_once if "PYTEST_XDIST_WORKER" in os.environ else gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What files import stays: to look through it for garbage takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each process of a run reads another part of the suite first, and finds the rest as the others
    compiled it. In a new clone each would compile all of it at the same time as the others."""
    report = yield
    if collector.path == TESTS and report.result and "PYTEST_XDIST_WORKER" in os.environ:
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(report.result) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of a process that reads alone: all have to hold the same list."""
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[:1])


def leave_at_once() -> None:
    """With all that waits for the end of the process, but without the interpreter's look through
    half a million objects, and the end of each, which take two seconds."""
    atexit.unregister(leave_at_once)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: every byte is a token, ids 2..257; the rest are unused."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.families import VOCAB

    specials = ["<eos>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = specials + alphabet + [f"<unused{i}>" for i in range(VOCAB - 2 - len(alphabet))]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>"
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def _what_stands_is_settled() -> None:
    """Collections pass over the libraries, as they do beside a server: half a million objects,
    which took a third of the suite's time. Not on a GPU, where an engine that a failed test keeps
    would have its memory for good."""
    if not has_gpu():
        gc.collect()
        gc.freeze()
    trim_memory()  # what a process has is taken off the memory that its engines may use


@pytest.fixture(scope="module", autouse=True)
def _log_level_stays() -> Iterator[None]:
    """A command sets the root logger's, which the next file's tests read messages of."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture(scope="session", autouse=True)
def _interpreter_is_quick() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken()


@pytest.fixture(scope="session", autouse=True)
def _clients_are_patient() -> Iterator[None]:
    """By default httpx waits 5 s, in which a busy machine may not answer."""
    import httpx

    with pytest.MonkeyPatch.context() as patch:
        for what in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, what, 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _authorities_are_read_once() -> Iterator[None]:
    """Each client of httpx reads the certificates of all authorities, which takes it 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def cache_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CacheFolder:
    """A folder of this name in pytest's cache; with `-p no:cacheprovider` one of this run."""
    cache = getattr(request.config, "cache", None)
    if cache is not None:
        return lambda name: Path(cache.mkdir(name))
    place = place_of_run(tmp_path_factory) / "cache"

    def made(name: str) -> Path:
        (place / name).mkdir(parents=True, exist_ok=True)
        return place / name

    return made


def place_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all processes of a run share."""
    place = tmp_path_factory.getbasetemp()  # of this process
    return place.parent if "PYTEST_XDIST_WORKER" in os.environ else place


def kept_folder(cache_folder: CacheFolder, name: str, digest: str) -> Path:
    """For what follows from files of this digest alone; older ones go."""
    folder = cache_folder(f"{name}-{digest}")
    for older in folder.parent.glob(f"{name}-*"):
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def emulated_libraries(cache_folder: CacheFolder) -> Path:
    """Where CUDA C++ is kept as compiled for this machine's processor, each form once until a
    source changes."""
    from tests.kernels.emulated_cuda import COMPILER, digest_of_sources

    if COMPILER is None:
        pytest.skip("no C++ compiler, or not Linux")
    return kept_folder(cache_folder, "emulated", digest_of_sources())


@pytest.fixture(scope="session")
def emulated(emulated_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiles CUDA C++ for this machine's processor."""
    from tests.kernels.emulated_cuda import compiler_into

    return compiler_into(tmp_path_factory.mktemp("emulated"), emulated_libraries)


@pytest.fixture(scope="session")
def emulated_pair(emulated_libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """As `emulated`, for two threads at once: ranks of tests/support/pretended_ranks.py."""
    from specengine.core.parallel import communicator
    from tests.kernels.emulated_cuda import compiler_of_ranks

    folder = tmp_path_factory.mktemp("emulated-ranks")
    return compiler_of_ranks(folder, emulated_libraries, lambda: communicator().rank)


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each registered family, saved as transformers saves them, by family."""
    from tests.support.families import SmallModels

    return SmallModels(place_of_run(tmp_path_factory) / "small-models", save_tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The built-in SmolLM2-135M-Instruct, converted into the cache at first use."""
    from specengine.core.config import ModelConfig
    from specengine.core.errors import ModelLoadError
    from specengine.runner.loader.source import resolve_model

    try:
        resolve_model(ModelConfig(model="smollm2"))
    except ModelLoadError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    return "smollm2"
