"""What a plan is made for: a module with its inputs, or a decoder; and what puts a plan into them."""
