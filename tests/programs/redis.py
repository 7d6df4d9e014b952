"""Writes to redis by the pipeline, several hundred commands before the first answer is read, until
/tmp/stop is there; then reads back all that was written."""

import os
import random
import socket
import time


def connect():
    while True:
        try:
            return socket.create_connection(("a", 6379), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.1)


server = connect()
answers = server.makefile("rb")
last = 0
has_begun = False
while not os.path.exists("/tmp/stop"):
    for _ in range(random.randrange(1, 8)):
        numbers = range(last + 1, last + random.randrange(2, 500))
        say = "".join(f"INCR count\r\nSET key{n} {'value' * (n % 50)}{n}\r\n" for n in numbers)
        server.sendall(say.encode())
        for n in numbers:
            said = answers.readline() + answers.readline()
            assert said == f":{n}\r\n+OK\r\n".encode(), f"{n}: {said}"
            last = n
    if not has_begun:
        print("begun", flush=True)
        has_begun = True
    time.sleep(random.random() / 2)
for n in range(1, last + 1):
    server.sendall(f"GET key{n}\r\n".encode())
    answers.readline()
    said = answers.readline().decode().strip()
    assert said == f"{'value' * (n % 50)}{n}", f"{n}: {said}"
print("all was right", flush=True)
