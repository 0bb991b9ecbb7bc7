"""Small wrong changes of the package, each of which a test must catch (``make mutants``)."""
