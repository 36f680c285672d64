"""Exceptions of cutlass_ops. Every message says what was expected, what came, and the remedy."""

from __future__ import annotations

__all__ = ["BuildError", "ChainError", "CudaError", "CutlassOpsError", "InstallationError", "NoPlanError", "UnsupportedDeviceError"]


class CutlassOpsError(Exception):
    """Base class of the package's own exceptions."""


class ChainError(CutlassOpsError, SyntaxError):
    """A chain uses a construct that cannot be traced into an epilogue visitor tree."""


class BuildError(CutlassOpsError):
    """Kernels could not be built."""


class InstallationError(CutlassOpsError):
    """The installed kernels are incomplete, damaged, unverified or do not fit this version of the package."""


class NoPlanError(CutlassOpsError, ValueError):
    """No plan serves the call; the message gives the reason against each."""


class UnsupportedDeviceError(CutlassOpsError, RuntimeError):
    """The tensor's GPU is none that the shipped kernels run on."""


class CudaError(CutlassOpsError, RuntimeError):
    """A CUDA driver call failed."""
