"""Other people's arrays as addresses, and the element types."""
