"""``agl doctor``: runs one rollout of an agent and reports which requirements of training it fails."""
