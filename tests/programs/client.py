"""Four clients of a server that sums the numbers from each (server.js, Server.java, server.py).

The clients work for a while, pause, and go on, each on a connection of its own, until /tmp/stop
exists. Every answer is checked: numbers from 0 in their order, then the client's sum."""

import http.client
import os
import random
import threading
import time

NUMBERS = [",".join(map(str, range(count))) for count in (1, 10, 1000, 40000)]
wrong = []
answers = [0] * 4


def connect():
    """Connects as soon as the server listens."""
    while True:
        try:
            connection = http.client.HTTPConnection("a", 80, timeout=60)
            connection.connect()
            return connection
        except ConnectionRefusedError:
            time.sleep(0.1)


def work(client):
    try:
        connection, total, n = connect(), 0, 0
        while not os.path.exists("/tmp/stop"):
            for _ in range(random.randrange(1, 40)):
                n += 1
                total += n
                numbers = random.choice(NUMBERS)
                count = numbers.count(",") + 1
                connection.request("GET", f"/{client}/{n}/{count}")
                answer = connection.getresponse().read().decode()
                assert answer == f"{numbers} {total}", f"{client}, {n}: {answer[-80:]}"
                answers[client] = n
            time.sleep(random.random() / 2)
    except Exception as error:
        wrong.append(f"{client}: {error!r}")


threads = [threading.Thread(target=work, args=[client]) for client in range(4)]
for thread in threads:
    thread.start()
while min(answers) < 100 and not wrong:
    time.sleep(0.05)
print("begun", flush=True)
for thread in threads:
    thread.join()
print(wrong or "all was right", flush=True)
