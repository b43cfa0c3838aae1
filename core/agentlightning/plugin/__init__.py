"""The plugin host: hooks, components and the registry of what is installed."""
