"""The parts of a lock, one by one: operations, renewal, memory, imports, and what must not grow."""
