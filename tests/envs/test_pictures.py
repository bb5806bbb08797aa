"""Pictures that servers send are read in one place, with the formats that may be read."""

from __future__ import annotations

import base64

import pytest
from mcp.types import CallToolResult, ImageContent

from agentrl.envs.mcp import _content
from agentrl.envs.openenv.content import observation_content, result_content
from agentrl.envs.openenv.protocol import ProtocolError as OpenEnvError
from agentrl.envs.ors.wire import ProtocolError as ORSError
from agentrl.envs.ors.wire import read_blocks
from agentrl.errors import ImageError

POSTSCRIPT = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n%%EndComments\nshowpage\n").decode()
BLOCK = {"type": "image", "data": POSTSCRIPT, "mimeType": "image/png"}


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda: observation_content({"screen": f"data:image/png;base64,{POSTSCRIPT}"}), OpenEnvError),
        (lambda: result_content({"content": [BLOCK]}), OpenEnvError),
        (lambda: read_blocks([BLOCK], "the answer"), ORSError),
        (lambda: _content(CallToolResult(content=[ImageContent(**BLOCK)])), ImageError),
    ],
    ids=["an OpenEnv observation", "an OpenEnv result", "ORS", "MCP"],
)
def test_a_picture_whose_format_runs_programs_is_not_opened(read, error):
    """PIL hands PostScript to Ghostscript; what a server sends must not choose that."""
    with pytest.raises(error, match="cannot be"):
        read()
