"""What publishing with a claim costs: single calls, shuffled, and where the time of ours goes."""
