"""Bad input: what foreign publishers send, and passwords that must not be shown."""
