"""How a call on a buffer is made: its arguments, its way to the servers, its outcome, its turn."""
