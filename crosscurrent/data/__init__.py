"""What a data loader reads."""
