"""Ready-made tools, importable as `agentrl.tools`. See docs/sandboxes.md."""

from agentrl.tools.calculator import calculate
from agentrl.tools.fetch import FetchTool
from agentrl.tools.files import FileTool
from agentrl.tools.images import ImageTool
from agentrl.tools.python import PythonTool
from agentrl.tools.search import SearchTool
from agentrl.tools.shell import ShellTool

__all__ = ["FetchTool", "FileTool", "ImageTool", "PythonTool", "SearchTool", "ShellTool", "calculate"]
