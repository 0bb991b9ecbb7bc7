"""Redlock: locks by majority over independent Redis nodes."""
