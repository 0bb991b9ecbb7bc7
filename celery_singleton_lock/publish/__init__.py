"""Publishing a singleton task: its claim, or the earlier call that answers it."""
