"""Command-line flags out of dataclass fields."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specengine.core.config import EngineConfig
from specengine.core.config_sources import config_options, resolve_sources, sections, to_yaml
from specengine.core.options import Option, options_of
from specengine.core.sampling import SamplingParams

_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "ID=X"}

SAMPLING_HELP = {
    "max_tokens": "most tokens to generate; none: up to the context length",
    "temperature": "0 is greedy",
    "top_k": "keep the k best tokens; 0 keeps all",
    "top_p": "keep the smallest set of tokens with this probability",
    "min_p": "keep tokens at least this probable, relative to the best",
    "frequency_penalty": "subtracted for each time a token was generated",
    "presence_penalty": "subtracted once a token was generated",
    "repetition_penalty": "divides the logits of tokens seen in prompt or output",
    "logit_bias": "added to the logits of tokens, such as 50=-100,51=5",
    "seed": "makes sampling repeatable",
    "stop": "end before this text; may be given several times",
    "stop_token_ids": "end at these tokens",
    "include_stop_str_in_output": "end after the stop text or token instead",
    "min_tokens": "do not end before so many tokens",
    "ignore_eos": "do not end at the model's end-of-text token",
    "n": "choices to generate",
    "logprobs": "log-probabilities of so many alternatives a token, with --json",
    "prompt_logprobs": "the same for the prompt, with --json",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    option = sections()["model"].options()["model"]
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_help(option, option.help))


def add_config_arguments(
    parser: argparse.ArgumentParser, without: Iterable[str] = (), serves: bool = False
) -> None:
    """A flag for each field of EngineConfig but those `without`, --config and --print-config.
    serves: those of the HTTP server are among them."""
    left_out = {"model", *without}
    parser.set_defaults(serves=serves)
    if not serves:
        left_out |= {one.key for one in _server_options()} - {"log_level"}
    for name, section in sections().items():
        group = parser.add_argument_group(name)
        for option in section.options().values():
            if option.key not in left_out:
                _add(group, option, option.help)
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of these options (page_size: 16)"
    )
    group.add_argument(
        "--print-config", action="store_true", help="print the resulting configuration and exit"
    )


def _server_options() -> Iterator[Option]:
    for name in ("server", "limits"):
        yield from sections()[name].options().values()


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for option in options_of(SamplingParams).values():
        _add(group, option, SAMPLING_HELP[option.name])


def add_option_arguments(
    parser: argparse.ArgumentParser, title: str, options: Iterable[Option]
) -> None:
    """A flag for each of these options, in a group of their own."""
    group = parser.add_argument_group(title)
    for option in options:
        _add(group, option, option.help)


def config_of(args: argparse.Namespace) -> EngineConfig:
    """Flags over SPECENGINE_* over --config over defaults; --print-config ends the program here.
    Commands that do not serve leave the model's sampling defaults unread: their own flags say how
    tokens are chosen. Raises ConfigError."""
    config = resolve_sources(given(args, config_options()), os.environ, args.config)
    if args.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    if args.serves:
        return config
    return replace(config, server=replace(config.server, sampling_defaults="openai"))


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError or RequestError."""
    return SamplingParams(**given(args, options_of(SamplingParams)))


def _add(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    settings: dict[str, Any] = {"dest": option.key, "help": _help(option, text)}
    if option.base is bool:
        group.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, default=None, **settings
        )
        return
    if option.base is tuple:
        is_text = option.items[0] is str
        settings |= {"action": "append"} if is_text else {"nargs": "+"}
        settings["metavar"] = _METAVARS[option.items[0]]
    elif option.choices is not None:
        names = ["none" if choice is None else str(choice) for choice in option.choices]
        settings["metavar"] = "{" + ",".join(names) + "}"
    else:
        settings["metavar"] = _METAVARS[option.base]
    group.add_argument(option.flag, **settings)


def _help(option: Option, text: str) -> str:
    default = option.default
    says_default = default is None or default in ((), {}) or "default" in text
    shown = str(default).lower() if isinstance(default, bool) else default
    return (text if says_default else f"{text} (default: {shown})").replace("%", "%%")


def given(args: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """Values of the flags that were given, by key. Raises ConfigError where one does not fit."""
    values = {key: getattr(args, key, None) for key in options}
    return {key: _value(options[key], value) for key, value in values.items() if value is not None}


def _value(option: Option, value: Any) -> Any:
    if isinstance(value, str):
        return option.parse(value)
    if isinstance(value, list) and option.items[0] is not str:
        return option.parse(" ".join(value))
    return option.check(value)
