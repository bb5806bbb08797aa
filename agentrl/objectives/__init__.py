"""Objectives: pure tensor functions without trainer state."""
