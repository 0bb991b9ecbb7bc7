"""A singleton task in the worker: acquire, run the body, release the lease."""
