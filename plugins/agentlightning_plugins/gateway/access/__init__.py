"""Which attempt a call belongs to, and whether that attempt may still make calls."""
