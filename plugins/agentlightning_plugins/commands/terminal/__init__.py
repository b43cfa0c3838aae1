"""Library: opening a store from the command line, and printing at a terminal."""
