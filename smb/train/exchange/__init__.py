"""Parts that schemes share: rounds, turns, the elastic force, additions that count exactly once."""
