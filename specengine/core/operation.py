"""How the server is watched and reached: metrics, TLS, other origins."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specengine.core.options import option
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
    dashboard: bool = option(True, "show what the server does, at /dashboard")
    ssl_certfile: str | None = option(None, "PEM file of the certificate chain: serve HTTPS")
    ssl_keyfile: str | None = option(
        None, "PEM file of its private key, without a passphrase; default: in the certificate's"
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

    def _check_ranges(self) -> None:
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
