"""Rollouts for verl: verl's agent loop over our store, runners and gateway."""
