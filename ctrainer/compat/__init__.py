"""Other packages' names over the engine."""
