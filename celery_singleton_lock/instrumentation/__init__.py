"""Where events go: one small file per sink."""
