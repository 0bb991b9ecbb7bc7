"""The Grafana board with the data of a real load, as a picture for the documentation."""
