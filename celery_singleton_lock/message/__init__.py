"""What is in a message: the header, with the terms of a claim, and values that pass through."""
