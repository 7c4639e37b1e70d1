"""How bytes reach a segment: one file a transport, `choose` decides for each segment."""
