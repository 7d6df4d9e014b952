"""See client.py. Four other threads count meanwhile, and no count is ever lost.

Under socket activation (sums.socket), systemd passes the listening socket to the server."""

import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

sums = {}
lock = threading.Lock()
counted = [0]


def count():
    mine = 0
    while True:
        with lock:
            mine += 1
            counted[0] += 1
        if mine % 1000 == 0:
            time.sleep(0.01)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen = 0

    def do_GET(self):
        _, client, n, numbers = self.path.split("/")
        sums[client] = sums.get(client, 0) + int(n)
        with lock:
            now = counted[0]
        if now < self.seen:
            os._exit(1)
        self.seen = now
        body = (",".join(map(str, range(int(numbers)))) + f" {sums[client]}").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


for _ in range(4):
    threading.Thread(target=count, daemon=True).start()
is_given = "LISTEN_FDS" in os.environ
server = ThreadingHTTPServer(("0.0.0.0", 80), Handler, bind_and_activate=not is_given)
if is_given:
    server.socket = socket.socket(fileno=3)
server.serve_forever()
