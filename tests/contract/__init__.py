"""The contract of the stores, on each of them, and what is special about Redis."""
