"""verl's trainers, with agents."""
