"""APO with the newest openai: what depends on its client; ``main`` runs all tests of APO."""

from __future__ import annotations

from tests.algorithms.test_apo import (
    server,
    test_a_configuration_file_and_environment_variables_are_enough_to_run_apo,
    test_a_failing_model_call_is_retried_and_then_skipped,
)

__all__ = [
    "server",
    "test_a_configuration_file_and_environment_variables_are_enough_to_run_apo",
    "test_a_failing_model_call_is_retried_and_then_skipped",
]
