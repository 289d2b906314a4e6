"""What the endpoint can do to a request: one function a scenario, found by the first segment of the path.

A scenario takes the exchange and its parameters (text by name, from the query or a script's step). It is a
plain function, or a coroutine where it waits; either ends with answer(), finish(), drop() or reset(), or leaves
the request hanging. `at_head` ones run when the head is in, before the body is read.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from typing import Callable, NamedTuple, Tuple
from urllib.parse import parse_qsl, unquote

from wire import Exchange, head_bytes

ENDLESS_BYTES = 64 << 20  # an endless answer ends here, so that a broken client cannot run us for ever
ENDLESS_SECONDS = 60


class Scenario(NamedTuple):
    run: Callable
    at_head: bool


class Step(NamedTuple):
    """What to do to one request: a scenario's name, the rest of the path, parameters as text."""
    name: str
    rest: str
    params: dict


SCENARIOS: dict = {}
OK = Step("ok", "", {})


def scenario(name: str, at_head: bool = False):
    def register(run: Callable) -> Callable:
        SCENARIOS[name] = Scenario(run, at_head)
        return run
    return register


def step_of_target(target: str) -> Step:
    """`/status/500?ms=20` as a step. An unknown first segment is `ok`; `/name=value` is `/name?value=value`."""
    path, _, query = target.partition("?")
    first, _, rest = path.lstrip("/").partition("/")
    params = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
    name, equals, value = first.partition("=")
    if equals and name in SCENARIOS:
        params["value"] = value
    if name in SCENARIOS:
        return Step(name, unquote(rest), params)
    return Step("ok", unquote(rest), params)


def step_of_json(value) -> Step:
    """A script's step: a target as text, or an object such as {"status": 500}, {"hang": true},
    {"delay_ms": 100, "status": 200}, {"scenario": "early", "then": "close"}. ValueError when it is neither."""
    if isinstance(value, str):
        step = step_of_target(value)
        if step.name == "script":
            raise ValueError("a script's step may not be a script")
        return step
    if not isinstance(value, dict):
        raise ValueError("a step is a text or an object, not %s" % json.dumps(value))
    params = {k: v if isinstance(v, str) else json.dumps(v) for k, v in value.items()}
    if "delay_ms" in params:
        params["ms"] = params.pop("delay_ms")
    name = params.pop("scenario", None)
    if name is None:
        named = [k for k, v in value.items() if k in SCENARIOS and k != "status" and v is not False]
        name = named[0] if named else "status" if "status" in value else "ok"
        if named:
            params.pop(name)
    if name not in SCENARIOS or name == "script":
        raise ValueError("no scenario %r for a step" % name)
    return Step(name, params.get("rest", ""), params)


def status_of(params: dict, default: int) -> int:
    return int(params.get("status", default))


def answer_by_params(exchange: Exchange, params: dict, default_status: int) -> None:
    """A well-formed answer: status, reason, body, retry_after, header (`Name: value`), close."""
    headers = []
    if "retry_after" in params:
        headers.append(("Retry-After", params["retry_after"]))
    if "header" in params:
        name, _, value = params["header"].partition(":")
        headers.append((name, value.strip()))
    exchange.connection.answer(exchange, status_of(params, default_status), headers,
                               params.get("body", "").encode(), params.get("reason"), "close" in params)


@scenario("ok")
@scenario("slow")
def ok(exchange: Exchange, rest: str, params: dict) -> None:
    answer_by_params(exchange, params, 200)


@scenario("status")
def status(exchange: Exchange, rest: str, params: dict) -> None:
    answer_by_params(exchange, params, int(rest.split("/")[0]) if rest else 200)


@scenario("redirect")
def redirect(exchange: Exchange, rest: str, params: dict) -> None:
    exchange.connection.answer(exchange, status_of(params, 302), [("Location", params.get("to", "/ok"))])


@scenario("hang")
async def hang(exchange: Exchange, rest: str, params: dict) -> None:
    """Holds the request until POST /release."""
    await exchange.connection.endpoint.release.wait(exchange)
    answer_by_params(exchange, params, 200)


@scenario("stall-read", at_head=True)
async def stall_read(exchange: Exchange, rest: str, params: dict) -> None:
    """Leaves the body in the socket until POST /release, then reads on and answers."""
    exchange.connection.transport.pause_reading()
    await exchange.connection.endpoint.release.wait(exchange)
    exchange.connection.transport.resume_reading()
    while not exchange.complete:
        await asyncio.sleep(0.005)
    answer_by_params(exchange, params, 200)


@scenario("slow-read", at_head=True)
async def slow_read(exchange: Exchange, rest: str, params: dict) -> None:
    """Reads the body through a tiny receive window, one read a `pause` (ms, default 50)."""
    connection = exchange.connection
    raw = connection.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    pause = float(params.get("pause", 50)) / 1000
    while not exchange.complete:
        connection.transport.pause_reading()
        await asyncio.sleep(pause)
        had = exchange.body_bytes
        connection.transport.resume_reading()
        while exchange.body_bytes == had and not exchange.complete:
            await asyncio.sleep(0.001)
    answer_by_params(exchange, params, 200)


@scenario("rst")
def rst(exchange: Exchange, rest: str, params: dict) -> None:
    exchange.connection.reset()


@scenario("rst-head", at_head=True)
def rst_head(exchange: Exchange, rest: str, params: dict) -> None:
    exchange.connection.reset()


@scenario("rst-answer")
async def rst_answer(exchange: Exchange, rest: str, params: dict) -> None:
    """A whole header block, half of the promised body, then (after `pause` ms, default 20) a reset."""
    connection, code = exchange.connection, status_of(params, 200)
    connection.send(head_bytes(code, [("Content-Length", 1000)]) + b"x" * 500)
    connection.acknowledge(exchange, code)
    await asyncio.sleep(float(params.get("pause", 20)) / 1000)
    connection.reset()


@scenario("rst-at")
async def rst_at(exchange: Exchange, rest: str, params: dict) -> None:
    """The first `value` bytes of a good answer, then (after `pause` ms, default 20) a reset."""
    connection, count = exchange.connection, int(params.get("value", 0))
    head = head_bytes(200, [("Content-Length", 2)])
    connection.send((head + b"ok")[:count])
    if count >= len(head):
        connection.acknowledge(exchange, 200)
    await asyncio.sleep(float(params.get("pause", 20)) / 1000)
    connection.reset()


@scenario("drop")
def drop(exchange: Exchange, rest: str, params: dict) -> None:
    exchange.connection.drop()


@scenario("drop-reused")
def drop_reused(exchange: Exchange, rest: str, params: dict) -> None:
    """Takes `after` (1) requests of a connection, then drops it with the next whole request in hand."""
    if exchange.sequence > int(params.get("after", 1)):
        exchange.connection.drop()
    else:
        answer_by_params(exchange, params, 200)


@scenario("close-after")
def close_after(exchange: Exchange, rest: str, params: dict) -> None:
    """Ends keep-alive after `value` requests of a connection; with `silent`, without saying so first."""
    if exchange.sequence < int(params.get("value", 1)):
        exchange.connection.answer(exchange, 200)
    elif "silent" in params:
        exchange.connection.send(head_bytes(200, [("Content-Length", 0)]))
        exchange.connection.acknowledge(exchange, 200)
        exchange.connection.finish(exchange, close=True)
    else:
        exchange.connection.answer(exchange, 200, close=True)


@scenario("early", at_head=True)
def early(exchange: Exchange, rest: str, params: dict) -> None:
    """Answers before the body is read. then: read on (default), close, or stall (keep it open, read nothing)."""
    then = params.get("then", "read")
    if then == "stall":
        exchange.connection.transport.pause_reading()
    code = status_of(params, 200)
    exchange.connection.send(head_bytes(code, [("Content-Length", 0)]))
    exchange.connection.acknowledge(exchange, code)
    exchange.connection.finish(exchange, close=then == "close")


def raw(name: str, data: bytes, acks: int = 0, note: str = "") -> None:
    """Registers a scenario that sends fixed bytes and closes. acks: the status that they do amount to."""
    def run(exchange: Exchange, rest: str, params: dict) -> None:
        exchange.note = note
        exchange.connection.send(data)
        if acks:
            exchange.connection.acknowledge(exchange, acks)
        exchange.connection.finish(exchange, close=True)
    SCENARIOS[name] = Scenario(run, False)


raw("garbage", b"\x00\x01\x02\xff\xfe not http at all \r\n\r\n", note="garbage")
raw("no-status", b"hello, this is an HTTP/0.9 body\n", note="no status line")
raw("nul-header", b"HTTP/1.1 200 OK\r\nX-Bad: a\x00b\r\nContent-Length: 0\r\n\r\n", note="NUL in a header")
raw("conflicting-length", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello", acks=200)
raw("half-headers", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Ha", note="half a header block, then closed")
raw("obs-fold", b"HTTP/1.1 200 OK\r\nX-Folded: one\r\n two\r\nContent-Length: 0\r\n\r\n", acks=200)
DIRTY = b"\x1b[31mred\x00\x07caf\xc3 \xf0\x9f\x98 \xff end\r\n"
raw("dirty-body", head_bytes(500, [("Content-Length", len(DIRTY))]) + DIRTY, acks=500)


@scenario("hang-headers")
async def hang_headers(exchange: Exchange, rest: str, params: dict) -> None:
    """Half a header block, then silence."""
    exchange.connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Ha")
    await exchange.connection.endpoint.release.wait(exchange)
    exchange.connection.drop()


@scenario("drip")
async def drip(exchange: Exchange, rest: str, params: dict) -> None:
    """A whole answer, a byte every `pause` ms (default 20)."""
    connection, code = exchange.connection, status_of(params, 200)
    for byte in head_bytes(code, [("Content-Length", 0)]):
        connection.send(bytes((byte,)))
        await asyncio.sleep(float(params.get("pause", 20)) / 1000)
    connection.acknowledge(exchange, code)
    connection.finish(exchange)


@scenario("hang-body")
async def hang_body(exchange: Exchange, rest: str, params: dict) -> None:
    """A whole header block, a body that never comes."""
    connection, code = exchange.connection, status_of(params, 200)
    connection.send(head_bytes(code, [("Content-Length", 1000)]) + b"x")
    connection.acknowledge(exchange, code)
    await connection.endpoint.release.wait(exchange)
    connection.drop()


async def pour(exchange: Exchange, piece: bytes, bytes_wanted: int) -> None:
    """Sends a piece again and again, as fast as the client reads, until it has had bytes_wanted or is gone."""
    connection, end = exchange.connection, asyncio.get_running_loop().time() + ENDLESS_SECONDS
    sent = 0
    while sent < bytes_wanted and await connection.drained() and asyncio.get_running_loop().time() < end:
        connection.send(piece)
        sent += len(piece)
        await asyncio.sleep(0)
    await connection.drained()


@scenario("endless-headers")
async def endless_headers(exchange: Exchange, rest: str, params: dict) -> None:
    exchange.note = "endless headers"
    exchange.connection.send(b"HTTP/1.1 200 OK\r\n")
    await pour(exchange, b"X-More: and more and more\r\n" * 64, ENDLESS_BYTES)
    exchange.connection.drop()


@scenario("endless-body")
async def endless_body(exchange: Exchange, rest: str, params: dict) -> None:
    connection, code = exchange.connection, status_of(params, 200)
    connection.send(head_bytes(code, [("Connection", "close")]))
    connection.acknowledge(exchange, code)
    await pour(exchange, b"x" * 16384, ENDLESS_BYTES)
    connection.drop()


@scenario("big-body")
async def big_body(exchange: Exchange, rest: str, params: dict) -> None:
    """An honest answer with `bytes` (1 MiB) of body."""
    connection, code, size = exchange.connection, status_of(params, 500), int(params.get("bytes", 1 << 20))
    connection.send(head_bytes(code, [("Content-Length", size)]))
    connection.acknowledge(exchange, code)
    await pour(exchange, b"x" * 1024, size - size % 1024)
    connection.send(b"x" * (size % 1024))
    connection.finish(exchange)


@scenario("gzip")
def gzip_bomb(exchange: Exchange, rest: str, params: dict) -> None:
    """An answer with `bytes` (64 MiB) of zeros as its body, compressed although nobody asked for it."""
    connection, code = exchange.connection, status_of(params, 500)
    body = gzip.compress(bytes(int(params.get("bytes", 64 << 20))), 1)
    connection.send(head_bytes(code, [("Content-Encoding", "gzip"), ("Content-Length", len(body))]) + body)
    connection.acknowledge(exchange, code)
    connection.finish(exchange)


@scenario("big-reason")
def big_reason(exchange: Exchange, rest: str, params: dict) -> None:
    """A reason phrase of `bytes` (16 KiB)."""
    exchange.connection.answer(exchange, status_of(params, 500), reason="r" * int(params.get("bytes", 16384)))


@scenario("flood-1xx")
async def flood_1xx(exchange: Exchange, rest: str, params: dict) -> None:
    """`n` informational blocks (default: endless) of `code` (102), then an ordinary answer."""
    block = head_bytes(int(params.get("code", 102)))
    count = int(params.get("n", 0))
    await pour(exchange, block if count else block * 64, len(block) * count if count else ENDLESS_BYTES)
    if count:
        answer_by_params(exchange, params, 200)
    else:
        exchange.connection.drop()


@scenario("script")
def script(exchange: Exchange, rest: str, params: dict) -> None:
    raise AssertionError("a script is resolved to its step before it runs")


def resolve(endpoint, exchange: Exchange) -> Tuple[Step, Scenario]:
    """The step for a request whose head is in: the first rule that matches, else its path, else `ok`.
    A script gives up its next step here, so the order of heads is the order of steps."""
    step = endpoint.rules.match(exchange) if endpoint.rules else None
    step = step or step_of_target(exchange.target)
    if step.name == "script":
        then = step.params.get("then")
        step = endpoint.scripts.draw(step.rest) if then == "random" else endpoint.scripts.next(step.rest, then == "repeat")
    return step, SCENARIOS[step.name]
