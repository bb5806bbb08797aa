"""A server that speaks as much of OpenEnv as a test of containers needs, on nothing but the standard library.

Run in an image that has Python and nothing else: `python3 stdlib_openenv.py PORT`.
"""

import asyncio
import base64
import hashlib
import json
import os
import struct
import sys

SCHEMA = {"action": {"title": "Do", "properties": {"what": {"type": "string"}}, "required": ["what"]}}


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
    if headers.get("upgrade") == "websocket":
        key = head.lower().index("sec-websocket-key: ") + len("sec-websocket-key: ")
        accept = head[key:].split("\r\n")[0] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        digest = base64.b64encode(hashlib.sha1(accept.encode()).digest()).decode()
        upgrade = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{upgrade}Sec-WebSocket-Accept: {digest}\r\n\r\n".encode())
        while (frame := await read_frame(reader))[0] != 8:
            opcode, payload = frame
            send(writer, 10, payload) if opcode == 9 else send(
                writer, 1, json.dumps(answer(json.loads(payload))).encode()
            )
        send(writer, 8, payload[:2] if (payload := frame[1]) else b"")
    else:
        body = json.dumps(SCHEMA).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, second = await reader.readexactly(2)
    length = second & 127
    if length >= 126:
        form, size = (">H", 2) if length == 126 else (">Q", 8)
        (length,) = struct.unpack(form, await reader.readexactly(size))
    mask = await reader.readexactly(4)
    payload = await reader.readexactly(length)
    return first & 15, bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


def send(writer: asyncio.StreamWriter, opcode: int, payload: bytes) -> None:
    size = bytes([len(payload)]) if len(payload) < 126 else b"\x7e" + struct.pack(">H", len(payload))
    writer.write(bytes([128 | opcode]) + size + payload)


def answer(message: dict) -> dict:
    data = message["data"]
    if message["type"] == "mcp":
        error = {"code": -32601, "message": "no such method"}
        return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": data["id"], "error": error}}
    what = data.get("what", "")
    if what == "exit":
        print("the end is near", flush=True)
        os._exit(3)
    if what == "eat":
        eaten = [os.urandom(2**20) for _ in range(1024)]
        what += str(len(eaten))
    observation = {"text": f"{what} {os.environ.get('LEVEL', '')}"}
    return {"type": "observation", "data": {"observation": observation, "reward": 1.0, "done": False}}


async def main(port: int) -> None:
    server = await asyncio.start_server(talk, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
