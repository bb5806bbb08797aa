"""Browsers: agents that see a page and act on it. See docs/browser.md."""

from agentrl.envs.browser.chromium import Chromium
from agentrl.envs.browser.environment import BrowserEnvironment
from agentrl.envs.browser.tasks import Browser, BrowserTask

__all__ = ["Browser", "BrowserEnvironment", "BrowserTask", "Chromium"]
