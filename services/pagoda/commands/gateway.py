"""The process of one gateway."""

from __future__ import annotations

import argparse
import time
from typing import Any

from pagoda.processes import tier
from pagoda.processes.ports import inherited, take_address
from pagoda.processes.process import run_async, run_guarded
from pagoda.processes.startup import announce, announcement
from pagoda.settings.flags import add_options
from pagoda.settings.options import ChildConfig, CommonConfig, ModelSourceConfig
from pagoda.settings.resolving import Settings
from pagoda.tools import checkpoints
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.pooling.kinds import GENERATE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "gateway")


def prepare(arguments: argparse.Namespace) -> int:
    """Import what every life needs, and load the text side for all of them."""
    settings, report = tier.begin("gateway", arguments)
    config = _config(settings)
    from pagoda_gateway.server import keep_text

    return run_guarded(lambda: keep_text(config), report)


def main(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    settings, report = tier.begin("gateway", arguments)
    listen_fd = settings.build(ChildConfig).listen_fd
    listener = take_address(settings) if listen_fd < 0 else inherited(listen_fd)
    config = _config(settings)

    url, locked, kind = "", False, GENERATE
    as_json = settings.build(CommonConfig).log_json

    def report_and_announce(event: dict[str, Any]) -> None:
        nonlocal url, locked, kind
        report(event)
        url, locked = event.get("url", url), locked or event["event"] == "locked"
        kind = event.get("kind", kind)
        if event["event"] == "ready" and config.startup_message:
            announce(announcement(url, config, time.monotonic() - started, locked, kind), as_json)

    from pagoda_gateway.server import serve

    return run_async(lambda stop: serve(config, listener, report_and_announce, stop), report)


def _config(settings: Settings) -> GatewayConfig:
    """The config with the directory of its model, which is downloaded if necessary."""
    given = settings.build(GatewayConfig)
    model_dir = checkpoints.locate(given.model, settings.build(ModelSourceConfig).revision, weights=False)
    name = given.served_model_name or checkpoints.served_name(given.model)
    return settings.build(GatewayConfig, model=str(model_dir), served_model_name=name)
