"""The built-in models, and the script that trained them."""
