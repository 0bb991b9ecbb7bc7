"""A real worker that runs no-ops: what each lock adds to a task, and to its publishing."""
