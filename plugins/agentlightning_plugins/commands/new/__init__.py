"""``agl new``: the first files of a plugin or an agent."""
