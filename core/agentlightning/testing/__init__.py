"""What plugin authors test with: conformance kits and fakes. Import from its modules."""
