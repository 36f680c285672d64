"""Tests that need two Hopper GPUs in one machine."""
