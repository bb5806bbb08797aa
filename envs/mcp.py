"""The tools of an MCP server, over stdio or HTTP, in a session of its own for each rollout.

    GRPOTrainer(model=..., environment_factory=MCP("http://127.0.0.1:8000/mcp"), reward_funcs=..., train_dataset=...)

MCP knows neither tasks nor rewards: prompts come from the dataset and rewards from `reward_funcs`, which can look at
the server's state through `environments` (`await environment.call_tool(...)`). To give a server a task and a reward,
write a class that holds a `MCPSession`, or subclass it.

A tool's own error (`isError`) and arguments that the server refuses are told to the model. A session that cannot be
opened or that breaks is a failure of the environment; it is never mended within an episode. Protocol:
https://modelcontextprotocol.io/specification, spoken by the official SDK (extra `mcp`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image

from agentrl.chat.pictures import image_block
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.loop import run_once

_MODELS_FAULT = (-32602, -32601)
"""JSON-RPC codes for arguments and names that the server refuses."""


class MCPToolError(ValueError):
    """A tool of the server says that its call went wrong; for the model to read."""


class MCP:
    """An `environment_factory` of one MCP server.

    Args:
        server: The URL of a server (streamable HTTP), or the command that starts one on stdio: a list of strings, or
            the SDK's `StdioServerParameters` with environment and folder.
        headers: HTTP headers of every request to the URL, for a key say. They go to that server only.
        only: Names of the tools to offer; None for all.
        reuse: Whether a session (and, on stdio, its process) serves one rollout after the other. Only for servers
            that keep no state between calls; by default each rollout has a fresh one.
        connect_timeout: Seconds that opening a session may take.

    Raises:
        ConfigurationError: The server cannot be reached or lacks a tool of `only`.
    """

    def __init__(
        self,
        server: str | Sequence[str] | StdioServerParameters,
        *,
        headers: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
        reuse: bool = False,
        connect_timeout: float = 60.0,
    ) -> None:
        if not isinstance(server, str | StdioServerParameters):
            command, *arguments = server
            server = StdioServerParameters(command=command, args=arguments)
        if headers and not isinstance(server, str):
            raise ConfigurationError("headers are for a server with a URL; give a command its keys in `env`")
        self.headers = dict(headers or {})
        self.server, self.reuse, self.connect_timeout = server, reuse, connect_timeout
        self.tool_schemas = self._select(run_once(self._ask()), only)

    def __call__(self) -> MCPSession:
        """Make an instance."""
        return MCPSession(self)

    def __str__(self) -> str:
        if isinstance(self.server, str):
            return f"the MCP server at {self.server}"
        return f"the MCP server `{' '.join([self.server.command, *self.server.args])}`"

    async def _ask(self) -> list[dict[str, Any]]:
        session = MCPSession(self, tools=[])
        try:
            await session.reset()
            return await session.list_tools()
        except EnvironmentFailure as error:
            raise ConfigurationError(str(error)) from error
        finally:
            await session.close()

    def _select(self, tools: list[dict[str, Any]], only: Collection[str] | None) -> list[dict[str, Any]]:
        names = [tool["name"] for tool in tools]
        if missing := sorted(set(only or ()) - set(names)):
            raise ConfigurationError(f"only={missing}: {self} has the tools {names}")
        return [tool for tool in tools if only is None or tool["name"] in only]


class MCPSession:
    """One instance: a session with the server, opened by `reset`.

    Args:
        factory: Says which server.
        tools: What the model is offered; by default what `factory` learnt.
    """

    def __init__(self, factory: MCP, tools: list[dict[str, Any]] | None = None) -> None:
        self._factory = factory
        self.tool_schemas = factory.tool_schemas if tools is None else tools
        self._client: Client | None = None
        self._ended = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def reset(self) -> None:
        """Open a session, after closing the last episode's."""
        if self._client is not None and self._factory.reuse:
            return
        await self.close()
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._life = asyncio.create_task(self._live(opened, self._ended))
        try:
            async with asyncio.timeout(self._factory.connect_timeout):
                self._client = await asyncio.shield(opened)
        except TimeoutError:
            await self.close()
            late = f"opened no session within {self._factory.connect_timeout:g} s (connect_timeout)"
            raise EnvironmentFailure(f"{self._factory} {late}") from None
        except Exception as error:
            raise EnvironmentFailure(f"{self._factory} opened no session: {_cause(error)}") from error

    async def list_tools(self) -> list[dict[str, Any]]:
        """All tools of the server, as `Tool.from_schema` takes them."""
        assert self._client is not None, "reset opens the session"
        tools: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                schema = {"name": tool.name, "description": tool.description or tool.title or tool.name}
                tools.append(schema | {"inputSchema": tool.input_schema})
            if (cursor := page.next_cursor) is None:
                return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str | list[Any]:
        """Run a tool of the server.

        Raises:
            MCPToolError: It went wrong there.
            EnvironmentFailure: The session broke.
        """
        if self._client is None:
            raise EnvironmentFailure(f"{self._factory}: the session is closed")
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code in _MODELS_FAULT:
                raise MCPToolError(error.error.message) from None
            raise EnvironmentFailure(f"{self._factory}, {name}: {_cause(error)}") from error
        except Exception as error:
            raise EnvironmentFailure(f"{self._factory}, {name}: {_cause(error)}") from error
        content = _content(result)
        if result.is_error:
            raise MCPToolError(content if isinstance(content, str) else "the tool failed")
        return content

    async def close(self) -> None:
        """Close the session and end its process."""
        self._client = None
        self._ended.set()
        if self._life is not None:
            life, self._life = self._life, None
            await asyncio.wait([life])

    async def _live(self, opened: asyncio.Future[Client], ended: asyncio.Event) -> None:
        """Hold the session from its beginning to its end, which must be in one task."""
        try:
            async with AsyncExitStack() as stack:
                transport: Any = self._factory.server
                if self._factory.headers:
                    http = await stack.enter_async_context(create_mcp_http_client(headers=self._factory.headers))
                    transport = streamable_http_client(transport, http_client=http)
                client = await stack.enter_async_context(Client(transport))
                opened.set_result(client)
                await ended.wait()
        except Exception as error:  # noqa: BLE001 (told to whoever waits; afterwards a call in flight tells it)
            if not opened.done():
                opened.set_exception(error)


def _content(result: CallToolResult) -> str | list[Any]:
    """What a tool gave back: text, or blocks when there are images."""
    blocks: list[Any] = []
    for block in result.content:
        if isinstance(block, ImageContent):
            blocks.append(image_block(block.data)["image"])
        else:
            said = block.text if isinstance(block, TextContent) else block.model_dump_json(exclude_none=True)
            blocks.append({"type": "text", "text": said})
    if any(isinstance(block, Image.Image) for block in blocks):
        return blocks
    return "\n".join(block["text"] for block in blocks)


def _cause(error: BaseException) -> str:
    """The innermost cause: the SDK raises groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
