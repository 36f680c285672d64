"""The package's version, in a module that needs nothing: the build of a wheel reads it without PyTorch."""

__version__ = "0.1.0"
