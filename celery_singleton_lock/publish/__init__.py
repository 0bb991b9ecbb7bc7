"""Publishing a singleton task: message header, claim, duplicates."""
