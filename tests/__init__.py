"""The tests: real servers, real workers, no mock of either."""
