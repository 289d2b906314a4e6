"""HTTP/1.1 requests off the wire, as far as a receiver needs them, with every byte kept.

No http module here: the receiver has to see what really came, and to misbehave at any byte of its answer.
A connection is one object; it hands each request to its subclass as an Exchange, first when the head is in,
then when the body is whole. Requests on one connection are taken one after another; what a client pipelines
waits in the buffer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import Optional

MAX_HEAD_BYTES = 1 << 20
MAX_KEPT_BODY_BYTES = 64 << 20
REASONS = {
    100: "Continue", 101: "Switching Protocols", 102: "Processing", 103: "Early Hints", 200: "OK",
    201: "Created", 202: "Accepted", 204: "No Content", 206: "Partial Content", 301: "Moved Permanently",
    302: "Found", 303: "See Other", 304: "Not Modified", 307: "Temporary Redirect", 308: "Permanent Redirect",
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 409: "Conflict", 410: "Gone", 413: "Content Too Large",
    422: "Unprocessable Content", 429: "Too Many Requests", 500: "Internal Server Error",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}


class Malformed(Exception):
    """The client sent what is not an HTTP/1.x request; the text says where."""


class Exchange:
    """One request and what became of it. Times are seconds since the epoch, None while it has not happened.

    `complete`: the whole body arrived. `acked`: a well-formed, final 2xx header block was written to the
    socket in full, which is what a sender may take for a delivery (the answer's body does not matter).
    """

    __slots__ = ("connection", "number", "sequence", "head_at", "body_at", "answer_at", "method", "target",
                 "version", "lines", "fields", "body", "body_bytes", "trailers", "complete", "status", "acked",
                 "answered", "ended", "scenario", "note", "task")

    def __init__(self, connection: "HttpConnection", head: bytes):
        self.connection = connection
        self.number = self.sequence = 0
        self.head_at = time.time()
        self.body_at: Optional[float] = None
        self.answer_at: Optional[float] = None
        self.body = bytearray()
        self.body_bytes = 0
        self.trailers: list = []
        self.complete = self.acked = self.answered = self.ended = False
        self.status: Optional[int] = None
        self.scenario = ""
        self.note = ""
        self.task: Optional[asyncio.Task] = None
        self.lines = head.decode("latin-1").split("\r\n")
        words = self.lines.pop(0).split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Malformed("request line")
        self.method, self.target, self.version = words
        self.fields = {}
        for line in self.lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise Malformed("header line")
            self.fields.setdefault(name.lower(), value.strip())

    def keep_body(self, piece: bytes) -> None:
        """Counts every byte; keeps the first MAX_KEPT_BODY_BYTES of a body."""
        self.body_bytes += len(piece)
        room = MAX_KEPT_BODY_BYTES - len(self.body)
        self.body += piece if len(piece) <= room else piece[:room]


def head_bytes(status: int, headers=(), reason: Optional[str] = None) -> bytes:
    """A status line and header lines with their closing empty line. headers: (name, value) pairs."""
    text = REASONS.get(status, "Scripted") if reason is None else reason
    lines = ["HTTP/1.1 %d %s" % (status, text)] + ["%s: %s" % pair for pair in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class HttpConnection(asyncio.Protocol):
    """Parses requests and hands them to on_head(), on_request(), on_malformed() and on_lost()."""

    def __init__(self):
        self.transport: asyncio.Transport = None  # set by connection_made
        self.buffer = bytearray()
        self.exchange: Optional[Exchange] = None
        self.parse = self._parse_head
        self.left = 0
        self.requests = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = False
        self.ack_waits = False

    # What a subclass does.
    def on_head(self, exchange: Exchange) -> None: ...
    def on_request(self, exchange: Exchange) -> None: ...
    def on_end(self, exchange: Exchange) -> None: ...
    def on_malformed(self, raw: bytes, why: str) -> None: ...

    # What asyncio calls.
    def connection_made(self, transport) -> None:
        self.transport = transport
        # With a high mark of 0 pause_writing tells that the kernel has not taken everything yet.
        transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.advance()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()
        if self.ack_waits and self.exchange:
            self._acknowledged(self.exchange)
            self._end_if_done()

    def connection_lost(self, error) -> None:
        self.lost = True
        self.writable.set()
        if self.exchange:
            if error and not self.exchange.note:
                self.exchange.note = "connection lost: %s" % error
            self.end(self.exchange)
        elif self.buffer:
            self.on_malformed(bytes(self.buffer), "connection lost in the head")

    # Parsing: each step returns whether it got on.
    def advance(self) -> None:
        try:
            while not self.transport.is_closing() and self.parse():
                pass
        except Malformed as why:
            raw = bytes(self.buffer)
            self.buffer.clear()
            self.parse = self._wait
            if self.exchange:
                self.exchange.note = "malformed: %s" % why
            self.on_malformed(raw, "malformed: %s" % why)
            self.transport.close()

    def _wait(self) -> bool:
        return False

    def _parse_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self.buffer) > MAX_HEAD_BYTES:
                raise Malformed("head longer than %d bytes" % MAX_HEAD_BYTES)
            return False
        exchange = Exchange(self, bytes(self.buffer[:end]))
        fields = exchange.fields
        chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        try:
            self.left = 0 if chunked else int(fields.get("content-length", "0"))
        except ValueError:
            raise Malformed("content-length") from None
        del self.buffer[:end + 4]
        self.requests += 1
        exchange.sequence = self.requests
        self.exchange = exchange
        self.parse = self._parse_chunk_size if chunked else self._parse_body
        self.on_head(exchange)
        return True

    def _parse_body(self) -> bool:
        self._take()
        if self.left:
            return False
        self._body_complete()
        return True

    def _take(self) -> None:
        piece = bytes(self.buffer[:self.left])
        if piece:
            del self.buffer[:len(piece)]
            self.left -= len(piece)
            self.exchange.keep_body(piece)

    def _line(self) -> Optional[bytes]:
        end = self.buffer.find(b"\r\n")
        if end < 0:
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[:end + 2]
        return line

    def _parse_chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self.left = int(line.split(b";")[0], 16)
        except ValueError:
            raise Malformed("chunk size") from None
        self.parse = self._parse_chunk if self.left else self._parse_trailers
        return True

    def _parse_chunk(self) -> bool:
        self._take()
        if self.left or len(self.buffer) < 2:
            return False
        if self._line() != b"":
            raise Malformed("chunk end")
        self.parse = self._parse_chunk_size
        return True

    def _parse_trailers(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            self.exchange.trailers.append(line.decode("latin-1"))
        else:
            self._body_complete()
        return True

    def _body_complete(self) -> None:
        exchange = self.exchange
        exchange.complete = True
        exchange.body_at = time.time()
        self.parse = self._wait
        self.on_request(exchange)
        self._end_if_done()

    # Answering.
    def send(self, data: bytes) -> None:
        """Writes bytes as they are; nothing once the connection is gone."""
        if not self.lost:
            self.transport.write(data)

    async def drained(self) -> bool:
        """Waits until the kernel has taken what was sent. False when the connection is gone."""
        await self.writable.wait()
        return not self.lost

    def acknowledge(self, exchange: Exchange, status: int) -> None:
        """To be called right after the final header block was sent: notes the status, and the ack of a 2xx."""
        exchange.status = status
        exchange.answer_at = time.time()
        if 200 <= status <= 299 and not self.lost:
            if self.writable.is_set():
                exchange.acked = True
            else:
                self.ack_waits = True

    def _acknowledged(self, exchange: Exchange) -> None:
        self.ack_waits = False
        exchange.acked = True
        exchange.answer_at = time.time()

    def answer(self, exchange: Exchange, status: int, headers=(), body: bytes = b"", reason=None,
               close: bool = False) -> None:
        """A well-formed answer, and the exchange is over. close says `Connection: close` and does it."""
        pairs = list(headers)
        if status >= 200 and status not in (204, 304):
            pairs.append(("Content-Length", len(body)))
        if close:
            pairs.append(("Connection", "close"))
        self.send(head_bytes(status, pairs, reason) + body)
        self.acknowledge(exchange, status)
        self.finish(exchange, close)

    def finish(self, exchange: Exchange, close: bool = False) -> None:
        """The answer is out. Closing flushes what is still buffered."""
        exchange.answered = True
        if close or exchange.version == "HTTP/1.0" or exchange.fields.get("connection", "").lower() == "close":
            self.transport.close()
        elif exchange is self.exchange:
            self._end_if_done()

    def drop(self) -> None:
        """Closes at once, whatever is still unsent."""
        self.transport.abort()

    def reset(self) -> None:
        """Closes with a TCP RST."""
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _end_if_done(self) -> None:
        exchange = self.exchange
        if exchange and exchange.answered and exchange.complete and not self.ack_waits:
            self.end(exchange)
            if self.buffer:
                # Not at once: the parser may be this call's caller.
                asyncio.get_running_loop().call_soon(self.advance)

    def end(self, exchange: Exchange) -> None:
        """The exchange is over, one way or another: told once."""
        if exchange.ended:
            return
        exchange.ended = True
        if exchange is self.exchange:
            self.exchange = None
            self.parse = self._parse_head
        if exchange.task and exchange.task is not asyncio.current_task():
            exchange.task.cancel()
        self.on_end(exchange)
