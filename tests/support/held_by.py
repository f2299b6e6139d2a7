"""Which families, quantisations and drafters tests run, read from what they are parametrised by."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from specengine.core.registry import DRAFTERS

ROOT = Path(__file__).parents[2]
Given = dict[str, Any]
# Of a test's file and the parameters of a case: what stands in the table, or nothing.
Read = Callable[[Any, Given], str | tuple[str, ...]]
# In `make test`, in `make test-all` alone, on a GPU alone.
WAYS = (ALWAYS, SLOW, GPU) = ("✓", "slow", "GPU")

# Column -> names in tests/support/quantised.py.
FORMS: dict[str, tuple[str, ...]] = {
    "FP8 tensor": ("fp8 tensor", "fp8 static", "compressed fp8 static"),
    "FP8 rows": ("compressed fp8 rows",),
    "FP8 blocks": ("fp8 blocks", "fp8 blocks of 128", "compressed fp8 blocks"),
    "ModelOpt": (
        *("modelopt", "modelopt rows", "modelopt blocks"),
        *("modelopt in its own file", "modelopt rows in its own file"),
        "modelopt blocks in its own file",
    ),
    "AWQ": ("awq",),
    "GPTQ": ("gptq", "gptq asymmetric", "gptq v2", "gptq of 8 bits"),
    "GPTQ act-order": ("gptq act-order",),
    "W4A16": (
        *("compressed w4a16", "compressed w4a16 rows", "compressed w4a16 asymmetric"),
        "compressed w8a16",
    ),
    "W4A16 act-order": ("compressed w4a16 act-order",),
}
COLUMN_OF = {name: column for column, names in FORMS.items() for name in names}
# Columns with drafts are by what --speculative-algorithm calls them; "hybrid" is
# --speculative-hybrid-suffix beside another.
QUANTISATIONS = (
    *("GGUF", "GGUF kept", *FORMS, "MXFP4"),
    *("FP8 on load", "int8, int4", "FP8 KV"),
)
DRAFTS = (*DRAFTERS, "hybrid")
COLUMNS = ("real weights", "logits", "tokens", *QUANTISATIONS, *DRAFTS, "train eagle3")
# What a test or what it uses has in its text where it always runs a family, or what a column says.
WRITTEN: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "LlamaForCausalLM", "smollm2_llm", "save_tiny_models"),
    "real weights": ("smollm2_llm",),
    "tokens": ("token_ids",),
    "GGUF": ("convert",),
    "GGUF kept": ("gguf", "_both"),
    "GPTQ": ("gptq",),
    "W4A16": ("compressed w4a16",),
    "MXFP4": ("mxfp4", "in_mxfp4"),
    "FP8 blocks": ("fp8 blocks of 128", "weight_block_size"),
    "FP8 on load": ("fp8",),
    "int8, int4": ("quantization",),
    "FP8 KV": ("kv_cache_dtype",),
    "MTP": ("MTP", "MtpModel"),
    "hybrid": ("hybrid_suffix",),
    "train eagle3": ("make_eagle3_task",),
}


def given(name: str, table: dict[str, str] | None = None) -> Read:
    """A parameter of the test, or what a table has in its place."""
    return lambda test, case: case[name] if table is None else table[case[name]]


@dataclass(frozen=True)
class Source:
    """test: file and function. A text in place of a Read is so in all cases, and is written there:
    see WRITTEN. where: of the parameters of the cases that count."""

    test: str
    family: str | Read
    columns: tuple[str | Read, ...]
    where: Callable[[Given], bool] = lambda case: True

    @property
    def constants(self) -> list[str]:
        return [one for one in (self.family, *self.columns) if isinstance(one, str)]


_ENGINE, _TARGET, _MTP = "tests/e2e/test_", "tests/target/test_", "tests/draft/test_"
_QUANTISED = f"{_ENGINE}quantised_models.py::test_"
_GGUF = f"{_TARGET}gguf_families.py::test_"
_IDENTITY = f"{_ENGINE}identity"
_KEPT = "tests/runner/test_gguf_kept.py::test_"
_KV = f"{_ENGINE}fp8_kv_engine.py::test_"
_ONE_TENSOR = f"{_TARGET}experts_of_one_tensor.py::test_"
_FAMILY = given("family")
_NAME, _FORM = given("name", COLUMN_OF), given("form", COLUMN_OF)


def _drafts_of_text(test: Any, case: Given) -> str:
    spec = test.SETTINGS[case["setting"]].get("spec")
    return "tokens" if spec is None else "hybrid" if spec.hybrid_suffix else spec.algorithm


def _quantised_on_load(test: Any, case: Given) -> str:
    return "FP8 on load" if case["quantization"] == "fp8" else "int8, int4"


# Of several tests of one cell, the table names the first.
SOURCES = (
    Source(f"{_ENGINE}smollm2.py::test_prompts_in_a_batch", "llama", ("real weights",)),
    Source(f"{_TARGET}models.py::test_logits_equal_transformers", _FAMILY, ("logits",)),
    Source(f"{_IDENTITY}.py::test_batch_equals_transformers", _FAMILY, (_drafts_of_text,)),
    Source(f"{_GGUF}file_gives_the_logits_and_greedy_tokens_of_transformers", _FAMILY, ("GGUF",)),
    Source(f"{_GGUF}glm_4_7_flash_loads_as_deepseek", "glm4moelite", ("GGUF",)),
    Source(f"{_GGUF}mimo_that_was_converted_as_qwen2_loads_as_qwen2", "mimo", ("GGUF",)),
    Source(
        f"{_ENGINE}gguf_engine.py::test_ngram_trees_say_what_transformers_says",
        _FAMILY,
        ("GGUF", "NGRAM"),
    ),
    Source(f"{_KEPT}a_model_keeps_what_it_can", "llama", ("GGUF kept",)),
    Source(f"{_KEPT}experts_stay_in_their_blocks", _FAMILY, ("GGUF kept",)),
    Source(
        f"{_KEPT}model_whose_matrices_all_stay_in_their_blocks_gives_the_dequantised_logits",
        _FAMILY,
        ("GGUF kept",),
    ),
    Source(f"{_KEPT}gated_delta_layers_stay_in_their_blocks", _FAMILY, ("GGUF kept",)),
    Source(
        f"{_KEPT}rows_in_rotary_pairs_are_reordered_in_their_blocks",
        lambda test, case: test.PAIRED[case["form"]][0],
        ("GGUF kept",),
    ),
    Source(
        f"{_TARGET}quantised_families.py"
        "::test_quantised_family_gives_the_logits_of_what_it_stands_for",
        _FAMILY,
        (_FORM,),
    ),
    Source(f"{_QUANTISED}greedy_tokens_on_a_cpu_equal_those_of_the_dense_model", "llama", (_NAME,)),
    Source(
        f"{_ONE_TENSOR}experts_of_one_tensor_say_what_dense_ones_say",
        lambda test, case: test.KINDS[case["name"]].family,
        (lambda test, case: COLUMN_OF[test.KINDS[case["name"]].form],),
    ),
    Source(
        f"{_ONE_TENSOR}llama_4_with_a_tensor_for_each_expert_says_what_the_dense_one_says",
        "llama4",
        (_FORM,),
    ),
    Source(f"{_QUANTISED}experts_are_dequantised", lambda test, case: tuple(test.SPARSE), (_NAME,)),
    Source(
        f"{_QUANTISED}experts_in_their_format_say_what_dense_ones_say",
        lambda test, case: tuple(test.SPARSE),
        (_NAME,),
    ),
    Source(
        f"{_TARGET}quantised_hybrid.py::test_fp8_blocks_of_projections_by_head_come_apart",
        "qwen3next",
        ("FP8 blocks",),
    ),
    Source(
        f"{_TARGET}experts_families.py"
        "::test_mxfp4_checkpoint_has_the_logits_of_its_dequantised_experts",
        "gptoss",
        ("MXFP4",),
    ),
    Source(
        f"{_QUANTISED}bfloat16_models_are_quantised_while_they_are_loaded",
        "llama",
        ("FP8 on load",),
    ),
    Source(
        f"{_TARGET}quantised_on_load.py::test_family_says_what_its_rounded_weights_say",
        _FAMILY,
        (_quantised_on_load,),
    ),
    Source(
        "tests/engine/test_split_prefill.py::test_quantised_weights_run_split",
        "llama",
        (_quantised_on_load,),
    ),
    Source(f"{_IDENTITY}_experts.py::test_experts_in_few_bits_answer", "qwen3moe", ("int8, int4",)),
    Source(f"{_KV}drafts_change_no_token", _FAMILY, ("FP8 KV", "NGRAM")),
    Source(f"{_KV}drafts_of_what_was_said_change_no_token", _FAMILY, ("FP8 KV", "NGRAM")),
    Source(f"{_KV}each_kind_of_drafts_changes_no_token", "llama", ("FP8 KV", given("drafts"))),
    Source(
        f"{_ENGINE}gguf_engine.py::test_each_kind_of_drafts_changes_no_token",
        "llama",
        (lambda test, case: "GGUF kept" if case["quantization"] else "GGUF", given("drafts")),
    ),
    Source(
        f"{_IDENTITY}_experts.py::test_each_kind_of_drafts_changes_no_token_of_experts_in_mxfp4",
        "gptoss",
        ("MXFP4", given("drafts")),
    ),
    Source(f"{_QUANTISED}drafts_change_no_token", "llama", (_NAME, given("drafts"))),
    Source(
        f"{_QUANTISED}drafts_change_no_token_of_what_is_quantised_while_loading",
        "llama",
        (_quantised_on_load, given("drafts")),
    ),
    Source(
        f"{_QUANTISED}drafts_change_no_token_of_quantised_experts",
        lambda test, case: tuple(test.SPARSE),
        ("FP8 blocks", "NGRAM"),
    ),
    Source(
        f"{_QUANTISED}rounds_in_graphs_with_quantised_experts_change_no_token",
        lambda test, case: tuple(test.SPARSE),
        (_NAME, "NGRAM"),
    ),
    Source(
        f"{_ENGINE}quantised_families_gpu.py::test_reordered_families_say_what_dense_ones_say",
        _FAMILY,
        (_FORM, "NGRAM"),
    ),
    Source(
        "tests/engine/test_pairs.py::test_options_together_change_no_token",
        "qwen3moe",
        ("W4A16", "NGRAM"),
        where=lambda case: case["family"] == "packed experts" and "drafts" in case["options"],
    ),
    Source(
        f"{_ENGINE}w4a16_rounds.py::test_rounds_of_more_than_16_rows_change_no_token",
        "llama",
        ("GPTQ", "EAGLE3"),
    ),
    Source(
        f"{_IDENTITY}_suffix.py::test_output_equals_plain_decoding", _FAMILY, (_drafts_of_text,)
    ),
    Source(
        f"{_IDENTITY}_neural.py::test_greedy_output_is_plain_decodings",
        "llama",
        (given("algorithm"),),
    ),
    Source(
        f"{_IDENTITY}_neural.py::test_suffix_matches_may_take_a_drafters_place",
        "llama",
        (given("algorithm"), "hybrid"),
    ),
    Source(
        f"{_IDENTITY}_families.py::test_random_drafts_change_no_token",
        lambda test, case: tuple(test.CASES),
        (given("algorithm"),),
    ),
    Source(
        f"{_IDENTITY}_families.py"
        "::test_standalone_changes_no_token_and_a_family_s_own_drafts_are_accepted",
        lambda test, case: tuple(test.CASES),
        ("STANDALONE",),
    ),
    Source(
        "tests/draft/test_dflash.py::test_blocks_follow_the_equations_in_batches_and_over_rounds",
        lambda test, case: case["family"] or "llama",
        ("DFLASH",),
    ),
    Source(f"{_IDENTITY}_experts.py::test_random_eagle3_changes_no_token", _FAMILY, ("EAGLE3",)),
    Source(
        f"{_MTP}published_mtp.py::test_published_layer_drafts_and_changes_no_token",
        lambda test, case: test.PUBLISHED[case["checkpoint"]].family,
        ("MTP",),
    ),
    Source(
        f"{_IDENTITY}_mtp.py::test_output_is_that_of_plain_decoding",
        lambda test, case: test.TARGETS[case["form"]],
        ("MTP",),
    ),
    Source(
        f"{_MTP}published_mtp.py::test_layer_in_fp8_blocks_computes_what_its_weights_say",
        lambda test, case: (),  # the draft's layer, and none of the target's
        ("FP8 blocks", "MTP"),
    ),
    Source(
        "tests/engine/test_registered_drafters.py"
        "::test_registered_drafter_matches_plain_decoding_on_the_host_and_in_device_rounds",
        "llama",
        (given("name"),),
    ),
    Source(
        "tests/train/test_eagle3_of_families.py"
        "::test_trained_draft_accepts_more_than_chance_and_serves",
        _FAMILY,
        ("train eagle3", "EAGLE3"),
    ),
)


@dataclass(frozen=True)
class Case:
    given: Given
    marks: frozenset[str]

    @property
    def runs(self) -> str:
        """By the markers that `make test` leaves out, and that a machine without a GPU skips."""
        if "gpu" in self.marks:
            return GPU
        return SLOW if "slow" in self.marks and "model" not in self.marks else ALWAYS


def cases_of(test: Any, function: str) -> list[Case]:
    """Of a test's file: each case of a function, but for parameters of fixtures."""
    of_file = getattr(test, "pytestmark", [])
    marks = [*(of_file if isinstance(of_file, list) else [of_file])]
    marks += getattr(getattr(test, function), "pytestmark", [])
    found = [Case({}, frozenset(mark.name for mark in marks))]
    for mark in marks:
        if mark.name == "parametrize":
            pairs = product(found, _values(*mark.args[:2]))
            found = [Case(one.given | two.given, one.marks | two.marks) for one, two in pairs]
    return found


def _values(names: Any, values: Any) -> Iterator[Case]:
    names = [one.strip() for one in names.split(",")] if isinstance(names, str) else names
    assert len(values), "an iterator would be read but once"
    for one in values:
        is_marked = hasattr(one, "marks")  # pytest.param
        several = one.values if is_marked else (one,) if len(names) == 1 else one
        marks = frozenset(mark.name for mark in one.marks) if is_marked else frozenset[str]()
        yield Case(dict(zip(names, several, strict=True)), marks)


# (Row, column) -> how it runs -> the first test that does.
Held = dict[tuple[str, str], dict[str, str]]


def held() -> Held:
    """Families by columns, and quantisations by drafters."""
    found = Held()
    for source in SOURCES:
        path, _, function = source.test.partition("::")
        test = import_module(path.removesuffix(".py").replace("/", "."))
        for case in cases_of(test, function):
            for pair in _pairs(source, test, case.given) if source.where(case.given) else ():
                found.setdefault(pair, {}).setdefault(case.runs, source.test)
    return found


def _pairs(source: Source, test: Any, case: Given) -> Iterator[tuple[str, str]]:
    """A quantised family with drafts stands in the column of its quantisation alone."""
    families, *columns = (
        one if isinstance(one, str) else one(test, case) for one in (source.family, *source.columns)
    )
    quantised = [one for one in columns if one in QUANTISATIONS]
    yield from product((families,) if isinstance(families, str) else families, quantised or columns)
    yield from product(quantised, [one for one in columns if one in DRAFTS])


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def words_of(test: str) -> set[str]:
    """Names and texts in a test, and in what it uses of its file."""
    path, _, function = test.partition("::")
    defined: dict[str, ast.AST] = {}
    for node in _parsed(ROOT / path).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        for one in targets:
            defined[getattr(one, "id", getattr(one, "name", ""))] = node
    words, waiting = set[str](), [function]
    while waiting:
        for node in ast.walk(defined.pop(waiting.pop(), ast.Pass())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            names = [getattr(node, field, None) for field in ("id", "arg", "attr")]
            found = [one for one in names if isinstance(one, str)]
            words.update(found)
            waiting += found
    return words
