"""The record of what came in: a JSON line a request, a short line for the oracle, and counters."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import time
from datetime import datetime
from typing import Optional
from urllib.parse import unquote

from wire import Exchange


def event_id(exchange: Exchange) -> str:
    return exchange.fields.get("idempotency-key", "")


def ordering_key(exchange: Exchange) -> str:
    """The key as the sender names it, decoded; the event id stands in for no key, as in the envelope's rule."""
    fields = exchange.fields
    return unquote(fields.get("ce-partitionkey", fields.get("forze_key", "")))


def as_json(exchange: Exchange) -> str:
    record = {
        "n": exchange.number, "connection": exchange.connection.number, "sequence": exchange.sequence,
        "listener": exchange.connection.listener, "head_at": exchange.head_at, "body_at": exchange.body_at,
        "answer_at": exchange.answer_at, "method": exchange.method, "target": exchange.target,
        "version": exchange.version, "headers": exchange.lines, "body_bytes": exchange.body_bytes,
        "complete": exchange.complete, "status": exchange.status, "acked": exchange.acked,
        "scenario": exchange.scenario,
    }
    if exchange.note:
        record["note"] = exchange.note
    if exchange.trailers:
        record["trailers"] = exchange.trailers
    try:
        record["body"] = exchange.body.decode("utf-8")
    except UnicodeDecodeError:
        record["body_base64"] = base64.b64encode(exchange.body).decode("ascii")
    return json.dumps(record, ensure_ascii=False)


def as_delivery(exchange: Exchange) -> str:
    """Tab-separated: n, head_at, answer_at, complete, acked, status, event id, key. Quick to read for many."""
    key = ordering_key(exchange).replace("\t", " ").replace("\n", " ").replace("\r", " ")
    return "%d\t%.6f\t%.6f\t%d\t%d\t%d\t%s\t%s" % (
        exchange.number, exchange.head_at, exchange.answer_at or 0, exchange.complete, exchange.acked,
        exchange.status or 0, event_id(exchange), key)


def as_text(exchange: Exchange) -> str:
    """A line for people: what arrived, and how long after it was staged (ce-time)."""
    fields, latency = exchange.fields, ""
    try:
        text = unquote(fields.get("ce-time", fields.get("forze_occurred_at", ""))).replace("Z", "+00:00")
        # Before Python 3.11 a fraction must have three or six digits.
        staged = datetime.fromisoformat(re.sub(r"\.\d+", lambda m: m[0].ljust(7, "0")[:7], text))
        latency = "%.2f ms" % ((exchange.head_at - staged.timestamp()) * 1000)
    except ValueError:
        pass
    return "%5d  %s  %s  type=%s  key=%s  %s  -> %s" % (
        exchange.number, time.strftime("%H:%M:%S", time.localtime(exchange.head_at)), event_id(exchange) or "-",
        unquote(fields.get("ce-type", fields.get("forze_event_type", "-"))), ordering_key(exchange) or "-",
        latency, exchange.status or "no answer")


class Recorder:
    """Counts at once; writes to the log in one go per turn of the event loop. The log is also its memory."""

    def __init__(self, path: str, printing: bool):
        self.file = open(path, "ab+", buffering=0)
        self.printing = printing
        self.number = 0
        self.waiting: list = []
        self.clear()

    def clear(self) -> None:
        """Forgets all but the running number."""
        self.flush()
        self.file.truncate(0)
        self.size = 0
        self.starts: list = []
        self.deliveries: list = []
        self.open: dict = {}
        self.counts = {"received": 0, "complete": 0, "acked": 0, "finished": 0, "malformed": 0, "connections": 0}
        self.events: set = set()

    def begin(self, exchange: Exchange) -> None:
        self.number += 1
        exchange.number = self.number
        self.counts["received"] += 1
        self.open[exchange.number] = exchange

    def body_complete(self, exchange: Exchange) -> None:
        if exchange.number in self.open:
            self.counts["complete"] += 1

    def end(self, exchange: Exchange) -> None:
        """Takes the finished exchange down; one that began before a clear() is no longer of interest."""
        if self.open.pop(exchange.number, None) is None:
            return
        self.counts["finished"] += 1
        if exchange.acked and exchange.complete:
            self.counts["acked"] += 1
            if event_id(exchange):
                self.events.add(event_id(exchange))
        self.deliveries.append(as_delivery(exchange))
        self._append(as_json(exchange))
        if self.printing:
            print(as_text(exchange), flush=True)

    def malformed(self, raw: bytes, why: str, connection) -> None:
        """Bytes that are no request get a line of their own."""
        self.counts["malformed"] += 1
        self.deliveries.append("0\t%.6f\t0\t0\t0\t0\t\t" % time.time())
        self._append(json.dumps({"n": 0, "connection": connection.number, "listener": connection.listener,
                                 "head_at": time.time(), "complete": False, "acked": False, "status": None,
                                 "note": why, "raw_base64": base64.b64encode(raw).decode("ascii")}))

    def _append(self, line: str) -> None:
        data = line.encode("utf-8") + b"\n"
        self.starts.append(self.size)
        self.size += len(data)
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self.waiting.append(data)

    def flush(self) -> None:
        data = memoryview(b"".join(self.waiting))
        self.waiting.clear()
        while data:
            data = data[self.file.write(data):]

    def summary(self) -> dict:
        return dict(self.counts, events=len(self.events), inflight=len(self.open))

    def lines_since(self, since: int) -> bytes:
        """The log from its line `since` (counted from 0, in the order in which requests ended)."""
        self.flush()
        if since >= len(self.starts):
            return b""
        return os.pread(self.file.fileno(), self.size - self.starts[since], self.starts[since])

    def inflight(self) -> list:
        return [{"n": e.number, "head_at": e.head_at, "target": e.target, "event_id": event_id(e),
                 "complete": e.complete, "body_bytes": e.body_bytes, "scenario": e.scenario}
                for e in self.open.values()]

    def close(self) -> None:
        for exchange in list(self.open.values()):
            exchange.note = exchange.note or "endpoint stopped"
            self.end(exchange)
        self.flush()
        self.file.close()


def replace_file(path: Optional[str], text: str) -> None:
    """Writes a file so that a reader sees all of it or none; to stdout without a path."""
    if path is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with open(path + ".new", "w", encoding="utf-8") as new:
        new.write(text)
    os.replace(path + ".new", path)
