"""What things cost, as numbers that are the same on every machine: no time is measured here."""
