"""Clients of servers of pages, of proxies, and of the servers of sums."""

import json
import re
import time

from connection import PATIENCE_S, Http, is_so


class Sums:
    """A server that sums the numbers of each client (tests/programs/client.py has the protocol)."""

    sizes = (1, 1000, 40000)

    def __init__(self):
        self.n = 0
        self.totals = {}

    def open(self, name):
        return Http(80, name)

    def use(self, connection):
        for size in self.sizes:
            self.n += 1
            total = self.totals[connection.name] = self.totals.get(connection.name, 0) + self.n
            answer = connection.get(f"/{connection.name}/{self.n}/{size}")
            wanted = ",".join(map(str, range(size))) + f" {total}"
            is_so(answer == wanted, f"{connection.name}, {self.n}: {answer[-80:]}")


class Counted:
    """An HTTP server that counts its requests."""

    page, text, status = "/", "", "/status"

    def __init__(self):
        self.count = 0

    def open(self, name):
        return Http(80, name)

    def use(self, connection):
        is_so(self.text in connection.get(self.page), self.page)
        self.count += 1
        # Apache counts a request after its answer: another process may read the count before.
        for _ in range(100):
            self.count += 1
            status = connection.get(self.status)
            if self.counted(status) == self.count:
                return
            time.sleep(0.01)
        is_so(False, f"{self.count} requests: {status[:1000]}")



class Nginx(Counted):
    page, text = "/index.nginx-debian.html", "Welcome to nginx"

    def counted(self, status):
        return int(status.splitlines()[2].split()[2])


class Apache(Counted):
    page, text, status = "/", "Apache2 Debian", "/status?auto"

    def counted(self, status):
        return int(re.search("Total Accesses: (\\d+)", status)[1]) + 1


class Caddy:
    """A proxy. The server behind it counts its answers."""

    def __init__(self):
        self.count = 0

    def open(self, name):
        return Http(80, name)

    def use(self, connection):
        for _ in range(3):
            self.count += 1
            response, text = connection.request("GET", f"/{self.count}")
            is_so(text == f"/{self.count} made {self.count}", text)
            self.check(response)

    def check(self, response):
        pass


class Haproxy(Caddy):
    """This proxy counts in its table of clients, too."""

    def check(self, response):
        is_so(response.getheader("X-Count") == str(self.count), response.getheaders())


class Cache:
    """One page is in the cache from the first use on. The page of each use is made by the server behind it."""

    port, prefix = 80, ""

    def __init__(self):
        self.count = 0

    def open(self, name):
        return Http(self.port, name)

    def get(self, connection, page):
        return connection.request("GET", self.prefix + page)

    def use(self, connection):
        response, text = self.get(connection, "/kept")
        is_so(text == "/kept made 1" and self.is_hit(response, self.count), (text, response.getheaders()))
        self.count += 1
        text = self.get(connection, f"/{self.count}")[1]
        is_so(text == f"/{self.count} made {self.count + 1}", text)


class Varnish(Cache):
    def is_hit(self, response, uses):
        return response.getheader("X-Count") == str(uses)


class Squid(Cache):
    port, prefix = 3128, "http://127.0.0.1:8080"

    def is_hit(self, response, uses):
        return response.getheader("X-Cache", "").startswith("HIT" if uses else "MISS")


class Netdata:
    """A value of each second. Those that were read once stay."""

    path = "/api/v1/data?chart=system.cpu&format=json&after=-600&points=600&options=seconds"

    def __init__(self):
        self.known = {}

    def open(self, name):
        netdata = Http(19999, name)
        is_so(self.values(netdata), "a first value")
        return netdata

    def values(self, netdata):
        answer = json.loads(netdata.request("GET", self.path, headers={"Connection": "keep-alive"})[1])
        rows = {row[0]: dict(zip(answer["labels"][1:], row[1:])) for row in answer["data"]}
        return {second: row for second, row in rows.items() if None not in row.values()}

    def use(self, netdata):
        last = max(self.known, default=0)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            values = self.values(netdata)
            is_so(time.monotonic() < deadline, f"no value after {last}")
            if max(values, default=0) > last:
                break
            time.sleep(0.1)
        # The last second is still being measured.
        for second in [second for second in self.known if second >= min(values)]:
            is_so(values.get(second) == self.known[second], (second, values.get(second), self.known[second]))
        self.known = {second: row for second, row in values.items() if second < max(values)}
