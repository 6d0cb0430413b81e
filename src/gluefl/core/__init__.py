"""The server's half of a round, for a simulation and for a real federation alike."""
