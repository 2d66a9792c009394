"""``--metrics`` of commands that stay: health and metrics over HTTP, there from before a model is loaded to the end."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.service.http import Service


def add_metrics_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Declare ``--metrics``; ``more`` follows what it does in the help."""
    text = f"serve /healthz, /readyz and /metrics there{more}; logs become JSON lines"
    parser.add_argument("--metrics", metavar="HOST:PORT", help=text)


def metrics_service(address: str) -> Service:
    """A service that listens on ``address``, in the state ``loading``; to be entered.

    Raises:
        UsageError: it is no HOST:PORT.
        ConfigError: nothing can listen there.
        MissingDependencyError: prometheus-client is not installed.
    """
    from vericache_core.service.http import Service, split_address
    from vericache_core.service.logs import configure_logs
    from vericache_core.service.metrics import Metrics

    where, metrics = split_address(address), Metrics()
    service = Service(*where, metrics)
    configure_logs()
    return service


def show_engine(service: Service, engine: Engine) -> None:
    """Feed the metrics of ``service`` from ``engine``, and say that all is ready, unless it was told to stop meanwhile."""
    from vericache_core.service.watch import EngineWatch

    assert service.metrics is not None
    EngineWatch.attach(engine, service.metrics)
    service.ready()
