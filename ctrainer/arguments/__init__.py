"""The arguments of a run: fields, their table, checks, and what each family means."""
