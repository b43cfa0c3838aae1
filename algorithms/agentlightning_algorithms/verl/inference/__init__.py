"""The rollout backend ``transformers``: verl's inference replicas on policy servers."""
