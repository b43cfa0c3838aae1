"""The plugins that ship with Lightning: stores, tracers, gateway, strategies, trackers, commands and the demo."""
