"""Systems that others use for the same: a file each, found by its CONTENDERS. README.md says what is behind them."""
