"""Clients of the other services of a network."""

import contextlib
import os
import re
import socket
import subprocess

from connection import HOST, PATIENCE_S, Lines, answered, is_so


class Rseq:
    def __init__(self):
        self.count = 0

    def open(self, name):
        return Lines(7000, name)

    def use(self, connection):
        connection.send("sum\n")
        line = connection.line()
        lost, count = re.fullmatch(r"(-?\d+) lost of (\d+)", line).groups()
        is_so(int(lost) == 0 and int(count) >= self.count, line)
        self.count = int(count)


class Sshd:
    """A shell in a session with a terminal counts in a variable, and in a file for all sessions."""

    def __init__(self):
        self.total = 0

    def open(self, name):
        options = ["-tt", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
        ssh = subprocess.Popen(["ssh", *options, f"root@{HOST}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ssh.uses = 0
        try:
            self.type(ssh, "kept=value; echo is''-open; test -e /tmp/total || echo 0 >/tmp/total", "is-open")
        except Exception:
            ssh.kill()
            raise
        return ssh

    def type(self, ssh, line, shown):
        ssh.stdin.write(line.encode() + b"\n")
        ssh.stdin.flush()
        seen = b""
        while shown.encode() not in seen:
            part = os.read(ssh.stdout.fileno(), 4096)
            is_so(part, f"the session ended: {seen!r}")
            answered()
            seen += part

    def use(self, ssh):
        ssh.uses += 1
        self.total += 1
        line = "n=$((n+1)) all=$(($(cat /tmp/total)+1)); echo $all >/tmp/total; echo $kept: $n, $all."
        self.type(ssh, line, f"value: {ssh.uses}, {self.total}.")

    def close(self, ssh):
        ssh.stdin.write(b"exit 5\n")
        ssh.stdin.flush()
        is_so(ssh.wait(PATIENCE_S) == 5, f"the session ended with {ssh.returncode}")


class Dns:
    """Queries by datagrams and over a TCP connection."""

    name = "one.rounds"

    def __init__(self):
        self.count = 0

    def open(self, name):
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.settimeout(PATIENCE_S)
        datagrams.connect((HOST, 53))
        dns = Lines(53, name)
        dns.datagrams = datagrams
        # A refusal is delivered by the next call, if the server does not listen yet.
        datagrams.send(self.query(self.name, 1, 1))
        datagrams.recv(4096)
        self.count += 1
        return dns

    def query(self, name, kind, of):
        labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
        head = (self.count % 65536).to_bytes(2, "big") + bytes([1, 0, 0, 1, 0, 0, 0, 0, 0, 0])
        return head + labels + b"\0" + kind.to_bytes(2, "big") + of.to_bytes(2, "big")

    def over_tcp(self, dns, query):
        dns.socket.sendall(len(query).to_bytes(2, "big") + query)
        size = dns.reader.read(2)
        is_so(len(size) == 2, "the connection ended")
        return dns.reader.read(int.from_bytes(size, "big"))

    def use(self, dns):
        query = self.query(self.name, 1, 1)
        dns.datagrams.send(query)
        by_datagram = dns.datagrams.recv(4096)
        answered()
        for answer in (by_datagram, self.over_tcp(dns, query)):
            is_so(answer[:2] == query[:2] and bytes([192, 0, 2, 77]) in answer, answer)
            self.count += 1

    def close(self, dns):
        dns.datagrams.close()
        dns.close()


class Rsync:
    """A is a connection in the middle of the greeting. Over new ones, files are written and read back."""

    def __init__(self):
        self.files = 0

    def open(self, name):
        greeted = Lines(873, name)
        is_so(greeted.line().startswith("@RSYNCD: 3"), "the greeting")
        return greeted

    def use(self, greeted):
        greeted.send("@RSYNCD: 30.0\n#list\n")
        is_so(greeted.line().split() == ["files"], "the list of modules")
        greeted.expect("@RSYNCD: EXIT")
        greeted.close()
        self.files += 1
        path = f"/tmp/{self.files}"
        with open(path, "w") as file:
            file.write(f"file {self.files}\n" * 10000)
        run = lambda *words: subprocess.run(["rsync", "-a", *words], check=True, timeout=PATIENCE_S)
        run(path, f"rsync://{HOST}/files/")
        subprocess.run(["rm", "-rf", "/tmp/back"], check=True)
        run(f"rsync://{HOST}/files/", "/tmp/back/")
        back = os.listdir("/tmp/back")
        is_so(len(back) == self.files, back)
        for name in back:
            is_so(open(f"/tmp/back/{name}").read() == f"file {name}\n" * 10000, name)
        greeted.__init__(873, greeted.name)
        is_so(greeted.line().startswith("@RSYNCD: 3"), "the greeting")


class Git:
    """Connections of protocol 2 list the branches. Over new ones, commits are pushed and cloned."""

    def __init__(self):
        self.commits = 0
        self.run("init", "-q", "-b", "main", "/tmp/mine")
        self.run("-C", "/tmp/mine", "config", "user.email", "user@c")
        self.run("-C", "/tmp/mine", "config", "user.name", "user")

    def run(self, *words):
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=PATIENCE_S)
        is_so(done.returncode == 0, f"{words}: {done.stderr}")
        return done.stdout.strip()

    def open(self, name):
        git = Lines(9418, name)
        self.packet(git, f"git-upload-pack /kept.git\0host={HOST}\0\0version=2\0")
        is_so(self.packets(git)[0] == "version 2", "the greeting")
        return git

    def packet(self, git, text):
        git.send(f"{len(text) + 4:04x}{text}")

    def packets(self, git):
        found = []
        while True:
            size = git.reader.read(4)
            is_so(len(size) == 4, "the connection ended")
            if size == b"0000":
                return found
            if int(size, 16) >= 4:
                found.append(git.reader.read(int(size, 16) - 4).decode().rstrip("\n"))

    def use(self, git):
        self.commits += 1
        self.run("-C", "/tmp/mine", "commit", "-q", "--allow-empty", "-m", f"commit {self.commits}")
        self.run("-C", "/tmp/mine", "push", "-q", f"git://{HOST}/kept.git", "main")
        self.packet(git, "command=ls-refs\n")
        git.send("0001")
        self.packet(git, "ref-prefix refs/heads/\n")
        git.send("0000")
        head = self.run("-C", "/tmp/mine", "rev-parse", "HEAD")
        refs = self.packets(git)
        # The process of a connection reads a branch once.
        git.head = getattr(git, "head", head)
        is_so(refs == [f"{git.head} refs/heads/main"], refs)
        subprocess.run(["rm", "-rf", "/tmp/clone"], check=True)
        self.run("clone", "-q", f"git://{HOST}/kept.git", "/tmp/clone")
        count = self.run("-C", "/tmp/clone", "rev-list", "--count", "HEAD")
        is_so(count == str(self.commits), count)


class Dovecot:
    def __init__(self):
        self.count = 0

    def open(self, name):
        import imaplib

        imap = imaplib.IMAP4(HOST, timeout=PATIENCE_S)
        imap.login("user", "password")
        imap.select("INBOX")
        return imap

    def use(self, imap):
        self.count += 1
        text = f"Subject: mail {self.count}\r\n\r\n" + "a line\r\n" * 1000
        kind, answer = imap.append("INBOX", None, None, text.encode())
        is_so(kind == "OK", answer)
        imap.noop()
        found = imap.search(None, "ALL")[1][0].split()
        is_so(len(found) == self.count, f"{len(found)} of {self.count} mails")
        parts = imap.fetch(found[self.count // 2], "(BODY.PEEK[HEADER])")[1]
        subject = next(part[1] for part in parts if isinstance(part, tuple))
        is_so(f"mail {self.count // 2 + 1}".encode() in subject, subject)

    def close(self, imap):
        imap.logout()


class Cron:
    """The client is the server here: each job of cron connects, and sends the number of its job."""

    def __init__(self):
        self.listener = socket.create_server(("0.0.0.0", 7000))
        self.listener.settimeout(PATIENCE_S)
        self.count = None

    def open(self, name):
        return name

    def use(self, name):
        # Jobs of before a sleep may wait in the queue: one more must come after them.
        self.listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.job()
        self.listener.settimeout(PATIENCE_S)
        self.job()

    def job(self):
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        with connection, connection.makefile() as text:
            n = int(text.read())
        is_so(self.count is None or n == self.count + 1, f"job {n} after {self.count}")
        self.count = n

    def close(self, name):
        pass
