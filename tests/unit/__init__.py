"""The pure parts: no server; the clock is manual where time matters."""
