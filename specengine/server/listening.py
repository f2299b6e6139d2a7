"""Where a server listens, and what it checks before: its address, its keys, its certificate.

Nothing here needs FastAPI: a supervisor, which never serves, imports no more than this.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError

# Seconds that connections get to close once nothing runs any more.
ENDING = 10
MOST_KEY = 16_384  # characters; a request's headers have no room for more


def read_keys(config: ServerConfig) -> list[str]:
    """The keys of which requests must carry one; none where they need none. Raises ConfigError."""
    keys = [] if config.api_key is None else [config.api_key]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --api-key-file: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(
                f"--api-key-file {config.api_key_file} holds no key; write one a line"
            )
        keys += found
    longest = max(map(len, keys), default=0)
    if longest > MOST_KEY:
        raise ConfigError(
            f"a key of --api-key or --api-key-file has {longest} characters, and no request can "
            f"carry more than {MOST_KEY}; give a shorter one"
        )
    return keys


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket; connections wait in it until the server runs."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another "
            "--host or --port (0 takes any free port)"
        ) from error


def ready(url: str, model: str, defaults: Mapping[str, float]) -> str:
    """What the log says of an engine that serves there. defaults: of sampling."""
    others = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    told = f"; {others} unless a request says other (generation_config.json)" if others else ""
    return f"ready: {url} serves {model}{told}"


def address(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError where the certificate or its key cannot be used."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password that is given: OpenSSL would ask for one at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: "")
    except (OSError, ssl.SSLError) as error:
        names = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise ConfigError(
            f"cannot use --ssl-certfile, --ssl-keyfile ({names}): {error}; they must be PEM files "
            "that belong together, the key without a passphrase"
        ) from error
