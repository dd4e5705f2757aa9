"""What ranks must agree on, and sums over them."""
