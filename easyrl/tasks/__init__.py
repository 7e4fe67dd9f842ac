"""The named presets: where a task's prompts come from and which reward scores them."""
