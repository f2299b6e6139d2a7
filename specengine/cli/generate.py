"""Complete one prompt in the terminal, without a server."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specengine.cli.args import (
    add_config_arguments,
    add_model_argument,
    add_sampling_arguments,
    config_of,
    sampling_of,
)
from specengine.cli.logs import set_up_logging
from specengine.core.errors import ConfigError, RequestError
from specengine.core.sampling import SamplingParams

if TYPE_CHECKING:
    from specengine.engine.loop import Engine
    from specengine.engine.outputs import RequestOutput

logger = logging.getLogger(__name__)

SERVER_ONLY = ("served_model_name", "max_queued_requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the prompt, as --prompt")
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="read it from a file; default: from stdin"
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="chat",
        action="store_true",
        default=None,
        help="the prompt is a user's message; the default where the model has a chat template",
    )
    form.add_argument(
        "--raw", dest="chat", action="store_false", default=None, help="continue it as it is"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_sampling_arguments(parser)
    add_config_arguments(parser, without=SERVER_ONLY)


def run(args: argparse.Namespace) -> int:
    config, sampling = config_of(args), sampling_of(args)
    prompt = read_prompt(args)
    set_up_logging(config.server.log_level)
    from specengine.engine.build import build_engine

    engine = build_engine(config)
    prompt_ids = encode(engine.parts.tokenizer, prompt, args.chat)
    start = perf_counter()
    streams = not args.json and sampling.n == 1
    finished = complete(engine, prompt_ids, sampling, streams)
    seconds = perf_counter() - start
    if args.json:
        import orjson  # JSON has no infinity: it writes null

        print(orjson.dumps(as_json(engine, finished, seconds)).decode())
    elif not streams:
        for output in finished:
            print(f"--- choice {output.index} ---\n{output.text}")
    log_speed(engine, finished, seconds)
    engine.close()
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    if args.text is not None and (args.prompt, args.prompt_file) != (None, None):
        other = "--prompt" if args.prompt is not None else "--prompt-file"
        raise ConfigError(f"the prompt is given twice, behind MODEL and as {other}: give one")
    given = args.text if args.prompt is None else args.prompt
    if given is not None:
        return str(given)
    if args.prompt_file is not None:
        try:
            return str(args.prompt_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --prompt-file {args.prompt_file}: {error}") from error
    if sys.stdin.isatty():
        raise ConfigError(
            "no prompt: give it behind MODEL, by --prompt or --prompt-file, or on stdin"
        )
    return sys.stdin.read()


def encode(tokenizer: Any, prompt: str, chat: bool | None) -> list[int]:
    """chat: through the chat template; None means where there is one."""
    from specengine.engine.chat_template import has_chat_template, render_chat
    from specengine.engine.tokens import encode_text

    if has_chat_template(tokenizer) if chat is None else chat:
        return render_chat(tokenizer, [{"role": "user", "content": prompt}])
    return encode_text(tokenizer, prompt)


def complete(
    engine: Engine, prompt_ids: list[int], sampling: SamplingParams, streams: bool
) -> list[RequestOutput]:
    """The finished choices in order; with `streams`, their text goes to stdout as it comes."""
    engine.add_request("generate", prompt_ids, sampling)
    finished: dict[int, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            if streams:
                print(output.text_delta, end="", flush=True)
            if output.finish_reason is not None:
                finished[output.index] = output
    if streams:
        print()
    for output in finished.values():
        assert output.finish_reason is not None
        if output.finish_reason.kind == "error":
            raise RequestError(output.finish_reason.message or "the engine gave the request up")
    return [finished[index] for index in sorted(finished)]


def as_json(engine: Engine, finished: list[RequestOutput], seconds: float) -> dict[str, Any]:
    made = sum(len(output.token_ids) for output in finished)
    return {
        "model": engine.parts.model_name,
        "prompt_tokens": finished[0].num_prompt_tokens,
        "cached_tokens": finished[0].num_cached_tokens,
        "completion_tokens": made,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(made / seconds, 2),
        "choices": [choice_as_json(output) for output in finished],
    }


def choice_as_json(output: RequestOutput) -> dict[str, Any]:
    from specengine.engine.outputs import speculative_metrics

    assert output.finish_reason is not None
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason.kind,
        "logprobs": [asdict(entry) for entry in output.all_logprobs],
        "prompt_logprobs": [entry and asdict(entry) for entry in output.prompt_logprobs],
        "metrics": {"speculative_decoding": speculative_metrics(output.spec)},
    }


def log_speed(engine: Engine, finished: list[RequestOutput], seconds: float) -> None:
    from specengine.core.spec_stats import SpecStats
    from specengine.engine.outputs import add_stats, depth_line

    spec = SpecStats()
    for output in finished:
        add_stats(spec, output.spec)
    made = sum(len(output.token_ids) for output in finished)
    logger.info(
        "%d tokens in %.2f s: %.1f tok/s; accepted length %.2f (bonus token included)%s",
        made,
        seconds,
        made / seconds,
        spec.mean_acceptance_length,
        "; LOSSY: not what the model alone says" if spec.is_lossy else "",
    )
    if engine.parts.config.spec.algorithm is not None:
        logger.info("depth of drafts: %s", depth_line(spec))
