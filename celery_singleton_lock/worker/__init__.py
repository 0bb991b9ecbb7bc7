"""The worker parent: bootstep, request class, shared memory, and renewal for pool children."""
