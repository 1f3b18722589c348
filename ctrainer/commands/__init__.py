"""Commands of the command line that belong to no other package."""
