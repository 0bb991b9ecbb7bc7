"""The fault campaign: real workers under faults, a checker, and locks broken on purpose."""
