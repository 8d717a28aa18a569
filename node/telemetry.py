"""Logs: pretty in a terminal, JSON lines otherwise, always on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(level: str = "info", *, pretty: bool | None = None) -> None:
    """Configure structlog for this process; ``pretty`` None decides by the terminal."""
    pretty = sys.stderr.isatty() if pretty is None else pretty
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if pretty
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if pretty else "iso", utc=not pretty),
            structlog.processors.StackInfoRenderer(),
            _rounded,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    logging.getLogger("nats").setLevel(logging.ERROR)


def _rounded(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Floats to five digits: logs are for people, telemetry keeps the exact number."""
    for key, value in event.items():
        if isinstance(value, float):
            event[key] = float(f"{value:.5g}")
    return event
