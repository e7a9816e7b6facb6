"""The models that plans are made for: a module with its inputs, or a decoder. `applying` puts a plan into them."""
