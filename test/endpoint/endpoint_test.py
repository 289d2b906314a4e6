#!/usr/bin/env python3
"""Tests of the scripted endpoint itself: each misbehaviour is really on the wire, the records are right."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 10  # seconds that any wait may take


def wait_until(condition, what: str):
    """The first truthy value of condition(); fails after LIMIT seconds."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError("waited in vain for " + what)


class Running:
    """An endpoint process with its ports and control calls."""

    def __init__(self, folder: str, *options: str):
        self.log = os.path.join(folder, "log")
        ports = os.path.join(folder, "ports")
        self.process = subprocess.Popen([sys.executable, os.path.join(HERE, "endpoint.py"), "--port-file", ports,
                                         "--log", self.log, "--max-seconds", "120", *options],
                                        stdout=subprocess.PIPE)
        wait_until(lambda: os.path.exists(ports) or self.process.poll() is not None, "the port file")
        with open(ports, encoding="utf-8") as lines:
            self.ports = {k: int(v) for k, v in (line.strip().split("=") for line in lines)}

    def control(self, method: str, path: str, value=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["control"], timeout=LIMIT)
        connection.request(method, path, None if value is None else json.dumps(value))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, data

    def count(self) -> dict:
        return json.loads(self.control("GET", "/count")[1])

    def records(self) -> list:
        return [json.loads(line) for line in self.control("GET", "/requests")[1].splitlines()]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LIMIT)
        self.process.stdout.close()
        return code


def request(path: str, body: bytes = b"hello", *headers: str, method: str = "POST") -> bytes:
    lines = ["%s %s HTTP/1.1" % (method, path), "Host: test", "Content-Length: %d" % len(body), *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class EndpointTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="endpoint-test-")
        cls.certificates = os.path.join(cls.folder, "tls")
        subprocess.run([os.path.join(HERE, "certs.sh"), cls.certificates], check=True)
        cls.endpoint = Running(cls.folder, "--tls-dir", cls.certificates)

    @classmethod
    def tearDownClass(cls):
        code = cls.endpoint.stop()
        shutil.rmtree(cls.folder)
        assert code == 0, code

    def setUp(self):
        self.endpoint.control("POST", "/reset")

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.endpoint.ports["http"]), LIMIT)
        self.addCleanup(sock.close)
        return sock

    def read_all(self, sock) -> bytes:
        data = b""
        while True:
            piece = sock.recv(65536)
            if not piece:
                return data
            data += piece

    def read_answer(self, sock) -> bytes:
        """One answer with Content-Length, or one without a body."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = sock.recv(1)
            self.assertTrue(piece, "closed after %r" % data)
            data += piece
        for line in data.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                left = int(line.split(b":")[1])
                while left:
                    piece = sock.recv(left)
                    self.assertTrue(piece)
                    data, left = data + piece, left - len(piece)
        return data

    def ask(self, path: str, body: bytes = b"hello", *headers: str) -> bytes:
        """One request on a connection of its own, answered in good order."""
        sock = self.connect()
        sock.sendall(request(path, body, *headers))
        return self.read_answer(sock)

    def raw(self, path: str) -> bytes:
        sock = self.connect()
        sock.sendall(request(path))
        return self.read_all(sock)

    def only_record(self) -> dict:
        wait_until(lambda: self.endpoint.count()["finished"] == 1, "one finished request")
        return self.endpoint.records()[0]

    # Records.
    def test_records_every_byte_in_order(self):
        self.ask("/anything/at/all?x=1", b"\xff\x00z", "X-B: 1", "x-a:  two ", "X-B: 3", "Idempotency-Key: e1",
                 "ce-partitionkey: k%201")
        record = self.only_record()
        self.assertEqual(record["headers"], ["Host: test", "Content-Length: 3", "X-B: 1", "x-a:  two ", "X-B: 3",
                                             "Idempotency-Key: e1", "ce-partitionkey: k%201"])
        self.assertEqual((record["method"], record["target"], record["version"]),
                         ("POST", "/anything/at/all?x=1", "HTTP/1.1"))
        self.assertEqual(base64.b64decode(record["body_base64"]), b"\xff\x00z")
        self.assertTrue(record["complete"] and record["acked"])
        self.assertEqual(record["status"], 200)
        self.assertLessEqual(record["head_at"], record["body_at"])
        self.assertLessEqual(record["body_at"], record["answer_at"])
        fields = self.endpoint.control("GET", "/deliveries")[1].decode().rstrip("\n").split("\t")
        self.assertEqual(fields[3:], ["1", "1", "200", "e1", "k 1"])
        with open(self.endpoint.log, encoding="utf-8") as log:
            self.assertEqual([json.loads(line) for line in log], [record])

    def test_keep_alive_pipelining_and_chunks(self):
        sock = self.connect()
        chunked = (b"POST /ok HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n"
                   b"X-Trailer: t\r\n\r\n")
        sock.sendall(chunked + request("/slow?ms=20", b"second"))
        self.read_answer(sock)
        self.read_answer(sock)
        for byte in request("/ok", "dr\u00fcben".encode()):
            sock.send(bytes((byte,)))
        self.read_answer(sock)
        records = self.endpoint.records()
        self.assertEqual([r["body"] for r in records], ["abcdefg", "second", "dr\u00fcben"])
        self.assertEqual([r["sequence"] for r in records], [1, 2, 3])
        self.assertEqual(len({r["connection"] for r in records}), 1)
        self.assertEqual(records[0]["trailers"], ["X-Trailer: t"])

    def test_partial_body_is_not_complete(self):
        sock = self.connect()
        sock.sendall(request("/ok", b"x" * 100)[:-40])
        wait_until(lambda: self.endpoint.count()["received"] == 1, "the head")
        sock.close()
        record = self.only_record()
        self.assertEqual((record["complete"], record["acked"], record["status"], record["body_bytes"]),
                         (False, False, None, 60))

    def test_malformed_requests_are_kept(self):
        for raw in (b"BLAH\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
                    b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET / HT"):
            sock = self.connect()
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            self.assertEqual(self.read_all(sock), b"")
        kept = [base64.b64decode(r["raw_base64"]) for r in self.endpoint.records()]
        self.assertEqual(len(kept), 4)
        self.assertEqual(kept[0], b"BLAH\r\n\r\n")
        self.assertEqual(kept[3], b"GET / HT")

    # Answers.
    def test_statuses_and_parameters(self):
        for status in (204, 299, 302, 404, 500):
            answer = self.ask("/status/%d" % status)
            self.assertTrue(answer.startswith(b"HTTP/1.1 %d " % status), answer)
        self.assertIn(b"Retry-After: 2\r\n", self.ask("/status/429?retry_after=2"))
        self.assertIn(b"Location: http://x/\r\n", self.ask("/redirect?to=http%3A%2F%2Fx%2F"))
        self.assertTrue(self.ask("/status/500?body=why&reason=Odd").endswith(b"\r\n\r\nwhy"))
        self.assertEqual([r["acked"] for r in self.endpoint.records()], [True] * 2 + [False] * 6)

    def test_delay(self):
        begin = time.monotonic()
        self.ask("/status/201?ms=120")
        self.assertGreaterEqual(time.monotonic() - begin, 0.12)

    def test_fixed_bad_answers(self):
        cases = {"garbage": (b"\x00\x01\x02", None), "no-status": (b"hello", None),
                 "nul-header": (b"HTTP/1.1 200 OK\r\nX-Bad: a\x00b", None),
                 "conflicting-length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7", 200),
                 "half-headers": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Ha", None),
                 "obs-fold": (b"HTTP/1.1 200 OK\r\nX-Folded: one\r\n two\r\n", 200),
                 "dirty-body": (b"HTTP/1.1 500 ", 500)}
        for name, (start, status) in cases.items():
            with self.subTest(name):
                self.endpoint.control("POST", "/reset")
                self.assertTrue(self.raw("/" + name).startswith(start))
                record = self.only_record()
                self.assertEqual((record["status"], record["acked"]), (status, status == 200))

    def test_half_headers_have_no_end(self):
        self.assertNotIn(b"\r\n\r\n", self.raw("/half-headers"))

    def test_drop_and_resets(self):
        self.assertEqual(self.raw("/drop"), b"")
        for path in ("/rst", "/rst-head"):
            with self.subTest(path):
                with self.assertRaises(ConnectionResetError):
                    self.raw(path)
        self.assertEqual([r["status"] for r in self.endpoint.records()], [None] * 3)

    def test_reset_in_the_answer(self):
        sock = self.connect()
        sock.sendall(request("/rst-answer"))
        data = b""
        with self.assertRaises(ConnectionResetError):
            while True:
                piece = sock.recv(65536)
                self.assertTrue(piece, "closed in good order")
                data += piece
        self.assertIn(b"\r\n\r\nxxx", data)

    def test_reset_at_a_byte(self):
        for count, acked in ((0, False), (10, False), (37, False), (38, True), (40, True)):
            with self.subTest(count):
                self.endpoint.control("POST", "/reset")
                sock = self.connect()
                sock.sendall(request("/rst-at=%d" % count))
                had = b""
                with self.assertRaises(ConnectionResetError):
                    while True:
                        piece = sock.recv(100)
                        self.assertTrue(piece)
                        had += piece
                self.assertEqual(had, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"[:count])
                self.assertEqual(self.only_record()["acked"], acked)

    def test_compressed_body(self):
        head, body = self.ask("/gzip?bytes=100000&status=200").split(b"\r\n\r\n", 1)
        self.assertIn(b"Content-Encoding: gzip", head)
        self.assertLess(len(body), 2000)
        self.assertEqual(gzip.decompress(body), bytes(100000))

    def test_drop_of_a_reused_connection(self):
        sock = self.connect()
        sock.sendall(request("/drop-reused"))
        self.read_answer(sock)
        sock.sendall(request("/drop-reused", b"again"))
        self.assertEqual(self.read_all(sock), b"")
        self.assertEqual([(r["complete"], r["acked"]) for r in self.endpoint.records()],
                         [(True, True), (True, False)])

    def test_close_after(self):
        for query, told in (("", True), ("?silent", False)):
            with self.subTest(query):
                sock = self.connect()
                sock.sendall(request("/close-after=2" + query))
                self.assertNotIn(b"Connection: close", self.read_answer(sock))
                sock.sendall(request("/close-after=2" + query))
                self.assertEqual(b"Connection: close" in self.read_all(sock), told)

    def test_early_answer_before_the_body(self):
        sock = self.connect()
        sock.sendall(request("/early", b"x" * 10)[:-10])
        self.assertTrue(self.read_answer(sock).startswith(b"HTTP/1.1 200"))
        self.assertEqual(self.endpoint.count()["complete"], 0)
        sock.sendall(b"x" * 10)
        record = self.only_record()
        self.assertTrue(record["complete"] and record["acked"])
        self.assertLess(record["answer_at"], record["body_at"])

    def test_early_answer_and_close(self):
        sock = self.connect()
        sock.sendall(request("/early?then=close&status=202", b"x" * 10)[:-10])
        self.assertTrue(self.read_all(sock).startswith(b"HTTP/1.1 202"))
        record = self.only_record()
        self.assertEqual((record["complete"], record["acked"]), (False, True))

    def test_unread_body_stays_in_the_socket(self):
        for path in ("/stall-read", "/early?then=stall"):
            with self.subTest(path):
                sock = self.connect()
                sock.setblocking(False)
                whole, sent = request(path, b"x" * (32 << 20)), 0
                while select.select([], [sock], [], 0.2)[1]:
                    sent += sock.send(whole[sent:sent + 65536])
                self.assertLess(sent, len(whole))

    def test_slow_read(self):
        sock = self.connect()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        whole, sent, begin = request("/slow-read?pause=2", b"x" * 200000), 0, time.monotonic()
        while sent < len(whole):
            self.assertTrue(select.select([], [sock], [], LIMIT)[1])
            sent += sock.send(whole[sent:sent + 65536])
        sock.setblocking(True)
        sock.settimeout(LIMIT)
        self.assertTrue(self.read_answer(sock).startswith(b"HTTP/1.1 200"))
        self.assertGreater(time.monotonic() - begin, 0.03)
        self.assertTrue(self.only_record()["complete"])

    def test_hang_and_release(self):
        sock = self.connect()
        sock.sendall(request("/hang", b"held", "Idempotency-Key: e7"))
        held = wait_until(lambda: [r for r in json.loads(self.endpoint.control("GET", "/inflight")[1])
                                   if r["complete"]], "the hanging request")
        self.assertEqual(held[0]["event_id"], "e7")
        self.assertEqual(json.loads(self.endpoint.control("POST", "/release")[1]), {"released": 1})
        self.assertTrue(self.read_answer(sock).startswith(b"HTTP/1.1 200"))
        self.assertTrue(self.only_record()["acked"])

    def test_hanging_answers(self):
        for path, start in (("/hang-headers", b"X-Ha"), ("/hang-body", b"\r\n\r\nx")):
            with self.subTest(path):
                self.endpoint.control("POST", "/reset")
                sock = self.connect()
                sock.sendall(request(path))
                data = b""
                while not data.endswith(start):
                    data += sock.recv(65536)
                self.endpoint.control("POST", "/release")
                self.assertEqual(self.read_all(sock), b"")
                self.assertEqual(self.only_record()["acked"], path == "/hang-body")

    def test_drip(self):
        sock = self.connect()
        begin = time.monotonic()
        sock.sendall(request("/drip?pause=2"))
        answer = self.read_answer(sock)
        self.assertGreater(time.monotonic() - begin, 0.002 * (len(answer) - 1))
        self.assertTrue(self.only_record()["acked"])

    def test_endless_answers(self):
        for path, acked in (("/endless-headers", False), ("/endless-body", True), ("/flood-1xx", False)):
            with self.subTest(path):
                self.endpoint.control("POST", "/reset")
                sock = self.connect()
                sock.sendall(request(path))
                had = 0
                while had < 4 << 20:
                    piece = sock.recv(1 << 20)
                    self.assertTrue(piece)
                    had += len(piece)
                sock.close()
                self.assertEqual(self.only_record()["acked"], acked)

    def test_counted_1xx_and_big_parts(self):
        answer = self.connect()
        answer.sendall(request("/flood-1xx?n=3&code=103"))
        for _ in range(3):
            self.assertTrue(self.read_answer(answer).startswith(b"HTTP/1.1 103"))
        self.assertTrue(self.read_answer(answer).startswith(b"HTTP/1.1 200"))
        self.assertEqual(len(self.ask("/big-body?bytes=100001").split(b"\r\n\r\n")[1]), 100001)
        self.assertIn(b"r" * 6000, self.ask("/big-reason?bytes=6000"))

    # Control.
    def test_scripts(self):
        steps = [{"status": 500}, {"delay_ms": 5, "status": 202}, "/status/429?retry_after=7", {"drop": True}]
        self.assertEqual(self.endpoint.control("POST", "/script/a", steps)[0], 200)
        self.assertTrue(self.ask("/script/a").startswith(b"HTTP/1.1 500"))
        self.assertTrue(self.ask("/script/a").startswith(b"HTTP/1.1 202"))
        self.assertIn(b"Retry-After: 7", self.ask("/script/a"))
        self.assertEqual(self.raw("/script/a"), b"")
        self.assertTrue(self.ask("/script/a").startswith(b"HTTP/1.1 200"))
        self.endpoint.control("POST", "/script/b", [{"status": 500}, {"status": 418}])
        statuses = [self.ask("/script/b?then=repeat")[9:12] for _ in range(3)]
        self.assertEqual(statuses, [b"500", b"418", b"418"])

    def test_random_script(self):
        self.endpoint.control("POST", "/script/dice", ["/status/201", "/status/202"])
        seen = {self.ask("/script/dice?then=random")[:12] for _ in range(60)}
        self.assertEqual(seen, {b"HTTP/1.1 201", b"HTTP/1.1 202"})

    def test_rules(self):
        self.endpoint.control("POST", "/rules", [{"header": "ce-type", "value": "bad", "step": {"status": 500},
                                                  "times": 1}])
        self.assertTrue(self.ask("/ok", b"", "ce-type: good").startswith(b"HTTP/1.1 200"))
        self.assertTrue(self.ask("/ok", b"", "ce-type: bad").startswith(b"HTTP/1.1 500"))
        self.assertTrue(self.ask("/ok", b"", "ce-type: bad").startswith(b"HTTP/1.1 200"))

    def test_control_refuses_nonsense(self):
        for method, path, value in (("POST", "/script/a", [{"scenario": "nothing"}]), ("POST", "/script/a", [3]),
                                    ("POST", "/script/a", ["/script/a"]), ("POST", "/rules", [{}]),
                                    ("GET", "/requests?since=x", None)):
            self.assertEqual(self.endpoint.control(method, path, value)[0], 400, (path, value))
        self.assertEqual(self.endpoint.control("GET", "/nowhere")[0], 404)

    # TLS.
    def tls_ask(self, listener: str, client: bool = False) -> bytes:
        context = ssl.create_default_context(cafile=os.path.join(self.certificates, "ca.crt"))
        if client:
            context.load_cert_chain(os.path.join(self.certificates, "client.crt"),
                                    os.path.join(self.certificates, "client.key"))
        with socket.create_connection(("127.0.0.1", self.endpoint.ports[listener]), LIMIT) as plain:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                sock.sendall(request("/ok"))
                return self.read_answer(sock)

    def test_tls(self):
        self.assertTrue(self.tls_ask("tls_good").startswith(b"HTTP/1.1 200"))
        for listener, words in (("tls_wrong_host", "IP address mismatch"), ("tls_expired", "has expired"),
                                ("tls_self_signed", "self-signed|self signed")):
            with self.subTest(listener), self.assertRaisesRegex(ssl.SSLCertVerificationError, words):
                self.tls_ask(listener)
        record = self.only_record()
        self.assertEqual((record["listener"], record["acked"]), ("tls_good", True))

    def test_tls_client_certificate(self):
        self.assertTrue(self.tls_ask("tls_client_cert", client=True).startswith(b"HTTP/1.1 200"))
        with self.assertRaises((ssl.SSLError, AssertionError, ConnectionError)):
            self.tls_ask("tls_client_cert")
        self.assertEqual(self.endpoint.count()["received"], 1)


class LifeTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="endpoint-test-")
        self.addCleanup(shutil.rmtree, self.folder)

    def test_ends_with_its_parent(self):
        parent = subprocess.Popen(["sleep", "60"])
        endpoint = Running(self.folder, "--parent-pid", str(parent.pid))
        self.assertIsNone(endpoint.process.poll())
        parent.kill()
        parent.wait()
        self.assertEqual(endpoint.process.wait(LIMIT), 0)
        endpoint.process.stdout.close()

    def test_ends_by_itself(self):
        endpoint = Running(self.folder, "--max-seconds", "0.3")
        self.assertEqual(endpoint.process.wait(LIMIT), 0)
        endpoint.process.stdout.close()

    def test_stop_records_what_hangs_and_print_prints(self):
        endpoint = Running(self.folder, "--print")
        with socket.create_connection(("127.0.0.1", endpoint.ports["http"]), LIMIT) as sock:
            sock.sendall(request("/hang", b"x", "Idempotency-Key: e1", "ce-type: t%20x", "ce-partitionkey: k"))
            wait_until(lambda: endpoint.count()["complete"] == 1, "the request")
            endpoint.process.send_signal(signal.SIGTERM)
            self.assertEqual(endpoint.process.wait(LIMIT), 0)
        printed = endpoint.process.stdout.read().decode()
        endpoint.process.stdout.close()
        self.assertRegex(printed, r"e1  type=t x  key=k .*no answer")
        with open(endpoint.log, encoding="utf-8") as log:
            record = json.loads(log.read())
        self.assertEqual((record["note"], record["acked"], record["complete"]), ("endpoint stopped", False, True))


if __name__ == "__main__":
    unittest.main()
