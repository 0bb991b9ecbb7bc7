"""What a task costs in a worker that sends events, and what these cost `singleton serve`."""
