"""The conformance tests of integrations, which ``agentlightning.testing.agent`` offers."""
