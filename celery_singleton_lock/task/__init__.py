"""A singleton task in the worker: acquire, run the body, settle the lease."""
