"""Settings, and sizes and addresses as people write them."""
