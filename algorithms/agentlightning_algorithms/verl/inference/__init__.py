"""Inference for verl: the rollout backend ``transformers``, and the weights of vLLM on a CPU."""
