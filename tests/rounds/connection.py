"""Connections of clients (client.py), and the check that all of them use."""

import http.client
import json
import socket
import time

HOST = "a"
PATIENCE_S = 110
first_answer = None


def answered():
    """Notes the time of the first answer to a verb."""
    global first_answer
    first_answer = first_answer or time.monotonic()


def is_so(condition, shown):
    """Fails with what was shown, where a condition does not hold."""
    if not condition:
        raise AssertionError(str(shown)[-400:])


class Lines:
    """A TCP connection with a protocol of lines."""

    def __init__(self, port, name=""):
        self.name = name
        self.uses = 0
        self.socket = socket.create_connection((HOST, port), timeout=PATIENCE_S)
        self.reader = self.socket.makefile("rb")

    def send(self, text):
        self.socket.sendall(text.encode())

    def line(self):
        line = self.reader.readline()
        answered()
        is_so(line.endswith(b"\n"), f"{self.name}: the connection ended: {line!r}")
        return line.decode().rstrip("\r\n")

    def expect(self, *lines):
        for wanted in lines:
            line = self.line()
            is_so(line == str(wanted), f"{self.name}: '{line}', not '{wanted}'")

    def close(self):
        self.reader.close()
        self.socket.close()


class Http:
    """An HTTP connection that is kept."""

    def __init__(self, port, name):
        self.name = name
        self.connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
        self.connection.connect()
        self.connection.auto_open = 0  # an ended connection is an error

    def request(self, method, path, body=None, headers=None):
        self.connection.request(method, path, body, headers or {})
        response = self.connection.getresponse()
        answered()
        text = response.read()
        is_so(response.status < 400, f"{self.name}: {path}: {response.status} {text[-200:]!r}")
        return response, text.decode("utf-8", "replace")

    def get(self, path):
        return self.request("GET", path)[1]

    def json(self, method, path, value=None):
        body = None if value is None else json.dumps(value)
        response, text = self.request(method, path, body, {"Content-Type": "application/json"})
        return json.loads(text) if text.strip() else None

    def close(self):
        self.connection.close()
