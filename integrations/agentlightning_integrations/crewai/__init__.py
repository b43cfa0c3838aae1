"""CrewAI."""
