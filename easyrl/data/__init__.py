"""Rows to prompts, and groups to packed micro-batches."""
