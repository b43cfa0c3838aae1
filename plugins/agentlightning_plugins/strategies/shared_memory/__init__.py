"""The strategy ``shm``."""
