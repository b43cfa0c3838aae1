"""``agl doctor``: runs one rollout of an agent and says which check between it and training is broken."""
