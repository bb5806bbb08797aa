"""An MCP server for the tests: on stdio, or over HTTP at a port. Run as a script, in a process of its own."""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("shop", log_level="CRITICAL")
sold = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def sell(pieces: int) -> str:
    """Sell pieces; the server counts them."""
    global sold
    sold += pieces
    return f"{sold} sold"


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("the till is locked")


@server.tool()
def leave() -> str:
    """End the server's process."""
    os._exit(3)


@server.tool()
def draw() -> Image:
    """Draw a red pixel."""
    import base64

    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
    return Image(data=base64.b64decode(png), format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
