"""`pagoda serve`: a gateway, engine cores and their workers on this machine, connected by private sockets."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagoda.processes import logs
from pagoda.processes.machine import available_cores
from pagoda.processes.ports import metrics_ports, take_address
from pagoda.processes.rundir import base_directory, runtime_dir
from pagoda.processes.startup import StartupView, announcement
from pagoda.processes.supervisor import ChildSpec, Supervisor, python_command
from pagoda.settings.flags import add_model_argument, add_options, given_flags
from pagoda.settings.options import CommonConfig, ModelSourceConfig, ServeConfig
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import Settings, child_environment, resolve, secrets, to_arguments
from pagoda.tools import checkpoints
from pagoda_engine_core.config import EngineConfig
from pagoda_gateway.config import GatewayConfig
from pagoda_gateway.store.opening import SCRATCH
from pagoda_proto import times
from pagoda_proto.pooling.kinds import GENERATE
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device_choice import device_of_worker

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_options(parser, "serve")


def main(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    settings = resolve("serve", given_flags(arguments, "serve"))
    common = settings.build(CommonConfig)
    logs.setup("supervisor", common.log_level, common.log_json)
    check(settings)
    with take_address(settings) as listener:
        model_dir = checkpoints.locate(settings.build(GatewayConfig).model, settings.build(ModelSourceConfig).revision)
        return _serve(settings, model_dir, listener, started)


def _serve(settings: Settings, model_dir: Path, listener: socket.socket, started: float) -> int:
    with runtime_dir(settings.build(ServeConfig).data_dir) as directory:
        tower = Tower(settings, model_dir, directory, listener, started)
        engines, workers = _counted("engine core", tower.engines), _counted("worker", tower.workers)
        log.info("starting a gateway, %s (%s) and %s for %s", engines, tower.gateway.engine, workers, model_dir)
        if not settings.build(GatewayConfig).store:
            log.info("files and batches are kept until this ends; --store sqlite:///path/store.db keeps them longer")
        try:
            return asyncio.run(Supervisor(tower.children(), tower).run())
        finally:
            tower.view.close()


def check(settings: Settings) -> None:
    """Raises ConfigError for settings that fit every tier and yet cannot be served."""
    given, serve = settings.build(GatewayConfig), settings.build(ServeConfig)
    refuse_model_among_names(given)
    metrics_ports(settings.build(EngineConfig).metrics_port, serve.num_engine_cores, given.port)
    base_directory(serve.data_dir)


def refuse_model_among_names(given: GatewayConfig) -> None:
    """A flag of several values swallows a MODEL behind it, and the bundled model would be served instead."""
    aliases = given.model_names[1:]
    taken = [name for name in aliases if not given.model or Path(name).exists()]
    if taken:
        raise ConfigError([f"served_model_name: {taken[-1]!a} is read as a name: put MODEL before the flags"])


def _counted(what: str, of: Sequence[object]) -> str:
    return f"{len(of)} {what}{'s' if len(of) > 1 else ''}"


class Tower:
    """The children of one `pagoda serve` and what they have reported so far."""

    def __init__(
        self, settings: Settings, model_dir: Path, directory: Path, listener: socket.socket, started: float
    ) -> None:
        self._settings = settings
        self._listen_fd = listener.fileno()  # shared by all lives, so that clients between two of them wait
        self._common = settings.build(CommonConfig)
        self._started = started
        given = settings.build(GatewayConfig)
        port = listener.getsockname()[1]
        count, first = settings.build(ServeConfig).num_engine_cores, settings.build(EngineConfig).metrics_port
        ports = metrics_ports(first, count, port)  # again, as `port` may have been chosen by the system
        self.engines = [self._engine_config(directory, index, its) for index, its in enumerate(ports)]
        self.gateway = settings.build(
            GatewayConfig,
            engine=",".join(engine.listen for engine in self.engines),
            model=str(model_dir),
            port=port,
            store=given.store or f"{SCRATCH}{directory / 'store.db'}",  # outlives a gateway, but not the tower
            served_model_name=given.served_model_name or checkpoints.served_name(given.model),
        )
        self.workers = self._worker_configs(str(model_dir))
        self._url, self._kind = "", GENERATE
        self._announced = False
        self._locked = False
        self.view = StartupView(as_json=self._common.log_json)

    def _engine_config(self, directory: Path, index: int, metrics_port: int) -> EngineConfig:
        return self._settings.build(
            EngineConfig,
            listen=f"unix:{directory}/core-{index}.sock",
            worker_endpoint=f"ipc://{directory}/work-{index}.sock",
            metrics_port=metrics_port,
        )

    def _worker_configs(self, model_dir: str) -> list[WorkerConfig]:
        count, given = self._settings.build(ServeConfig).workers, self._settings.build(WorkerConfig)
        threads = given.threads or max(1, available_cores() // count)
        return [
            self._settings.build(
                WorkerConfig,
                model=model_dir,
                engine=self.engines[index % len(self.engines)].worker_endpoint,
                worker_id=f"worker-{index}",
                threads=threads,
                workers_here=max(count, given.workers_here),
                device=device_of_worker(given.device, index),
            )
            for index in range(count)
        ]

    def children(self) -> list[ChildSpec]:
        """Gateway, engine cores and workers, in the order in which they are stopped."""
        gateway_bound_s = self.gateway.lame_duck_s + self.gateway.drain_timeout_s + times.GATEWAY_LEAVES_S
        plain = child_environment(PYTHONUNBUFFERED="1", GRPC_VERBOSITY="ERROR")  # otherwise gRPC logs every lost link
        return [
            ChildSpec(
                name="gateway", command=self._gateway_command, environment=plain | secrets(self.gateway),
                prepares=True, inherits=(self._listen_fd,),
                stop_order=0, stop_timeout_s=gateway_bound_s, silence_timeout_s=times.CHILD_SILENT_S,
            ),
            *(self._engine_spec(index, config, plain) for index, config in enumerate(self.engines)),
            *(self._worker_spec(config) for config in self.workers),
        ]  # fmt: skip

    def _engine_spec(self, index: int, config: EngineConfig, environment: dict[str, str]) -> ChildSpec:
        return ChildSpec(
            name="engine-core" if len(self.engines) == 1 else f"engine-core-{index}",
            command=lambda: self._command("engine-core", config), environment=environment,
            prepares=True, stop_order=1, stop_timeout_s=config.drain_timeout_s + times.ENGINE_CORE_STOPS_S,
            silence_timeout_s=times.CHILD_SILENT_S,
        )  # fmt: skip

    def _worker_spec(self, config: WorkerConfig) -> ChildSpec:
        threads = str(config.threads)
        # A worker has no use for numpy's threads, and a process should have only one thread when it forks.
        environment = child_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS="1")
        return ChildSpec(
            name=config.worker_id, command=lambda: self._command("worker", config), environment=environment,
            prepares=True, stop_order=2, stop_timeout_s=config.drain_timeout_s + times.WORKER_STOPS_S,
            silence_timeout_s=times.WORKER_SILENT_S,
        )  # fmt: skip

    def _gateway_command(self) -> list[str]:
        return [*self._command("gateway", self.gateway), f"--listen-fd={self._listen_fd}"]

    def _command(self, tier: str, config: Any) -> list[str]:
        log_flags = [f"--log-level={self._common.log_level}", *(["--log-json"] if self._common.log_json else [])]
        return python_command(tier, *to_arguments(config), *log_flags)

    def on_line(self, child: str, line: str) -> None:
        self.view.on_line(child, line)

    def on_event(self, child: str, event: dict[str, Any]) -> None:
        match child, event["event"]:
            case _, "loading":
                form = self.workers[0].quantization
                what = f"quantising to {form}" if form else "loading weights"
                self.view.loading(child, event["bytes"], event["of"], what)
            case _, "recording":
                self.view.recording(child, event["graphs"], event["of"])
            case _, "loaded":
                self.view.loaded(child)
            case "gateway", "listening":
                self._url, self._kind = event["url"], event.get("kind", GENERATE)
            case "gateway", "locked":
                self._locked = True
            case "gateway", "ready" if not self._announced:
                self._announced = True
                took = time.monotonic() - self._started
                self.view.announce(announcement(self._url, self.gateway, took, self._locked, self._kind))
