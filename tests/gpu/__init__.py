"""Tests that need a Hopper GPU."""
