"""Training records: every token that weights were trained on, and why each other rollout was not used."""
