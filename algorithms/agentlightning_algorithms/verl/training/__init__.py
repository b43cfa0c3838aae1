"""verl's trainers, adapted to rollouts of agents."""
