"""A server of sums on asyncio (see programs/client.py), with tasks that wait meanwhile."""

import asyncio

sums = {}
ticks = 0


async def tick():
    global ticks
    while True:
        await asyncio.sleep(0.01)
        ticks += 1


async def serve(reader, writer):
    while request := await reader.readuntil(b"\r\n\r\n"):
        _, client, n, count = request.split()[1].decode().split("/")
        sums[client] = sums.get(client, 0) + int(n)
        before = ticks
        await asyncio.sleep(0.02)
        assert ticks > before
        body = f"{','.join(map(str, range(int(count))))} {sums[client]}"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()


async def main():
    ticking = asyncio.create_task(tick())
    server = await asyncio.start_server(serve, "0.0.0.0", 80)
    await asyncio.gather(ticking, server.serve_forever())


asyncio.run(main())
