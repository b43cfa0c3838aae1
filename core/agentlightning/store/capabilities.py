"""Optional capabilities of stores, and names that all users of a store share."""

from typing import Final, TypedDict

LIVE_SUFFIX: Final = ".live"
"""The run ``<run>.live`` holds the states and candidates of a run's live learning."""


class StoreCapabilities(TypedDict):
    """Optional capabilities of a store."""

    thread_safe: bool
    """Whether several threads and event loops may call the store."""
    durable: bool
    """Whether acknowledged writes survive the end of the process."""
    otlp_traces: bool
    """Whether the store accepts OTLP over HTTP at ``otlp_traces_endpoint()``."""
