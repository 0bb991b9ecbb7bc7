"""What a type checker sees of the public API."""
