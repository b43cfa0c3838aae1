"""``agl doctor``: runs one rollout of an agent and says which link between it and training is broken."""
