"""How a call on a buffer is made: its arguments, its path to the servers, its outcome, its place in the order."""
