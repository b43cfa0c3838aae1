"""Library: configuration files, and the parts of a run made from them."""
