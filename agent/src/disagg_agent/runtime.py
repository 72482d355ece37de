"""What every process of a pod does at start: logs as JSON lines, signals, HTTP on a port or a Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from types import TracebackType

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

EXIT_CRASHED = 70
"""A thread of ours died of a bug: the process ends, because half of an agent is worse than none."""


class JsonLines(logging.Formatter):
    """One JSON object a line, with the keys given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _PLAIN},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(level: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def end_on_thread_crash() -> None:
    """End the process when a thread dies of an exception that nothing handles."""

    def hook(args: threading.ExceptHookArgs) -> None:
        info: tuple[type[BaseException], BaseException, TracebackType | None] | None = None
        if args.exc_value is not None:
            info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger(__name__).critical("thread crashed", exc_info=info)
        os._exit(EXIT_CRASHED)

    threading.excepthook = hook


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def serve_http(app: web.Application, where: str) -> web.AppRunner:
    """Serve at `unix:PATH` or `HOST:PORT` (IPv6 hosts in brackets); the caller cleans the runner up.

    Raises:
        ValueError: `where` is neither.
    """
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    site: web.BaseSite
    if where.startswith("unix:"):
        site = web.UnixSite(runner, where.removeprefix("unix:"))
    else:
        host, _, port = where.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{where!r} is neither unix:PATH nor HOST:PORT")
        site = web.TCPSite(runner, host.strip("[]"), int(port))
    await site.start()
    return runner
