"""A TCP link between a worker and its engine core that can fail in the ways real links do."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from typing import NamedTuple

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Pipe(NamedTuple):
    """One direction of a connection. `to_worker` says which."""

    source: socket.socket
    target: socket.socket
    to_worker: bool
    generation: int


class Link:
    """Forwards bytes to `port` on this host. One thread; use as a context manager.

    A cut connection becomes half-open: the end that is not notified keeps it for ever.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._swallowed: set[bool] = set()  # directions whose bytes are dropped, also on new connections
        self._dead_before = 0  # older connections drop everything
        self._generation = 1
        self.accepted = threading.Semaphore(0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for one in (*self._sockets, self._listener):
            one.close()

    def swallow(self, *, to_worker: bool, to_engine: bool) -> None:
        """From now on drop bytes in these directions; neither end is notified."""
        with self._lock:
            self._swallowed = {side for side, gone in ((True, to_worker), (False, to_engine)) if gone}

    def heal(self) -> None:
        """Let new connections work. Existing ones stay dead, as behind a router that has forgotten them."""
        with self._lock:
            self._swallowed = set()
            self._generation += 1
            self._dead_before = self._generation

    def reset(self) -> None:
        """Reset the worker's connections; the engine core is not notified."""
        with self._lock:
            pipes = [key.data for key in self._selector.get_map().values() if isinstance(key.data, Pipe)]
            for pipe in pipes:
                self._selector.unregister(pipe.source)
                if not pipe.to_worker:
                    pipe.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    pipe.source.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    if key.data is None:
                        self._accept()
                    elif key.fd in self._selector.get_map():
                        self._forward(key.data)

    def _accept(self) -> None:
        worker, _ = self._listener.accept()
        engine = socket.create_connection(self._target)
        self._sockets += [worker, engine]
        for pipe in (Pipe(worker, engine, False, self._generation), Pipe(engine, worker, True, self._generation)):
            self._selector.register(pipe.source, selectors.EVENT_READ, pipe)
        self.accepted.release()

    def _forward(self, pipe: Pipe) -> None:
        dead = pipe.generation < self._dead_before or pipe.to_worker in self._swallowed
        try:
            data = pipe.source.recv(65536)
            if data and not dead:
                pipe.target.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(pipe.source)
            if not dead:
                pipe.target.close()
                if pipe.target in [key.fileobj for key in self._selector.get_map().values()]:
                    self._selector.unregister(pipe.target)
