"""Tests that count what a machine has need one worker; pytest-xdist 3.8 with pytest 9.2 silently drops such groups."""

import pytest


@pytest.mark.xdist_group("alone")
def test_groups_of_tests_are_known_to_the_workers(request):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("these tests are not spread over workers in groups")
    assert request.node.nodeid.endswith("@alone")
