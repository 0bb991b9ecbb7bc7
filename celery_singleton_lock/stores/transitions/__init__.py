"""State transitions of locks as pure functions, shared by the stores without scripts."""
