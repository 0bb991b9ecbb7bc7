"""Benchmarks: run by `make bench`, never collected as tests, and nothing in here asserts a time."""
