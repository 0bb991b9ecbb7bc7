"""What integration tests work with: real processes, a journal that task bodies write, servers."""
