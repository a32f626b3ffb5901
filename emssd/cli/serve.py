"""``emssd serve``: from options to a server that listens."""

from __future__ import annotations

import asyncio
import socket

import torch
import transformers

from emssd.cli.config import OnError, ServeConfig
from emssd.cli.intake import Failures, make_engine, sampling_of, to_requests
from emssd.cli.progress import loading_shown, show_messages
from emssd.cli.terminal import plain_console
from emssd.errors import ConfigError
from emssd.hooks.registry import Registry
from emssd.model.load.loading import ModelCache

try:
    import uvicorn

    from emssd.cli.server import Server
except ModuleNotFoundError as error:
    raise ConfigError(f"emssd serve needs {error.name}: pip install 'emssd[serve]'") from error

__all__ = ["run_server"]

_GRACE = 5.0  # seconds that running requests have after Ctrl-C
_MANY = 2**40  # steps of a server that lives long


def run_server(config: ServeConfig, registry: Registry) -> None:
    """Answer requests until Ctrl-C. Raises ConfigError: the options cannot be, or the address is not free."""
    config.model.check()
    sampling_of(config)
    if config.model.tensor_parallel:
        raise ConfigError("model.tensor_parallel=true is for jobs, and a server is one process; leave it out")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    console = plain_console(stderr=True)
    show_messages(console)
    with _listening(config) as listener:
        console.print(f"loading {config.model.path} …")
        with loading_shown(console):
            engine = make_engine(config, registry, ModelCache(), num_steps=lambda _: _MANY)
        failures = Failures(OnError.fail)
        to_requests(config, engine, [], failures)  # options that no request could be decoded with end it now
        server = Server(engine, config.model.path, lambda prompt: to_requests(config, engine, [prompt], failures))
        host, port = listener.getsockname()[:2]
        console.print(f"{config.model.path} answers at http://{host}:{port}/v1; Ctrl-C ends it", soft_wrap=True)
        options = uvicorn.Config(server.app, lifespan="off", ws="none", log_config=None)
        _Uvicorn(options, server).run(sockets=[listener])


def _listening(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at host={config.host} port={config.port}: {why}; choose others") from error


class _Uvicorn(uvicorn.Server):
    """A server that answers what runs when it is stopped: in full, or after some seconds with an error."""

    def __init__(self, options: uvicorn.Config, server: Server) -> None:
        super().__init__(options)
        self._close = server.shared.close

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits for all answers."""
        asyncio.get_running_loop().call_later(_GRACE, self._close)
        await super().shutdown(sockets)
