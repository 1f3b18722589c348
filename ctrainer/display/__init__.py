"""The display of a run: a live line, a line per log, a notebook's page, a picture."""
