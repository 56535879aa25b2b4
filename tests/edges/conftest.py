"""The model that ships with attnflow, loaded once a module."""

import pytest

import attnflow as af


@pytest.fixture(scope="module")
def bundled() -> af.Model:
    return af.load("verb-number")
