"""The control side: a small HTTP API on a port of its own, and what it steers (scripts, rules, release)."""

from __future__ import annotations

import asyncio
import json
import random
from urllib.parse import parse_qs

from scenarios import OK, Step, step_of_json
from wire import Exchange, HttpConnection


class Scripts:
    """Named lists of steps, one consumed a request, or drawn."""

    def __init__(self):
        self.steps: dict = {}
        self.last: dict = {}

    def set(self, name: str, steps: list) -> None:
        self.steps[name] = list(steps)
        self.last.pop(name, None)

    def draw(self, name: str) -> Step:
        """Any step of the script, none of which is used up."""
        return random.choice(self.steps.get(name) or [OK])

    def next(self, name: str, repeat: bool) -> Step:
        """The next step; of a used-up or unknown script 200, or with repeat its last step again."""
        if self.steps.get(name):
            self.last[name] = self.steps[name].pop(0)
            return self.last[name]
        return self.last.get(name, OK) if repeat else OK


class Rules:
    """Steps for requests with a certain header value, whatever the path; `times` limits how often."""

    def __init__(self, values: list):
        self.rules = [[v["header"].lower(), v["value"], step_of_json(v["step"]), v.get("times", -1)]
                      for v in values]

    def __bool__(self) -> bool:
        return bool(self.rules)

    def match(self, exchange: Exchange):
        for rule in self.rules:
            header, value, step, times = rule
            if times != 0 and exchange.fields.get(header) == value:
                rule[3] -= times > 0
                return step
        return None


class Release:
    """Where hanging requests wait."""

    def __init__(self):
        self.waiting: list = []
        self.always = False

    async def wait(self, exchange: Exchange) -> None:
        if not self.always:
            future = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            await future

    def now(self, always: bool) -> int:
        """Lets those go that wait now, and with always all to come until a reset. Returns how many."""
        self.always = self.always or always
        held = [f for f in self.waiting if not f.done()]
        for future in held:
            future.set_result(None)
        self.waiting.clear()
        return len(held)


class ControlConnection(HttpConnection):
    """GET /count, /inflight, /requests?since=, /deliveries?since=; POST /script/NAME, /rules, /release, /reset."""

    def __init__(self, endpoint):
        super().__init__()
        self.endpoint = endpoint

    def on_request(self, exchange: Exchange) -> None:
        path, _, query = exchange.target.partition("?")
        arguments = parse_qs(query)
        try:
            status, body = self._serve(exchange, path, arguments)
        except (ValueError, KeyError, TypeError) as error:
            status, body = 400, {"error": str(error)}
        data = body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n"
        self.answer(exchange, status, [("Content-Type", "application/json")], data)

    def _serve(self, exchange: Exchange, path: str, arguments: dict):
        endpoint, recorder = self.endpoint, self.endpoint.recorder
        since = int(arguments.get("since", ["0"])[0])
        if since < 0:
            raise ValueError("since is negative")
        if exchange.method == "GET":
            if path == "/count":
                recorder.flush()
                return 200, recorder.summary()
            if path == "/inflight":
                return 200, recorder.inflight()
            if path == "/requests":
                return 200, recorder.lines_since(since)
            if path == "/deliveries":
                return 200, "".join(d + "\n" for d in recorder.deliveries[since:]).encode("utf-8")
        elif exchange.method == "POST":
            value = json.loads(exchange.body) if exchange.body else None
            if path.startswith("/script/"):
                endpoint.scripts.set(path[len("/script/"):], [step_of_json(v) for v in value])
                return 200, {"steps": len(value)}
            if path == "/rules":
                endpoint.rules = Rules(value)
                return 200, {"rules": len(value)}
            if path == "/release":
                return 200, {"released": endpoint.release.now("always" in (value or {}))}
            if path == "/reset":
                endpoint.reset()
                return 200, {}
        return 404, {"error": "no such call: %s %s" % (exchange.method, path)}
