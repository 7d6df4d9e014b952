"""A server of sums for gunicorn (see programs/client.py), with one process of four threads."""

import threading

sums = {}
lock = threading.Lock()


def serve(environment, start):
    _, client, n, count = environment["PATH_INFO"].split("/")
    with lock:
        total = sums[client] = sums.get(client, 0) + int(n)
    body = f"{','.join(map(str, range(int(count))))} {total}".encode()
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
