"""Library: intervals and tests for comparing rewards."""
