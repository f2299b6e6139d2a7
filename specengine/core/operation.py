"""How the server is watched and reached: metrics, TLS, other origins."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specengine.core.options import HIDDEN, option
from specengine.core.section import Section

_ORIGIN = re.compile(r"https?://[^/?#\s]+")


@dataclass(frozen=True, kw_only=True)
class OperationConfig(Section):
    """The part of ServerConfig that an operator sets and no request sees."""

    metrics_compat: str | None = option(
        None, "serve metrics under another server's names, too", (None, "vllm")
    )
    metrics_require_key: bool = option(False, "ask for an API key at /metrics")
    otlp_endpoint: str | None = option(
        None,
        "send a span a request to this OTLP/HTTP address, such as http://127.0.0.1:4318/v1/traces; "
        "needs the extra otel",
    )
    api_workers: int | None = option(
        None,
        "processes that speak HTTP, beside the engine's own; 0: one process does all; default: "
        "(cores - 2) / 2, from 1 to 8",
    )
    stream_interval: float = option(
        0.002,
        "least seconds between the events of a stream; tokens that come meanwhile are one event",
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds that a step of the engine, or a process that speaks HTTP, may hang before it is "
        "killed and started again; 0: for ever",
    )
    max_restarts: int = option(
        5, "restarts of a process within 10 minutes before the server gives up"
    )
    dashboard: bool = option(True, "show what the server does, at /dashboard")
    ssl_certfile: str | None = option(None, "PEM file of the certificate chain: serve HTTPS")
    ssl_keyfile: str | None = option(
        None, "PEM file of its private key, without a passphrase; default: in the certificate's"
    )
    admin_api_key: str | None = option(
        None,
        "bearer token of the operator, for /server_info, /flush_cache, /abort_request, /sleep, "
        "/wake_up, /is_sleeping and /update_weights_from_disk, which are closed without",
        is_secret=True,
    )
    cors_origins: str | None = option(
        None,
        "origins whose pages may call the server, separated by commas, such as "
        "https://example.org; * for all; default: none",
    )

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        given = self.cors_origins
        return () if given is None else tuple(one.strip() for one in given.split(","))

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    def _check_key(self, name: str) -> None:
        key = getattr(self, name)
        self._require(key != "", name, "must not be empty; leave it out to have none")
        # A printed configuration must not start a server whose key anyone knows.
        self._require(key != HIDDEN, name, "stands for a key that was not printed; give the key")

    def _check_ranges(self) -> None:
        self._check_key("admin_api_key")
        self._at_least(0, "api_workers", "stream_interval", "watchdog_timeout", "max_restarts")
        self._require(
            self.ssl_keyfile is None or self.ssl_certfile is not None,
            "ssl_keyfile",
            "name the certificate with --ssl-certfile",
        )
        self._require(
            self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://")),
            "otlp_endpoint",
            "must begin with http:// or https://",
        )
        self._require(
            all(one == "*" or _ORIGIN.fullmatch(one) for one in self.allowed_origins),
            "cors_origins",
            "must be * or origins such as https://example.org,http://localhost:3000",
        )
