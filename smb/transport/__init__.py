"""How bytes reach a segment. Each transport has a file; `choose` decides which one a segment uses."""
