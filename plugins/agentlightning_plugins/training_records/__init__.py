"""Training records: every token that weights were trained on, and the reason for each rollout that was left out.

:mod:`~agentlightning_plugins.training_records.record` has the records and their form as spans,
:mod:`~agentlightning_plugins.training_records.account` has what algorithms share when they make them,
:mod:`~agentlightning_plugins.training_records.query` reads them from a store.
"""
