"""The base of all servers: a server with limits, reading of bodies, and checks of the sender of a request."""
