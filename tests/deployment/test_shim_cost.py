"""What a message costs a site's node ('make test-deployment')."""

from pathlib import Path

import pytest

from simulations.benchmarks.shim import measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_message_costs_far_less_than_with_a_client_app_that_imports_torch(tmp_path: Path) -> None:
    cost = measure(tmp_path)
    print(f"ours {cost.ours:.3f} s, plain {cost.plain:.3f} s, ratio {cost.ratio:.1f}")
    assert cost.ratio > 5
