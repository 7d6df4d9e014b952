"""Clients of databases, caches and queues, and of servers of data written in Go."""

import base64
import hashlib
import re

from connection import HOST, PATIENCE_S, Http, Lines, answered, is_so


class Redis:
    def __init__(self):
        self.total = 0
        self.keys = 0

    def open(self, name):
        redis = Lines(6379, name)
        redis.send(f"CLIENT SETNAME {name}\r\nMULTI\r\nINCR total\r\n")
        redis.expect("+OK", "+OK", "+QUEUED")
        return redis

    def use(self, redis):
        self.keys += 1
        self.total += 1
        redis.send("EXEC\r\n")
        redis.expect("*1", f":{self.total}")
        text = "v" * (self.keys * 97 % 5000)
        redis.send(f"SET key{self.keys} x{text}\r\nCLIENT GETNAME\r\nDBSIZE\r\n")
        redis.expect("+OK", f"${len(redis.name)}", redis.name, f":{self.keys + 1}")
        redis.send(f"GET key{(self.keys + 1) // 2}\r\n")
        redis.line()
        is_so(set(redis.line()) <= set("xv"), "the value of a key")
        redis.send("MULTI\r\nINCR total\r\n")
        redis.expect("+OK", "+QUEUED")


class Memcached:
    def __init__(self):
        self.total = 0

    def open(self, name):
        memcached = Lines(11211, name)
        if self.total == 0:
            memcached.send("set total 0 0 1\r\n0\r\n")
            memcached.expect("STORED")
        return memcached

    def use(self, memcached):
        self.total += 1
        text = "v" * (self.total * 997 % 100000)
        memcached.send(f"incr total 1\r\nset key{self.total} 0 0 {len(text)}\r\n{text}\r\n")
        memcached.expect(self.total, "STORED")
        n = (self.total + 1) // 2
        text = "v" * (n * 997 % 100000)
        memcached.send(f"get key{n}\r\n")
        memcached.expect(f"VALUE key{n} 0 {len(text)}", text, "END")


class Beanstalkd:
    """Each connection has a reserved job, which the server would give back if the connection ended."""

    def __init__(self):
        self.jobs = 0

    def open(self, name):
        queue = Lines(11300, name)
        queue.send(f"use {name}\r\nwatch {name}\r\nignore default\r\n")
        queue.expect(f"USING {name}", "WATCHING 2", "WATCHING 1")
        self.put(queue)
        return queue

    def put(self, queue):
        self.jobs += 1
        queue.job = self.jobs
        queue.send("put 0 0 3600 3\r\njob\r\nreserve\r\n")
        queue.expect(f"INSERTED {self.jobs}", f"RESERVED {self.jobs} 3", "job")

    def use(self, queue):
        queue.send(f"delete {queue.job}\r\n")
        queue.expect("DELETED")
        self.put(queue)

    def close(self, queue):
        queue.send(f"delete {queue.job}\r\n")
        queue.expect("DELETED")
        queue.close()


class Postgresql:
    """Each connection has a row in a transaction that is open meanwhile, and a temporary table."""

    def __init__(self):
        self.rows = 0

    def connect(self):
        import psycopg2

        return psycopg2.connect(host=HOST, user="postgres", dbname="postgres")

    def open(self, name):
        connection = self.connect()
        self.run(connection, "create table if not exists kept (n integer)")
        connection.commit()
        self.run(connection, "create temporary table own (n integer)")
        connection.commit()
        self.run(connection, "insert into kept values (1)")
        uses = 0
        return [connection, uses]

    def run(self, connection, statement):
        cursor = connection.cursor()
        cursor.execute(statement)
        answered()
        return cursor.fetchone()[0] if cursor.description else None

    def use(self, session):
        connection, uses = session
        connection.commit()
        self.rows += 1
        self.run(connection, "insert into own values (2)")
        rows = self.run(connection, "select sum(n) from kept")
        own = self.run(connection, "select count(*) from own")
        is_so(rows == self.rows and own == uses + 1, f"{rows} of {self.rows}, {own} of {uses + 1}")
        connection.commit()
        self.run(connection, "insert into kept values (1)")
        session[1] += 1

    def close(self, session):
        session[0].close()


class Mariadb(Postgresql):
    def connect(self):
        import pymysql

        return pymysql.connect(host=HOST, user="user", database="test", read_timeout=PATIENCE_S)


class Etcd:
    """Keys over the JSON gateway; the revision counts all changes."""

    def __init__(self):
        self.keys = 0

    def open(self, name):
        return Http(2379, name)

    def use(self, connection):
        self.keys += 1
        code = lambda text: base64.b64encode(text.encode()).decode()
        put = {"key": code(f"key{self.keys:04}"), "value": code("v" * self.keys)}
        connection.json("POST", "/v3/kv/put", put)
        found = connection.json("POST", "/v3/kv/range", {"key": code("key"), "range_end": code("kez")})
        values = [len(base64.b64decode(kv["value"])) for kv in found["kvs"]]
        is_so(values == list(range(1, self.keys + 1)), values)
        is_so(int(found["header"]["revision"]) == self.keys + 1, found["header"])


class Influxdb:
    def __init__(self):
        self.points = 0

    def open(self, name):
        connection = Http(8086, name)
        connection.json("POST", "/query?q=CREATE%20DATABASE%20kept")
        return connection

    def use(self, connection):
        self.points += 1
        connection.request("POST", "/write?db=kept", f"m,by={connection.name} v={self.points}i {self.points}000000000")
        found = connection.json("GET", "/query?db=kept&q=SELECT%20count(v),sum(v)%20FROM%20m")
        values = found["results"][0]["series"][0]["values"][0][1:]
        is_so(values == [self.points, self.points * (self.points + 1) // 2], found)


class Slapd:
    def __init__(self):
        self.entries = 0

    def open(self, name):
        import ldap3

        server = ldap3.Server(HOST, connect_timeout=PATIENCE_S, get_info=ldap3.NONE)
        connection = ldap3.Connection(server, "cn=admin,dc=a", "password", receive_timeout=PATIENCE_S)
        is_so(connection.bind(), connection.result)
        if self.entries == 0:
            attributes = {"o": "all", "dc": "a"}
            connection.add("dc=a", ["organization", "dcObject"], attributes)
            is_so(connection.result["description"] in ("success", "entryAlreadyExists"), connection.result)
        return connection

    def use(self, connection):
        self.entries += 1
        name = f"cn=entry{self.entries},dc=a"
        is_so(connection.add(name, "device", {"description": "x" * 1000}), connection.result)
        is_so(connection.search("dc=a", "(cn=entry*)", attributes=["cn"]), connection.result)
        is_so(len(connection.entries) == self.entries, len(connection.entries))

    def close(self, connection):
        connection.unbind()


class Registry:
    """An image layer is uploaded at each use, half of it before a sleep and half after."""

    def __init__(self):
        self.digests = []

    def open(self, name):
        connection = Http(5000, name)
        self.begin(connection)
        return connection

    def blob(self, n):
        return (f"layer {n} " * 5000).encode()

    def begin(self, connection):
        response, _ = connection.request("POST", "/v2/kept/blobs/uploads/")
        half = self.blob(0)[:20000]
        place = re.sub("^https?://[^/]*", "", response.getheader("Location"))
        response, _ = connection.request("PATCH", place, half, {"Content-Type": "application/octet-stream"})
        connection.place = re.sub("^https?://[^/]*", "", response.getheader("Location"))

    def use(self, connection):
        rest = self.blob(0)[20000:] + str(len(self.digests)).encode()
        digest = hashlib.sha256(self.blob(0)[:20000] + rest).hexdigest()
        headers = {"Content-Type": "application/octet-stream"}
        connection.request("PUT", f"{connection.place}&digest=sha256:{digest}", rest, headers)
        self.digests.append(digest)
        for digest in self.digests[-3:]:
            text = connection.get(f"/v2/kept/blobs/sha256:{digest}")
            is_so(hashlib.sha256(text.encode()).hexdigest() == digest, "a layer")
        self.begin(connection)


class Prometheus:
    """It reads its own values every second. The number of samples never falls."""

    def __init__(self):
        self.samples = 0

    def open(self, name):
        connection = Http(9090, name)
        is_so(self.query(connection, "count_over_time(up[1d])") > 0, "no sample yet")
        return connection

    def query(self, connection, text):
        result = connection.json("GET", f"/api/v1/query?query={text}")["data"]["result"]
        is_so(result, f"no result of {text}")
        return float(result[0]["value"][1])

    def use(self, connection):
        samples = self.query(connection, "count_over_time(up[1d])")
        is_so(samples >= self.samples, f"{samples} samples after {self.samples}")
        is_so(self.query(connection, "min_over_time(up[1d])") == 1, "it did not reach itself")
        self.samples = samples


class Alertmanager:
    def __init__(self):
        self.ids = set()

    def open(self, name):
        return Http(9093, name)

    def use(self, connection):
        matchers = [{"name": "n", "value": str(len(self.ids)), "isRegex": False}]
        silence = {"matchers": matchers, "startsAt": "2020-01-01T00:00:00Z", "endsAt": "2099-01-01T00:00:00Z",
                   "createdBy": connection.name, "comment": "kept"}
        self.ids.add(connection.json("POST", "/api/v2/silences", silence)["silenceID"])
        found = {silence["id"] for silence in connection.json("GET", "/api/v2/silences")}
        is_so(found == self.ids, found)
