"""Helpers for tests of agentrl and of its users: scripted generator, tiny models, row invariants."""
