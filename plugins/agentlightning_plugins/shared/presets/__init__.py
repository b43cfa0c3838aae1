"""Presets of coding agents, as data: one YAML file each."""
