"""The algorithm ``live``: learning from the traffic of a serving process."""
