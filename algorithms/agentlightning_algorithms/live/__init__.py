"""Learning from a process that serves: trials of new versions on a share of its traffic."""
