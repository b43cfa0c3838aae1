"""Policy backends: the servers that sample the trained policy."""
