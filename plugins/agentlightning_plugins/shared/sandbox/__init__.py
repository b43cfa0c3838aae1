"""Runs commands of agents and environments within limits of the operating system."""
