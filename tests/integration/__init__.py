"""Tests on real worker processes, brokers and stores."""
