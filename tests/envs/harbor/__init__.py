"""Tests of Harbor tasks."""
