"""What a new user does: the README's and the documentation's own examples and commands."""
