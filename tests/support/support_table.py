"""The table of docs/support.md, out of the registries and of what tests are parametrised by.

``python -m tests.support.support_table`` writes the page anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specengine.core.registry import DRAFTERS, LOAD_QUANTIZATIONS, MODEL_FAMILIES, QUANTIZATIONS
from tests.support.families import FAMILIES
from tests.support.quantised import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- made by tests/support/support_table.py -->", "<!-- end of what is made -->"


@dataclass(frozen=True)
class Column:
    """covers: whether the test runs an architecture, by its short name; read from the test."""

    title: str
    test: str  # path
    covers: Callable[[str, Any], bool]


def _values(cases: Any) -> set[str]:
    """First values of pytest's parameters."""
    found = (getattr(case, "values", case) for case in cases)
    return {one if isinstance(one, str) else one[0] for one in found}


COLUMNS = (
    Column("logits", "tests/target/test_models.py", lambda family, test: True),
    Column(
        "GGUF",
        "tests/target/test_gguf_families.py",
        lambda family, test: family in test.CONVERSIONS,
    ),
    Column(
        "FP8",
        "tests/target/test_quantised_families.py",
        lambda family, test: (family, test.ROWS) in test.CASES,
    ),
    Column(
        "AWQ, GPTQ, W4A16",
        "tests/target/test_quantised_families.py",
        lambda family, test: (family, test.W4A16) in test.CASES,
    ),
    Column(
        "MXFP4",
        "tests/target/test_experts_families.py",
        lambda family, test: family == "gptoss",
    ),
    Column(
        "NGRAM",
        "tests/e2e/test_identity.py",
        lambda family, test: family in {_values([case]).pop() for case in test.CASES},
    ),
    Column(
        "EAGLE3",
        "tests/e2e/test_identity_families.py",
        lambda family, test: family in _values(test.CASES),
    ),
    Column(
        "train eagle3",
        "tests/train/test_eagle3_of_families.py",
        lambda family, test: family in FAMILIES,
    ),
)
# Drafters and quantisations do not know families: each is tested on one. What a drafter has beside
# the test that all have, which compares it with plain decoding.
DRAFTER_TESTS = {
    "NGRAM": "tests/draft/test_ngram_drafter.py",
    "SUFFIX": "tests/e2e/test_identity_suffix.py",
    "STANDALONE": "tests/e2e/test_identity_neural.py",
    "EAGLE": "tests/draft/test_eagle_drafts.py",
    "EAGLE3": "tests/draft/test_eagle_drafts.py",
    "MTP": "tests/e2e/test_identity_mtp.py",
    "DFLASH": "tests/draft/test_dflash.py",
}
QUANTIZATION_TESTS = {
    "mxfp4": "tests/target/test_experts_families.py",
    "gguf": "tests/runner/test_gguf_kept.py",
}
_QUANTIZED = "tests/e2e/test_quantised_models.py"


def page() -> str:
    """What stands between BEGIN and END."""
    return "\n".join([BEGIN, "", *_families(), "", *_drafters(), "", *_quantisations(), "", END])


def _link(test: str) -> str:
    assert (ROOT / test).is_file(), f"{test} is not there"
    return f"[{Path(test).stem.removeprefix('test_')}](../{test})"


def _families() -> Iterator[str]:
    tests = [import_module(one.test.removesuffix(".py").replace("/", ".")) for one in COLUMNS]
    yield "| architecture | " + " | ".join(column.title for column in COLUMNS) + " |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for family, architecture in FAMILIES.items():
        assert architecture in MODEL_FAMILIES
        cells = [
            _link(column.test) if column.covers(family, test) else "–"
            for column, test in zip(COLUMNS, tests, strict=True)
        ]
        yield f"| `{architecture}` | " + " | ".join(cells) + " |"


def _drafters() -> Iterator[str]:
    every = "tests/engine/test_registered_drafters.py"
    yield "| drafter | against equations, or plain decoding | on the host and in device rounds |"
    yield "|---|---|---|"
    for name in DRAFTERS:
        yield f"| `{name}` | {_link(DRAFTER_TESTS.get(name, every))} | {_link(every)} |"


def _quantisations() -> Iterator[str]:
    yield "| quantisation | test |"
    yield "|---|---|"
    methods = {form.config.get("quant_method") for form in FORMATS.values()}
    for name in dict.fromkeys([*QUANTIZATIONS, *LOAD_QUANTIZATIONS]):
        test = _QUANTIZED if name in methods else QUANTIZATION_TESTS[name]
        yield f"| `{name}` | {_link(test)} |"


def replace_made(text: str) -> str:
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda match: page(), text)


if __name__ == "__main__":
    PAGE.write_text(replace_made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
