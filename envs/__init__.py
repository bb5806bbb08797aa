"""Ready-made environments, importable as `agentrl.envs`; each is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of it
    from agentrl.envs.browser import Browser as Browser
    from agentrl.envs.harbor import Harbor as Harbor
    from agentrl.envs.openenv import OpenEnv as OpenEnv
    from agentrl.envs.ors import ORS as ORS
    from agentrl.envs.plots import PlotReading as PlotReading

_PUBLIC = {
    "Browser": "agentrl.envs.browser",
    "Harbor": "agentrl.envs.harbor",
    "ORS": "agentrl.envs.ors",
    "OpenEnv": "agentrl.envs.openenv",
    "PlotReading": "agentrl.envs.plots",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'agentrl.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
