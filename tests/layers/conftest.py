"""Fixtures for the layer tests."""

import pytest
import torch


@pytest.fixture
def rng(generator) -> torch.Generator:
    """Each draw of a test differs from the one before; each test starts alike."""
    return generator(20180819)
