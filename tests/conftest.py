from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

TIERS = ("dist", "gpu", "cluster")


@pytest.fixture
def generator() -> Callable[..., torch.Generator]:
    """`generator(seed)`: a torch.Generator of its own, so that no test depends on another's draws."""
    import torch

    def make(seed: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without another tier's marker is a unit test; gpu tests are skipped where there is no GPU."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("gpu"):
            import torch

            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
