"""Training records: every token that weights were trained on, and the reason why each other rollout was not used.

:mod:`~agentlightning_plugins.shared.training_records.record` has the records and their form as spans,
:mod:`~agentlightning_plugins.shared.training_records.account` has the helpers with which algorithms create records,
:mod:`~agentlightning_plugins.shared.training_records.query` reads them from a store.
"""
