"""The package's version, where a build can read it without importing PyTorch."""

__version__ = "0.2.0"
