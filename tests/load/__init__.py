"""Many tasks, many kills, many leases: what is lost, what ran twice at once, what grows."""
