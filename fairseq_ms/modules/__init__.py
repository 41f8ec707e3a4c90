"""Layers shared by the architectures; nothing here knows a registry or a command line."""
