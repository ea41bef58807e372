"""Several processes as ranks of one world: starting them, their shared memory, and their end."""
