"""What ctrainer needs of each framework: forward, backward, parameters."""
