"""The price of bf16: operators that are run in it, and the casts of autocast."""
