"""What the server takes from its clients: one list, a limit a line."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specengine.core.options import option
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class LimitConfig(Section):
    """Every limit is on; a larger number loosens it. docs/serving.md shows this list."""

    max_body_bytes: int = option(8 * 2**20, "bytes of a request's body, counted as it is read")
    max_buffered_bytes: int = option(256 * 2**20, "bytes of all bodies that are being read (503)")
    max_json_values: int = option(1_000_000, "values in a body: strings, numbers, lists, objects")
    max_bytes_per_token: int = option(
        16, "bytes of text for each token of the context; longer prompts are not tokenized"
    )
    max_prompts: int = option(128, "prompts of a request")
    max_choices: int = option(128, "prompts times n")
    max_messages: int = option(4096, "messages of a chat")
    max_stop_strings: int = option(16, "stop strings")
    max_stop_bytes: int = option(1024, "bytes of one stop string")
    max_stop_token_ids: int = option(1024, "stop_token_ids")
    max_logit_bias: int = option(1024, "tokens in logit_bias")
    max_grammar_bytes: int = option(65_536, "bytes of a schema or grammar, as JSON without spaces")
    max_tools_bytes: int = option(262_144, "bytes of tools, as JSON without spaces")
    max_metadata_bytes: int = option(65_536, "bytes of metadata, as JSON without spaces")
    grammar_timeout: float = option(5.0, "seconds that compiling a grammar may take")
    grammar_workers: int = option(2, "processes that compile grammars")
    max_queued_grammars: int = option(64, "grammars that wait for such a process (503)")
    max_connections: int = option(1000, "open connections (503)")
    max_header_bytes: int = option(16_384, "bytes of a request's first line and headers")
    header_timeout: float = option(10.0, "seconds from a request's first byte to its last header")
    body_timeout: float = option(60.0, "seconds from the last header to the end of the body")
    write_timeout: float = option(60.0, "seconds that a client may leave an answer unread")
    idle_timeout: int = option(60, "seconds that a connection stays open between requests")

    def _check_ranges(self) -> None:
        for one in fields(self):
            self._require(getattr(self, one.name) > 0, one.name, "must be greater than 0")
