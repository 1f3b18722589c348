"""Groups of processes: torch's process groups as backends of a Communicator."""
