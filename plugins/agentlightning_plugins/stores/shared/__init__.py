"""Shared by stores."""
