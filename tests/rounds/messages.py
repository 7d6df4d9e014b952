"""Clients of servers that pass messages on."""

from connection import Lines, answered, is_so


class Published:
    """Each connection receives the messages of all others, in order, from its subscription on."""

    def __init__(self):
        self.messages = []

    def use(self, connection):
        self.messages.append(f"message {len(self.messages)} " + "m" * (len(self.messages) * 97 % 3000))
        self.publish(connection, self.messages[-1])
        while connection.seen < len(self.messages):
            text = self.receive(connection)
            is_so(text == self.messages[connection.seen], f"{text[:60]}, not message {connection.seen}")
            connection.seen += 1


class Nats(Published):
    def open(self, name):
        nats = Lines(4222, name)
        is_so(nats.line().startswith("INFO"), "the greeting")
        nats.send('CONNECT {"verbose":false}\r\nSUB all 1\r\nPING\r\n')
        while nats.line() != "PONG":
            pass
        nats.seen = len(self.messages)
        return nats

    def publish(self, nats, text):
        nats.send(f"PUB all {len(text)}\r\n{text}\r\n")

    def receive(self, nats):
        while not (line := nats.line()).startswith("MSG"):
            if line == "PING":
                nats.send("PONG\r\n")
        return nats.line()


class Mosquitto(Published):
    def packet(self, kind, body):
        length, size = b"", len(body)
        while True:
            size, low = divmod(size, 128)
            length += bytes([low | (128 if size else 0)])
            if not size:
                return bytes([kind]) + length + body

    def text(self, text):
        return len(text).to_bytes(2, "big") + text.encode()

    def read(self, mqtt):
        kind = mqtt.reader.read(1)
        answered()
        is_so(kind, "the connection ended")
        size = shift = 0
        while True:
            byte = mqtt.reader.read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return kind[0], mqtt.reader.read(size)

    def open(self, name):
        mqtt = Lines(1883, name)
        hello = self.text("MQTT") + b"\x04\x02\x00\x00" + self.text(name)
        mqtt.socket.sendall(self.packet(0x10, hello))
        is_so(self.read(mqtt) == (0x20, b"\0\0"), "CONNACK")
        mqtt.socket.sendall(self.packet(0x82, b"\0\1" + self.text("all") + b"\1"))
        is_so(self.read(mqtt)[0] == 0x90, "SUBACK")
        mqtt.seen = len(self.messages)
        return mqtt

    def publish(self, mqtt, text):
        mqtt.socket.sendall(self.packet(0x32, self.text("all") + b"\0\7" + text.encode()))

    def receive(self, mqtt):
        while True:
            kind, body = self.read(mqtt)
            if kind & 0xF0 == 0x30:
                is_so(kind & 6 == 2, f"quality of service of {kind:x}")
                mqtt.socket.sendall(self.packet(0x40, body[5:7]))
                return body[7:].decode()


class Rabbitmq(Published):
    """STOMP, with a subscription to a topic by each connection."""

    def frame(self, stomp, command, headers, body=""):
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        stomp.send(f"{command}\n{lines}\n{body}\0")

    def read(self, stomp):
        text = b""
        while not text.endswith(b"\0"):
            byte = stomp.reader.read(1)
            answered()
            is_so(byte, "the connection ended")
            text += byte
        head, _, body = text[:-1].decode().lstrip("\n").partition("\n\n")
        return head.split("\n")[0], body

    def open(self, name):
        stomp = Lines(61613, name)
        self.frame(stomp, "CONNECT", {"accept-version": "1.2", "login": "guest", "passcode": "guest", "host": "/"})
        is_so(self.read(stomp)[0] == "CONNECTED", "CONNECTED")
        self.frame(stomp, "SUBSCRIBE", {"id": "1", "destination": "/topic/all", "receipt": "r"})
        is_so(self.read(stomp)[0] == "RECEIPT", "RECEIPT")
        stomp.seen = len(self.messages)
        return stomp

    def publish(self, stomp, text):
        self.frame(stomp, "SEND", {"destination": "/topic/all"}, text)

    def receive(self, stomp):
        command, body = self.read(stomp)
        is_so(command == "MESSAGE", (command, body))
        return body
