"""A policy whose weights are trained on this machine: rows, model, sampling, update and server."""
