"""The contents of a message: the header, with the terms of a claim, and values."""
