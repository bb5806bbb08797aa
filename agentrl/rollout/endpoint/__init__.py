"""Agents that own their loop: an OpenAI-compatible endpoint in front of a generator that records every token."""
