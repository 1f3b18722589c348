"""A trainer whose insides are C."""

__version__ = "0.1.0"
