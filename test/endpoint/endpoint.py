#!/usr/bin/env python3
"""A scripted HTTP receiver for tests: answers as the path says, records every byte. See README.md here.

Listens on 127.0.0.1 alone. Ends at SIGTERM or SIGINT, when --parent-pid is gone, and after --max-seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import ssl
import tempfile

from control import ControlConnection, Release, Rules, Scripts
from record import Recorder, replace_file
from scenarios import resolve
from wire import Exchange, HttpConnection

PARENT_POLL_SECONDS = 0.5
HOST = "127.0.0.1"
# TLS listeners by name: the certificate's base name in --tls-dir, and whether a client certificate is demanded.
TLS_LISTENERS = {"tls_good": ("good", False), "tls_wrong_host": ("wrong-host", False),
                 "tls_expired": ("expired", False), "tls_self_signed": ("self-signed", False),
                 "tls_client_cert": ("good", True)}


class DataConnection(HttpConnection):
    """A sender's connection: each request is recorded and answered by its scenario."""

    def __init__(self, endpoint: "Endpoint", listener: str):
        super().__init__()
        self.endpoint = endpoint
        self.listener = listener
        self.number = endpoint.next_connection()
        self.step = self.chosen = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.endpoint.connections.add(self)
        self.endpoint.recorder.counts["connections"] += 1

    def connection_lost(self, error) -> None:
        super().connection_lost(error)
        self.endpoint.connections.discard(self)

    def on_head(self, exchange: Exchange) -> None:
        self.endpoint.recorder.begin(exchange)
        self.step, self.chosen = resolve(self.endpoint, exchange)
        exchange.scenario = self.step.name
        if self.chosen.at_head:
            self._run(exchange)
        elif exchange.fields.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_request(self, exchange: Exchange) -> None:
        self.endpoint.recorder.body_complete(exchange)
        if not self.chosen.at_head:
            self._run(exchange)

    def on_end(self, exchange: Exchange) -> None:
        self.endpoint.recorder.end(exchange)

    def on_malformed(self, raw: bytes, why: str) -> None:
        self.endpoint.recorder.malformed(raw, why, self)

    def _run(self, exchange: Exchange) -> None:
        step, run = self.step, self.chosen.run
        delay = float(step.params.get("ms", 300 if step.name == "slow" else 0)) / 1000
        if delay:
            exchange.task = asyncio.ensure_future(self._run_later(exchange, step, run, delay))
        else:
            waits = run(exchange, step.rest, step.params)
            if waits is not None:
                exchange.task = asyncio.ensure_future(waits)

    async def _run_later(self, exchange: Exchange, step, run, delay: float) -> None:
        await asyncio.sleep(delay)
        waits = run(exchange, step.rest, step.params)
        if waits is not None:
            await waits


class Endpoint:
    """The listeners and the state that they share."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        if arguments.log:
            path, unlink = arguments.log, False
        else:
            handle, path = tempfile.mkstemp(prefix="endpoint-")
            os.close(handle)
            unlink = True
        self.recorder = Recorder(path, arguments.print)
        if unlink:
            os.unlink(path)
        self.connections: set = set()
        self.connection_count = 0
        self.stopping = asyncio.Event()
        self.scripts, self.rules, self.release = Scripts(), Rules([]), Release()

    def next_connection(self) -> int:
        self.connection_count += 1
        return self.connection_count

    def reset(self) -> None:
        """Forgets records, scripts and rules; what is in flight is dropped."""
        self.scripts, self.rules, self.release = Scripts(), Rules([]), Release()
        self.recorder.clear()
        for connection in list(self.connections):
            if connection.exchange:
                connection.drop()

    async def listen(self) -> dict:
        """Opens all listeners; returns their ports by name."""
        loop, servers = asyncio.get_running_loop(), {}
        servers["http"] = await loop.create_server(lambda: DataConnection(self, "http"), HOST,
                                                   self.arguments.port, backlog=1024)
        servers["control"] = await loop.create_server(lambda: ControlConnection(self), HOST, 0)
        if self.arguments.tls_dir:
            for name, (certificate, client) in TLS_LISTENERS.items():
                servers[name] = await loop.create_server(lambda name=name: DataConnection(self, name), HOST, 0,
                                                         ssl=self._tls(certificate, client))
        return {name: server.sockets[0].getsockname()[1] for name, server in servers.items()}

    def _tls(self, certificate: str, client: bool) -> ssl.SSLContext:
        base = self.arguments.tls_dir
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(os.path.join(base, certificate + ".crt"),
                                os.path.join(base, certificate + ".key"))
        if client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(os.path.join(base, "ca.crt"))
        return context

    async def watch_parent(self) -> None:
        """Ends the endpoint when its parent is gone, a zombie included if it is our own parent."""
        parent = self.arguments.parent_pid
        own = os.getppid() == parent
        while True:
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                break
            except PermissionError:
                pass
            if own and os.getppid() != parent:
                break
            await asyncio.sleep(PARENT_POLL_SECONDS)
        self.stopping.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.call_later(self.arguments.max_seconds, self.stopping.set)
        ports = await self.listen()
        replace_file(self.arguments.port_file,
                     "".join("%s=%d\n" % pair for pair in [("pid", os.getpid())] + list(ports.items())))
        watcher = loop.create_task(self.watch_parent()) if self.arguments.parent_pid else None
        await self.stopping.wait()
        if watcher:
            watcher.cancel()
        self.recorder.close()
        for connection in list(self.connections):
            connection.drop()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="port of the plain listener (0: any free one)")
    parser.add_argument("--port-file", help="where to write name=port lines, all at once (default: stdout)")
    parser.add_argument("--log", help="append a JSON line a request here (default: an unlinked file)")
    parser.add_argument("--tls-dir", help="folder made by certs.sh: opens the TLS listeners too")
    parser.add_argument("--print", action="store_true", help="print a readable line per request")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument("--max-seconds", type=float, default=1800, help="end after this long (default 1800)")
    return parser.parse_args()


async def main() -> None:
    await Endpoint(parse_arguments()).run()


if __name__ == "__main__":
    asyncio.run(main())
