"""Conformance tests and fakes for plugin authors. Import from its modules."""
