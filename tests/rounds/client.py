"""The client of one program of tests/rounds.rs, which runs in a container beside it: client.py NAME.

Each line of standard input is a verb and the name of a connection: `start A` (open, as soon as the program
serves), `open B`, `use A`, `close B`. The answer is `ok` and the milliseconds until the first answer of the
program, or `wrong` and the reason. An ended connection is an error, and is never opened again. A class keeps
the state that is expected of its program, and compares it at each use."""

import sys
import time
import traceback

import connection
import data
import messages
import pages
import services


def serve(program):
    connections = {}
    for line in sys.stdin:
        verb, name = line.split()
        began = time.monotonic()
        connection.first_answer = None
        while True:
            try:
                if verb in ("start", "open"):
                    connections[name] = program.open(name)
                elif verb == "use":
                    program.use(connections[name])
                elif verb == "close":
                    opened = connections.pop(name)
                    close = getattr(program, "close", getattr(type(opened), "close", None))
                    close(opened)
                took = (connection.first_answer or time.monotonic()) - began
                print(f"ok {took * 1000:.2f}", flush=True)
            except Exception as error:
                if verb == "start" and time.monotonic() - began < connection.PATIENCE_S:
                    time.sleep(0.1)
                    continue
                where = traceback.extract_tb(error.__traceback__)
                lines = " ".join(f"{frame.name}:{frame.lineno}" for frame in where)
                print("wrong", f"{lines}: {error!r}".replace("\n", " "), flush=True)
            break


PROGRAMS = {
    "alertmanager": data.Alertmanager,
    "apache2": pages.Apache,
    "asyncio": pages.Sums,
    "beanstalkd": data.Beanstalkd,
    "caddy": pages.Caddy,
    "cron": services.Cron,
    "dnsmasq": services.Dns,
    "dovecot": services.Dovecot,
    "etcd": data.Etcd,
    "git": services.Git,
    "gunicorn": pages.Sums,
    "haproxy": pages.Haproxy,
    "influxdb": data.Influxdb,
    "mariadb": data.Mariadb,
    "memcached": data.Memcached,
    "mosquitto": messages.Mosquitto,
    "nats": messages.Nats,
    "netdata": pages.Netdata,
    "nginx": pages.Nginx,
    "node": pages.Sums,
    "openjdk": pages.Sums,
    "perl": pages.Sums,
    "php": pages.Sums,
    "postgresql": data.Postgresql,
    "prometheus": data.Prometheus,
    "python": pages.Sums,
    "rabbitmq": messages.Rabbitmq,
    "redis": data.Redis,
    "registry": data.Registry,
    "rseq": services.Rseq,
    "rsync": services.Rsync,
    "ruby": pages.Sums,
    "slapd": data.Slapd,
    "squid": pages.Squid,
    "sshd": services.Sshd,
    "systemd": pages.Sums,
    "unbound": services.Dns,
    "varnish": pages.Varnish,
}
serve(PROGRAMS[sys.argv[1]]())
