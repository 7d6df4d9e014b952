"""The server behind the proxies of tests/rounds.rs: it counts its answers, which caches may keep.

The program returns when it listens, and serves in the background."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

made = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment

    def do_GET(self):
        global made
        made += 1
        body = f"{self.path} made {made}".encode()
        self.send_response(200)
        self.send_header("Cache-Control", "max-age=36000")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
if os.fork() == 0:
    server.serve_forever()
