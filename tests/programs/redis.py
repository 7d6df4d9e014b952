"""Pipelines writes to redis, several hundred commands before the first answer is read, until
/tmp/stop exists; then reads back every value written."""

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
        commands = "".join(f"INCR count\r\nSET key{n} {'value' * (n % 50)}{n}\r\n" for n in numbers)
        server.sendall(commands.encode())
        for n in numbers:
            answer = answers.readline() + answers.readline()
            assert answer == f":{n}\r\n+OK\r\n".encode(), f"{n}: {answer}"
            last = n
    if not has_begun:
        print("begun", flush=True)
        has_begun = True
    time.sleep(random.random() / 2)
for n in range(1, last + 1):
    server.sendall(f"GET key{n}\r\n".encode())
    answers.readline()
    answer = answers.readline().decode().strip()
    assert answer == f"{'value' * (n % 50)}{n}", f"{n}: {answer}"
print("all was right", flush=True)
